"""An output that another worker began goes on here with exactly the tokens that it would have had."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from octavo.wire.messages import Finished, Run, SamplingParams, WireFinishReason
from octavo.worker.runners.oracle.model import OracleModel, oracle_tokens
from octavo.worker.scheduler.plan import RequestKey
from tests.support.worker.scheduling import GATEWAY, Stream, World, WorldConfig, key

MODEL = OracleModel(vocab_size=50, eos_token_ids=(2,), eos_every=9)


def resume(world: World, run: Run) -> RequestKey:
    """What the worker does with such a Run."""
    name = RequestKey(GATEWAY, run.handle)
    world.streams[name] = Stream()
    world.scheduler.add(GATEWAY, run, now_s=world.now_s)
    return name


def refusal_of(run: Run) -> str:
    """What the scheduler says to a Run that it does not take at all."""
    world = World(WorldConfig())
    name = resume(world, run)
    world.run()
    finished = world.streams[name].finished
    assert finished is not None
    assert (finished.reason, finished.error) == (WireFinishReason.ERROR, "INVALID_FIELD")
    assert (world.scheduler.counters.num_refused, world.scheduler.counters.num_accepted) == (1, 0)
    return finished.detail


def run_of(handle: int, prompt: list[int], given_before: list[int], sampling: SamplingParams) -> Run:
    ids = np.asarray(prompt + given_before, "<i4").tobytes()
    return Run(
        handle=handle, request_id=f"r{handle}", prompt_ids=ids, sampling=sampling, num_resumed_tokens=len(given_before)
    )


@settings(max_examples=60)
@given(
    prompt=st.lists(st.integers(3, 49), min_size=1, max_size=9),
    max_tokens=st.integers(2, 20),
    min_tokens=st.integers(0, 8),
    seed=st.integers(0, 1 << 40),
    share=st.floats(0, 1),
    max_in_flight=st.sampled_from([1, 2]),
    chunk=st.sampled_from([None, 2]),
)
def test_the_rest_is_what_a_single_worker_would_have_said(
    prompt: list[int], max_tokens: int, min_tokens: int, seed: int, share: float, max_in_flight: int, chunk: int | None
) -> None:
    sampling = SamplingParams(temperature=0.0, seed=seed, max_tokens=max_tokens, min_tokens=min(min_tokens, max_tokens))
    whole = oracle_tokens(prompt, sampling, model=MODEL, max_total_tokens=33)
    cut = int(share * (len(whole) - 1))
    world = World(WorldConfig(model=MODEL, max_in_flight=max_in_flight, max_chunk_tokens=chunk))
    name = resume(world, run_of(1, prompt, whole[:cut], sampling))
    world.run()
    stream = world.streams[name]
    assert stream.tokens == whole[cut:]
    assert isinstance(stream.finished, Finished)
    assert stream.finished.completion_tokens == len(whole)
    assert stream.finished.prompt_tokens == len(prompt)
    assert not world.blocks.audit().violations


def test_a_resumed_output_survives_preemption_too() -> None:
    world = World(WorldConfig(num_blocks=8, model=OracleModel(vocab_size=50)))
    sampling = SamplingParams(temperature=0.0, seed=5, max_tokens=8)
    expected = {}
    for handle in (1, 2, 3):
        prompt = [10 + handle, 20, 30]
        whole = oracle_tokens(prompt, sampling, model=world.config.model, max_total_tokens=17)
        expected[resume(world, run_of(handle, prompt, whole[:3], sampling))] = whole[3:]
    world.run()
    assert world.scheduler.counters.num_preemptions > 0
    assert {name: world.streams[name].tokens for name in expected} == expected


def test_tokens_that_the_cache_has_of_the_output_are_not_told_as_cached_ones_of_the_prompt() -> None:
    world = World(WorldConfig(block_size=2, model=OracleModel(vocab_size=50)))
    sampling = SamplingParams(temperature=0.0, seed=5, max_tokens=8)
    prompt = [11, 20, 30]
    resume(world, run_of(1, prompt, [], sampling))
    world.run()
    whole = oracle_tokens(prompt, sampling, model=world.config.model, max_total_tokens=17)
    again = resume(world, run_of(2, prompt, whole[:5], sampling))
    world.run()
    finished = world.streams[again].finished
    assert finished is not None
    assert world.scheduler.counters.num_cached_tokens == 6
    assert finished.cached_tokens == len(prompt)


@pytest.mark.parametrize("num_resumed", [-1, 4])
def test_a_run_that_resumes_what_it_does_not_carry_is_refused(num_resumed: int) -> None:
    run = Run(
        handle=1,
        request_id="r1",
        prompt_ids=np.asarray([5, 6, 7], "<i4").tobytes(),
        sampling=SamplingParams(),
        num_resumed_tokens=num_resumed,
    )
    assert refusal_of(run) == f"num_resumed_tokens: {num_resumed} of 3 tokens"


@pytest.mark.parametrize("weight", [-1, 0, 1001])
def test_a_weight_that_no_tenant_can_have_is_refused(weight: int) -> None:
    run = Run(
        handle=1, request_id="r", prompt_ids=np.asarray([5], "<i4").tobytes(), sampling=SamplingParams(), weight=weight
    )
    assert refusal_of(run) == f"weight: {weight} is not in [1, 1000]"


@pytest.mark.parametrize(("prompt", "given_before", "says"), [([], [5], "prompt_ids"), ([5], [6, 7], "num_resumed")])
def test_nothing_is_resumed_without_a_prompt_or_beyond_its_end(
    prompt: list[int], given_before: list[int], says: str
) -> None:
    world = World(WorldConfig())
    name = resume(world, run_of(1, prompt, given_before, SamplingParams(max_tokens=2)))
    world.run()
    finished = world.streams[name].finished
    assert finished is not None
    assert (finished.reason, finished.error) == (WireFinishReason.ERROR, "INVALID_FIELD")
    assert says in finished.detail


def test_a_plain_request_resumes_nothing() -> None:
    world = World(WorldConfig())
    world.scheduler.add(GATEWAY, run_of(1, [4, 5], [], SamplingParams(max_tokens=2)), now_s=0.0)
    request = world.scheduler.requests.find(key(1))
    assert request is not None
    assert (request.num_prompt_tokens, request.num_given_tokens) == (2, 2)
