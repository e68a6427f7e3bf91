"""Embeddings through the real scheduler: batched with other work, cut into chunks, preempted, cancelled."""

import numpy as np
import pytest

from octavo.wire.messages import Pooling
from octavo.worker.runners.oracle.faults import OracleFaults
from octavo.worker.runners.oracle.model import OracleModel, oracle_embedding, state_vector
from tests.support.worker.scheduling import World, WorldConfig

LAST, MEAN = Pooling.LAST_TOKEN, Pooling.MEAN
PROMPT = [3, 1, 4, 1, 5, 9, 2, 6, 5, 3]


@pytest.mark.parametrize("max_in_flight", [1, 2])
@pytest.mark.parametrize("pooling", [LAST, MEAN])
def test_an_embedding_comes_once_beside_decodes_and_nothing_is_generated(pooling: Pooling, max_in_flight: int) -> None:
    world = World(WorldConfig(max_in_flight=max_in_flight, max_batch_tokens=4))
    world.add(1, [7, 8], max_tokens=9)
    embedded = world.add(2, PROMPT, pooling=pooling)
    world.add(3, [7, 8, 9], max_tokens=9)
    world.run()
    world.check_complete()
    world.check_quiet()
    stream = world.streams[embedded]
    assert stream.embedding == np.float32(oracle_embedding(PROMPT, pooling)).tolist()
    assert stream.finished is not None
    assert (stream.num_started, stream.finished.computed_tokens) == (1, len(PROMPT))
    assert world.scheduler.counters.num_generated_tokens == 18


def test_the_last_token_uses_cached_blocks_and_the_mean_computes_every_token() -> None:
    world = World(WorldConfig())
    computed = {}
    for handle, pooling in enumerate((LAST, LAST, MEAN, MEAN, LAST)):
        key = world.add(handle, PROMPT, pooling=pooling)
        world.run()
        finished = world.streams[key].finished
        assert finished is not None
        computed[handle] = (finished.cached_tokens, finished.computed_tokens)
    world.check_complete()
    world.check_quiet()
    assert computed == {0: (0, 10), 1: (8, 2), 2: (0, 10), 3: (0, 10), 4: (8, 2)}


@pytest.mark.parametrize("max_in_flight", [1, 2])
@pytest.mark.parametrize("pooling", [LAST, MEAN])
def test_a_preempted_embedding_is_the_same(pooling: Pooling, max_in_flight: int) -> None:
    config = WorldConfig(num_blocks=8, max_batch_tokens=3, max_in_flight=max_in_flight, max_num_seqs=3)
    world = World(config)
    embedded = world.add(1, PROMPT, pooling=pooling, priority=-1)
    for _ in range(2):
        world.step()
    world.add(2, [5, 6, 7, 8, 9, 10, 11, 12], priority=1, max_tokens=4)
    world.run()
    world.check_complete()
    world.check_quiet()
    finished = world.streams[embedded].finished
    assert finished is not None
    assert finished.preemptions >= 1
    if pooling is MEAN:
        assert finished.computed_tokens > len(PROMPT)


@pytest.mark.parametrize("pooling", [LAST, MEAN])
def test_a_cancelled_or_late_embedding_leaves_nothing(pooling: Pooling) -> None:
    world = World(WorldConfig(max_batch_tokens=2, max_num_seqs=2, max_in_flight=2))
    cancelled = world.add(1, PROMPT, pooling=pooling)
    late = world.add(2, PROMPT, pooling=pooling, timeout_s=2.5)
    world.step()
    world.cancel(1)
    world.run()
    world.check_complete()
    world.check_quiet()
    assert world.reasons() == {1: "CANCELLED", 2: "DEADLINE"}
    assert (world.streams[cancelled].embedding, world.streams[late].embedding) == (None, None)


def test_a_vector_that_is_not_finite_ends_its_own_request_only() -> None:
    config = WorldConfig(faults=OracleFaults(nan_token_id=41, nan_output_index=-3))
    world = World(config)
    world.add(1, [*PROMPT, 41, 2, 3], pooling=MEAN)
    world.add(2, PROMPT, pooling=MEAN)
    world.add(3, PROMPT, max_tokens=3)
    world.run()
    world.check_quiet()
    assert world.reasons() == {1: "NUMERICAL", 2: "LENGTH", 3: "LENGTH"}
    assert world.streams[world.add(4, [1])].embedding is None


def test_prompts_that_fit_no_pool_are_refused() -> None:
    world = World(WorldConfig(num_blocks=4, block_size=2, model=OracleModel(vocab_size=50, eos_token_ids=(2,))))
    world.add(1, PROMPT, pooling=MEAN)
    world.add(2, PROMPT[:7], pooling=MEAN)
    world.run()
    assert world.reasons() == {1: "EXCEEDS_CAPACITY", 2: "LENGTH"}


def test_sums_of_the_oracle_are_exact_in_float32() -> None:
    vectors = np.asarray([state_vector(0x0123456789ABCDEF * index) for index in range(1000)])
    assert (np.float32(vectors).sum(axis=0) == vectors.sum(axis=0)).all()
