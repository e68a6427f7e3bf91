"""Random wire messages, and the plain ones that many tests start from."""

from hypothesis import strategies as st

from octavo.wire import messages as m
from octavo.wire import peer_messages as p

int32s = st.integers(-(2**31), 2**31 - 1)
counts = st.integers(0, 2**40)
texts = st.text(max_size=20)
finite = st.floats(allow_nan=False, width=64)


def arrays(width: int, max_len: int = 8) -> st.SearchStrategy[bytes]:
    """Bytes of whole elements."""
    return st.integers(0, max_len).flatmap(lambda n: st.binary(min_size=n * width, max_size=n * width))


samplings = st.builds(
    m.SamplingParams,
    temperature=finite,
    top_k=int32s,
    seed=st.integers(0, 2**64 - 1),
    max_tokens=int32s,
    stop_token_ids=st.lists(int32s, max_size=4).map(tuple),
    ignore_eos=st.booleans(),
    num_logprobs=st.none() | st.integers(0, 20),
)
cards = st.builds(
    m.ModelCard,
    name=texts,
    fingerprint=texts,
    architecture=texts,
    dtype=texts,
    max_model_len=counts,
    vocab_size=counts,
    eos_token_ids=st.lists(int32s, max_size=3).map(tuple),
    default_sampling=st.dictionaries(texts, finite, max_size=3),
    tokenizer_digest=texts,
)
capacities = st.builds(
    m.Capacity,
    num_blocks=counts,
    block_size=counts,
    max_num_seqs=counts,
    max_waiting=counts,
    max_batch_tokens=counts,
)
logprobs = st.builds(
    m.TokenLogprobs,
    logprob=finite,
    top_ids=st.lists(int32s, max_size=3).map(tuple),
    top_logprobs=st.lists(finite, max_size=3).map(tuple),
)
finisheds = st.builds(
    m.Finished,
    handle=counts,
    reason=st.sampled_from(m.WireFinishReason),
    stop_token_id=st.none() | int32s,
    error=texts,
    queue_s=finite,
)
kv_events = st.builds(
    m.KvEvent,
    kind=st.sampled_from(m.KvEventKind),
    block_hash=st.binary(max_size=16),
    parent_hash=st.binary(max_size=16),
    token_ids=arrays(4),
    salt=texts,
)


@st.composite
def step_outputs(draw: st.DrawFn) -> m.StepOutput:
    """With arrays that fit together."""
    num_rows = draw(st.integers(0, 5))
    return m.StepOutput(
        epoch=draw(texts),
        seq=draw(counts),
        step=draw(counts),
        handles=draw(st.binary(min_size=8 * num_rows, max_size=8 * num_rows)),
        tokens=draw(st.binary(min_size=4 * num_rows, max_size=4 * num_rows)),
        logprobs=draw(st.dictionaries(counts, st.lists(logprobs, max_size=2), max_size=2)),
        started=tuple(draw(st.lists(counts, max_size=3))),
        finished=tuple(draw(st.lists(finisheds, max_size=2))),
    )


to_gateway = st.one_of(
    st.builds(
        m.Register,
        worker_id=texts,
        epoch=texts,
        card=cards,
        capacity=capacities,
        pid=counts,
        pid_namespace=texts,
        token=texts,
    ),
    st.builds(
        m.TokenizerBundle,
        epoch=texts,
        digest=texts,
        files=st.dictionaries(texts, st.binary(max_size=20), max_size=3),
    ),
    st.builds(m.Heartbeat, epoch=texts, num_steps=counts, has_work=st.booleans(), is_draining=st.booleans()),
    step_outputs(),
    st.builds(m.KvEvents, epoch=texts, events=st.lists(kv_events, max_size=3).map(tuple)),
    st.builds(m.AdminReply, epoch=texts, query_id=counts, violations=st.lists(texts, max_size=2).map(tuple)),
    st.builds(m.Leaving, epoch=texts, reason=texts),
)
to_worker = st.one_of(
    st.builds(m.Welcome, gateway_id=texts, epoch=texts),
    st.builds(m.Refused, epoch=texts, reason=texts),
    st.builds(m.NeedTokenizer, epoch=texts, digest=texts),
    st.builds(
        m.Run,
        handle=counts,
        request_id=texts,
        prompt_ids=arrays(4),
        sampling=samplings,
        priority=int32s,
        cache_salt=texts,
        timeout_s=st.none() | finite,
    ),
    st.builds(m.Cancel, handles=st.lists(counts, max_size=4).map(tuple)),
    st.builds(m.AdminQuery, query_id=counts, audit=st.booleans(), flush_prefix_cache=st.booleans()),
    st.builds(m.Drain, grace_s=finite),
)
to_peer = st.one_of(
    st.builds(p.PeerAbort, call_id=counts, request_id=texts),
    st.builds(p.PeerCancelAll, call_id=counts, tenant=st.none() | texts),
    st.builds(p.PeerCancel, call_id=counts, keys=st.lists(texts, max_size=3).map(tuple)),
    st.builds(p.PeerDrain, call_id=counts, grace_s=st.none() | finite),
    st.builds(p.PeerAskLoad, call_id=counts),
)
peer_replies = st.builds(
    p.PeerReply,
    call_id=counts,
    gateway_id=texts,
    num_ended=counts,
    num_in_flight=counts,
    num_preparing=counts,
    tokens_per_s=finite,
    is_draining=st.booleans(),
)
