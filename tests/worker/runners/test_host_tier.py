"""Blocks of the torch runner on two tiers: whatever goes out, comes back, forks, ends or gives way, every output is
that of a pool that never evicts, token by token."""

from collections.abc import Callable

import pytest
import torch

from octavo.blockmgr.ids import PrefixCache
from octavo.model import CausalLM, ModelConfig
from octavo.model.attention.host_blocks import HostBlocks
from octavo.model.attention.kv_pool import kv_block_bytes
from octavo.model.invariant import make_invariant
from octavo.worker.runners.oracle.model import OracleModel
from octavo.worker.runners.torch.runner import TorchRunner, TorchRunnerConfig
from tests.support.worker.host_traffic import drive
from tests.support.worker.scheduling import World, WorldConfig, key

pytestmark = pytest.mark.usefixtures("one_thread")
VOCAB, BLOCK = 60, 4
CONFIG = ModelConfig(
    vocab_size=64,
    hidden_size=128,
    intermediate_size=96,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=32,
    max_position_embeddings=128,
    tie_word_embeddings=True,
)
MakeWorld = Callable[..., World]


@pytest.fixture(params=["sdpa", "invariant"])
def make_world(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> MakeWorld:
    """With the kernels of every day, and with those of deterministic mode."""
    backend = request.param
    model = CausalLM.random(CONFIG, seed=4)
    for parameter in model.parameters():
        parameter.data *= 8
    if backend == "invariant":
        make_invariant(model, max_positions=64)

    def make(*, num_blocks: int, num_host_blocks: int, max_in_flight: int = 1, **changes: object) -> World:
        config = WorldConfig(
            num_blocks=num_blocks,
            num_host_blocks=num_host_blocks,
            block_size=BLOCK,
            max_num_seqs=4,
            max_batch_tokens=20,
            max_model_len=48,
            max_in_flight=max_in_flight,
            model=OracleModel(vocab_size=VOCAB, eos_token_ids=()),
            **changes,  # type: ignore[arg-type]
        )
        runner_config = TorchRunnerConfig(
            num_blocks=num_blocks, block_size=BLOCK, max_slots=4, max_model_len=48, vocab_size=VOCAB,
            backend=backend, max_in_flight=max_in_flight,
        )  # fmt: skip
        row_bytes = kv_block_bytes(CONFIG, block_size=BLOCK, dtype=torch.float32)
        host = HostBlocks(num_host_blocks, row_bytes, is_pinned=False, part_bytes=5 * row_bytes)
        runner = TorchRunner(model, runner_config, host_blocks=host)
        monkeypatch.setattr(WorldConfig, "runner", lambda self: runner)
        return World(config)

    return make


@pytest.mark.parametrize("seed", range(6))
def test_any_traffic_gives_the_tokens_of_a_pool_that_never_evicts(make_world: MakeWorld, seed: int) -> None:
    small = make_world(
        num_blocks=14,
        num_host_blocks=(6, 60)[seed % 2],
        max_in_flight=1 + seed // 3,
        max_copies_in=(1, 64)[seed % 2],
        prefix_cache=PrefixCache.OFF if seed == 4 else PrefixCache.ON,
    )
    drive(small, seed, num_events=90, vocab_size=VOCAB)
    assert small.blocks.host.num_copied_out > 0
    assert small.blocks.host.num_copied_in > 0
    ample = make_world(num_blocks=400, num_host_blocks=0)
    for which, asked in small.asked.items():
        ample.add(
            which.handle,
            asked.prompt_ids_T.tolist(),
            temperature=asked.sampling.temperature,
            max_tokens=asked.sampling.max_tokens,
            seed=asked.sampling.seed,
        )
        ample.run()
        got, wanted = small.streams[which].tokens, ample.streams[which].tokens
        is_whole = small.streams[which].finished.reason.name == "LENGTH"  # type: ignore[union-attr]
        assert got == (wanted if is_whole else wanted[: len(got)]), which
    assert ample.blocks.num_evicted_blocks == 0


def test_a_swapped_request_computes_its_last_token_alone(make_world: MakeWorld) -> None:
    world = make_world(num_blocks=20, num_host_blocks=20)
    world.add(1, list(range(3, 24)), max_tokens=8)
    for _ in range(5):
        world.step()
    request = world.scheduler.requests.running[0]
    num_prefill = world.scheduler.counters.num_prefill_tokens
    world.scheduler.requests.preempt(request, world.now_s)
    world.run()
    finished = world.streams[key(1)].finished
    assert finished is not None
    assert (finished.preemptions, finished.swaps) == (1, 1)
    assert world.scheduler.counters.num_prefill_tokens == num_prefill + 1


def test_copies_are_timed(make_world: MakeWorld) -> None:
    world = make_world(num_blocks=20, num_host_blocks=20)
    world.add(1, list(range(3, 24)), max_tokens=8)
    for _ in range(5):
        world.step()
    world.scheduler.requests.preempt(world.scheduler.requests.running[0], world.now_s)
    world.run()
    assert world.scheduler.costs.copy.seconds is not None
    assert 0 < world.scheduler.costs.copy.seconds < 1
