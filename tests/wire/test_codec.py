"""The codec: what goes in comes out, and nothing that a peer sends raises anything but ProtocolError."""

import pickle
import struct
from pathlib import Path
from typing import Any, get_args

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from octavo.wire import codec, messages
from octavo.wire import messages as m
from octavo.wire import peer_messages as p
from octavo.wire.codec import (
    MessageTooLarge,
    ProtocolError,
    decode_peer_reply,
    decode_to_gateway,
    decode_to_peer,
    decode_to_worker,
    encode,
)
from octavo.wire.messages import (
    Cancel,
    Heartbeat,
    KvEvent,
    KvEventKind,
    KvEvents,
    Run,
    SamplingParams,
    StepOutput,
    ToGateway,
    TokenizerBundle,
    ToWorker,
    Welcome,
)
from octavo.wire.peer_messages import PeerReply, ToPeer

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
    st.builds(
        m.AdminReply,
        epoch=texts,
        query_id=counts,
        violations=st.lists(texts, max_size=2).map(tuple),
        host=st.none() | st.builds(m.HostBlocks, num_blocks=counts, num_swapped=counts, cells=st.binary(max_size=20)),
    ),
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
    st.builds(m.GatewayLeaving),
)
to_peer = st.one_of(
    st.builds(p.PeerAbort, call_id=counts, request_id=texts),
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


DECODERS = (decode_to_gateway, decode_to_worker, decode_to_peer, decode_peer_reply)


@given(to_gateway)
@settings(max_examples=200)
def test_messages_to_the_gateway_come_out_as_they_went_in(message: ToGateway) -> None:
    assert decode_to_gateway(encode(message)) == message


@given(to_worker)
@settings(max_examples=200)
def test_messages_to_the_worker_come_out_as_they_went_in(message: ToWorker) -> None:
    assert decode_to_worker(encode(message)) == message


@given(to_peer)
@settings(max_examples=50)
def test_questions_of_gateways_come_out_as_they_went_in_and_are_for_no_worker(message: ToPeer) -> None:
    assert decode_to_peer(encode(message)) == message
    for decode in (decode_to_gateway, decode_to_worker, decode_peer_reply):
        with pytest.raises(ProtocolError):
            decode(encode(message))  # type: ignore[operator]


@given(peer_replies)
@settings(max_examples=50)
def test_answers_of_gateways_come_out_as_they_went_in(message: PeerReply) -> None:
    assert decode_peer_reply(encode(message)) == message


@given(to_gateway)
@settings(max_examples=50)
def test_a_worker_does_not_take_what_is_meant_for_a_gateway(message: ToGateway) -> None:
    with pytest.raises(ProtocolError):
        decode_to_worker(encode(message))


def outcome(decode: object, frame: bytes) -> str:
    """What decoding leads to; anything but a message or ProtocolError is raised."""
    try:
        decode(frame)  # type: ignore[operator]
    except ProtocolError:
        return "refused"
    return "taken"


@given(st.binary(max_size=200))
@settings(max_examples=1000)
def test_random_bytes_raise_only_protocol_error(frame: bytes) -> None:
    for decode in DECODERS:
        assert outcome(decode, frame) == "refused"
        outcome(decode, b"\x01" + frame)


@given(to_gateway, st.data())
@settings(max_examples=300)
def test_a_damaged_message_raises_only_protocol_error(message: ToGateway, data: st.DataObject) -> None:
    frame = bytearray(encode(message))
    for _ in range(data.draw(st.integers(1, 4))):
        frame[data.draw(st.integers(0, len(frame) - 1))] = data.draw(st.integers(0, 255))
    cut = data.draw(st.integers(0, len(frame)))
    for damaged in (bytes(frame), bytes(frame[:cut])):
        for decode in DECODERS:
            outcome(decode, damaged)


JSON = st.recursive(
    st.none() | st.booleans() | st.floats() | st.integers(-(2**63), 2**64 - 1) | st.text(max_size=5) | st.binary(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=8,
)


KINDS = sorted(get_args(ToGateway | ToWorker | ToPeer), key=lambda kind: kind.__name__)


@given(st.sampled_from(KINDS), st.data())
@settings(max_examples=500)
def test_known_tags_with_wrong_contents_raise_only_protocol_error(kind: Any, data: st.DataObject) -> None:
    content = {"type": kind.__name__} | {name: data.draw(JSON) for name in kind.__struct_fields__}
    frame = b"\x01" + msgspec.msgpack.encode(content)
    for decode in DECODERS:
        outcome(decode, frame)


@pytest.mark.parametrize(
    "frame",
    [
        b"",
        b"\x01",
        b"\x00" + encode(Cancel(handles=(1,)))[1:],
        b"\x02" + encode(Cancel(handles=(1,)))[1:],
        b"\x01" + b"\x91" * 100_000 + b"\xc0",  # nested a hundred thousand deep
        b"\x01" + b"\x81\xa4type" * 100_000,
        b"\x01" + b"\xdd\xff\xff\xff\xff",  # an array of 2^32 - 1 elements that are not there
        b"\x01" + b"\xdf\xff\xff\xff\xff",
        b"\x01" + b"\xc6\xff\xff\xff\xff",
        b"\x01" + msgspec.msgpack.encode({"type": "Cancel", "handles": [2**64 - 1], "extra": 1}),
        b"\x01" + msgspec.msgpack.encode({"type": "Unknown"}),
        b"\x01" + msgspec.msgpack.encode({"type": "Cancel", "handles": "12"}),
        encode(Cancel(handles=(1,))) + b"\x00",
        b"\x01\x82\xa4type\xa7Welcome\xaagateway_id\xa1\xff",  # bad UTF-8
    ],
)
def test_malformed_frames_are_refused(frame: bytes) -> None:
    assert [outcome(decode, frame) for decode in DECODERS] == ["refused"] * len(DECODERS)


def deep_logprobs(depth: int) -> bytes:
    """A StepOutput whose logprobs row has one element too many, nested deeply: it is skipped, not decoded."""
    head = msgspec.msgpack.encode({"type": "StepOutput", "epoch": "e", "seq": 1, "step": 1})
    row = b"\x94" + msgspec.msgpack.encode(0.5) + b"\x90\x90" + b"\x91" * depth + b"\xc0"
    return b"\x01" + bytes([head[0] + 1]) + head[1:] + msgspec.msgpack.encode("logprobs") + b"\x81\x01\x91" + row


def test_deep_nesting_where_elements_are_skipped_does_not_overflow_the_stack() -> None:
    assert outcome(decode_to_gateway, deep_logprobs(3)) == "taken"
    assert outcome(decode_to_gateway, deep_logprobs(1_000_000)) == "refused"


@pytest.mark.parametrize(
    ("message", "decode"),
    [
        (StepOutput(epoch="e", seq=1, step=1, handles=bytes(7), tokens=bytes(4)), decode_to_gateway),
        (StepOutput(epoch="e", seq=1, step=1, handles=bytes(16), tokens=bytes(4)), decode_to_gateway),
        (StepOutput(epoch="e", seq=1, step=1, handles=bytes(8), tokens=bytes(8)), decode_to_gateway),
        (Run(handle=1, request_id="r", prompt_ids=bytes(5), sampling=SamplingParams()), decode_to_worker),
        (KvEvents(epoch="e", events=(KvEvent(kind=KvEventKind.STORED, token_ids=bytes(3)),)), decode_to_gateway),
    ],
)
def test_arrays_that_do_not_fit_are_refused(message: messages.Message, decode: object) -> None:
    assert outcome(decode, encode(message)) == "refused"


def test_a_pickle_is_bytes_like_any_other(tmp_path: Path) -> None:
    canary = tmp_path / "canary"

    class Bomb:
        def __reduce__(self) -> tuple[object, tuple[str, str]]:
            return open, (str(canary), "w")

    for protocol in range(pickle.HIGHEST_PROTOCOL + 1):
        frame = pickle.dumps(Bomb(), protocol=protocol)
        for decode in DECODERS:
            assert outcome(decode, frame) == "refused"
            assert outcome(decode, b"\x01" + frame) == "refused"
    assert not canary.exists()


def test_a_message_beyond_the_limit_is_not_sent() -> None:
    with pytest.raises(MessageTooLarge):
        encode(TokenizerBundle(epoch="e", digest="d", files={"tokenizer.json": bytes(codec.MAX_FRAME_BYTES)}))


def test_a_worker_takes_smaller_frames_than_a_gateway() -> None:
    frame = encode(
        Run(handle=1, request_id="r", prompt_ids=bytes(codec.MAX_TO_WORKER_BYTES), sampling=SamplingParams())
    )
    assert outcome(decode_to_worker, frame) == "refused"


def test_a_frame_is_the_version_then_msgpack_with_a_tag() -> None:
    frame = encode(Welcome(gateway_id="g", epoch="e"))
    assert frame[0] == codec.WIRE_VERSION
    assert msgspec.msgpack.decode(frame[1:]) == {"type": "Welcome", "gateway_id": "g", "epoch": "e"}


def test_not_a_number_travels_as_it_is() -> None:
    back = decode_to_worker(
        encode(Run(handle=1, request_id="r", prompt_ids=b"", sampling=SamplingParams(top_p=float("nan"))))
    )
    assert isinstance(back, Run)
    assert struct.pack("<d", back.sampling.top_p) == struct.pack("<d", float("nan"))


def test_defaults_are_left_out_and_filled_in() -> None:
    beat = Heartbeat(epoch="e", num_steps=1, has_work=False)
    assert b"num_waiting" not in encode(beat)
    assert decode_to_gateway(encode(beat)) == beat
