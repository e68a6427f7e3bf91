"""The CUDA runner, kernel by kernel on a GPU or in Triton's interpreter, against the torch runner on the same plans."""

from typing import Any

import numpy as np
import pytest
import torch

pytest.importorskip("triton", reason="triton is not installed")

from model import Qwen2Config, Qwen2ForCausalLM
from model.gpu.weights import GpuWeights
from model.kernels import decode_work
from tests.support.scheduling import World, WorldConfig
from tests.support.twin_runner import TwinRunner
from wire.messages import Sampling
from worker.cuda_graphs import Launching, batch_sizes
from worker.cuda_programs import CudaRunnerConfig
from worker.cuda_runner import CudaRunner
from worker.oracle_model import OracleModel
from worker.plan import Chunk, Join, Slot, StepPlan
from worker.runner import RunnerError
from worker.torch_runner import TorchRunner, TorchRunnerConfig

pytestmark = [
    pytest.mark.filterwarnings("ignore:Conversion of an array:DeprecationWarning"),  # triton's interpreter
    pytest.mark.filterwarnings("ignore:overflow encountered:RuntimeWarning"),
    pytest.mark.filterwarnings("ignore:invalid value encountered:RuntimeWarning"),
]
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
VOCAB = 120
BLOCK = 4
CONFIG = Qwen2Config(
    vocab_size=128,
    hidden_size=64,
    intermediate_size=96,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=16,
    max_position_embeddings=128,
    tie_word_embeddings=True,
)
WISHES: list[dict[str, Any]] = [
    {"temperature": 0.0},
    {"temperature": 1.2},
    {"temperature": 0.0, "frequency_penalty": 0.7, "num_logprobs": 2},
    {"temperature": 0.9, "top_k": 12, "top_p": 0.9},
    {"temperature": 0.8, "min_p": 0.05, "min_tokens": 3, "stop_token_ids": (5, 6)},
]


@pytest.fixture(autouse=True)
def few_items(monkeypatch: pytest.MonkeyPatch) -> None:
    """The interpreter runs programs one after the other, also those without work."""
    if DEVICE == "cpu":
        monkeypatch.setattr(decode_work, "TARGET_ITEMS", 8)
        monkeypatch.setattr(decode_work, "MIN_CHUNK_TOKENS", 16)
        monkeypatch.setattr(decode_work, "CHUNK_MULTIPLE", 16)


def random_model() -> Qwen2ForCausalLM:
    model = Qwen2ForCausalLM.random(CONFIG, seed=4, device=DEVICE)
    for parameter in model.parameters():
        parameter.data *= 8
    return model


def twins(
    *, num_blocks: int = 64, max_slots: int = 4, launching: Launching = Launching.EAGER, max_in_flight: int = 2
) -> TwinRunner:
    """Over pools of NaN, so that any read of what was not written shows."""
    sizes = {"num_blocks": num_blocks, "block_size": BLOCK, "max_slots": max_slots, "max_model_len": 48}
    common = {**sizes, "vocab_size": VOCAB, "eos_token_ids": (7,), "max_in_flight": max_in_flight}
    slow = TorchRunner(random_model(), TorchRunnerConfig(**common))  # type: ignore[arg-type]
    weights = GpuWeights.take(random_model(), max_positions=64)
    fast = CudaRunner(weights, CudaRunnerConfig(**common, launching=launching, max_batch_tokens=32))  # type: ignore[arg-type]
    fast.record(lambda done, total: None)
    slow.kv.k_pool_LPKBH.fill_(torch.nan)
    slow.kv.v_pool_LPKBH.fill_(torch.nan)
    fast.programs.kv.k_pool_LPKBH[:, :-1] = torch.nan
    fast.programs.kv.v_pool_LPKBH[:, :-1] = torch.nan
    return TwinRunner(slow, fast)


def world(runner: TwinRunner, monkeypatch: pytest.MonkeyPatch, *, num_blocks: int) -> World:
    config = WorldConfig(
        num_blocks=num_blocks,
        block_size=BLOCK,
        max_num_seqs=4,
        max_batch_tokens=32,
        max_model_len=48,
        max_in_flight=runner.max_in_flight,
        model=OracleModel(vocab_size=VOCAB, eos_token_ids=()),
    )
    monkeypatch.setattr(WorldConfig, "runner", lambda self: runner)
    return World(config)


@pytest.mark.parametrize("num_blocks", [11, 64])
def test_served_requests_get_the_tokens_of_the_torch_runner(num_blocks: int, monkeypatch: pytest.MonkeyPatch) -> None:
    here = world(twins(num_blocks=num_blocks), monkeypatch, num_blocks=num_blocks)
    rng = np.random.default_rng(0)
    shared = rng.integers(0, VOCAB, 12).tolist()
    for handle in range(7):
        ids = shared[: rng.integers(4, 13)] + rng.integers(0, VOCAB, rng.integers(1, 20)).tolist()
        here.add(handle, ids, max_tokens=int(rng.integers(5, 12)), ignore_eos=True, **WISHES[handle % len(WISHES)])
    here.run()
    here.check_quiet()
    assert all(stream.finished and not stream.finished.error for stream in here.streams.values())
    assert (here.scheduler.counters.num_preemptions > 0) == (num_blocks == 11)
    assert here.blocks.num_hit_tokens > 0


class Hand:
    """Plans written by hand; blocks are dealt in a shuffled order."""

    def __init__(self, runner: TwinRunner) -> None:
        self.runner = runner
        self.free = np.random.default_rng(0).permutation(64).tolist()
        self.tables: dict[int, list[int]] = {}
        self.joins: list[Join] = []
        self.updates: list[tuple[int, int, int]] = []
        self.num_steps = 0

    def join(self, slot: int, tokens: list[int], **sampling: object) -> None:
        self.tables[slot] = []
        wishes = Sampling(**{"temperature": 0.0, **sampling})  # type: ignore[arg-type]
        ids_T = np.asarray(tokens, np.int32)
        join = Join(slot=Slot(slot), request_id="r", token_ids_T=ids_T, num_prompt_tokens=len(tokens), sampling=wishes)
        self.joins.append(join)

    def launch(self, *, decode: dict[int, int] | None = None, prefill: tuple[Chunk, ...] = (), **more: object) -> None:
        decode = decode or {}
        for slot, position in [*decode.items(), *((c.slot, c.start + c.num_tokens - 1) for c in prefill)]:
            while len(self.tables[slot]) * BLOCK <= position:
                self.updates.append((slot, len(self.tables[slot]), self.free[0]))
                self.tables[slot].append(self.free.pop(0))
        self.num_steps += 1
        plan = StepPlan(
            step=self.num_steps,
            joins=tuple(self.joins),
            block_updates_U3=np.asarray(self.updates, np.int32).reshape(-1, 3),
            prefill=prefill,
            decode_slots_S=np.asarray(list(decode), np.int32),
            decode_positions_S=np.asarray(list(decode.values()), np.int32),
            **more,  # type: ignore[arg-type]
        )
        self.joins, self.updates = [], []
        self.runner.launch(plan)

    def step(self, **what: object) -> list[int]:
        self.launch(**what)  # type: ignore[arg-type]
        return self.runner.collect().tokens_S.tolist()


def chunk(slot: int, start: int, num_tokens: int, *, last: bool = True) -> Chunk:
    return Chunk(slot=Slot(slot), start=start, num_tokens=num_tokens, is_last=last)


def prompt(seed: int, length: int) -> list[int]:
    return np.random.default_rng(seed).integers(0, VOCAB, length).tolist()


def test_a_slot_taken_over_a_batch_that_shrinks_and_a_step_of_no_sample() -> None:
    hand = Hand(twins())
    hand.join(0, prompt(0, 5))
    hand.join(2, prompt(1, 9), temperature=0.9, seed=2**63 + 17)
    hand.step(prefill=(chunk(0, 0, 5), chunk(2, 0, 9)))
    hand.join(3, prompt(2, 20), temperature=0.5, seed=3)
    hand.step(decode={0: 5, 2: 9}, prefill=(chunk(3, 0, 8, last=False),))
    assert hand.step(prefill=(chunk(3, 8, 4, last=False),)) == []
    hand.step(decode={0: 6, 2: 10}, prefill=(chunk(3, 12, 8),))
    hand.step(decode={0: 7, 2: 11, 3: 20})
    hand.step(decode={2: 12, 3: 21})
    hand.join(0, prompt(3, 6), temperature=1.1, seed=9)
    hand.step(decode={2: 13, 3: 22}, prefill=(chunk(0, 0, 6),))
    for i in range(4):
        hand.step(decode={0: 6 + i, 2: 14 + i, 3: 23 + i})
    hand.step(decode={3: 27})


def test_two_steps_in_flight_feed_each_other_and_a_third_is_refused() -> None:
    hand = Hand(twins())
    hand.join(1, prompt(4, 7))
    hand.launch(prefill=(chunk(1, 0, 7),))
    for position in range(7, 12):
        hand.launch(decode={1: position})
        hand.runner.collect()
    hand.launch(decode={1: 12})
    with pytest.raises(RunnerError, match="more in flight than 2"):
        hand.runner.fast.launch(StepPlan(step=99))
    hand.runner.collect()
    hand.runner.collect()
    with pytest.raises(LookupError):
        hand.runner.fast.collect()


def test_a_row_that_starts_with_a_decode_and_a_copied_block() -> None:
    hand = Hand(twins())
    hand.join(0, prompt(5, 6))
    hand.step(prefill=(chunk(0, 0, 6),))
    child = [*prompt(5, 6), 11]
    hand.join(1, child)
    shared, source, copy = hand.tables[0][0], hand.tables[0][1], hand.free.pop(0)
    hand.tables[1] = [shared, copy]
    hand.updates = [(1, 0, source), (1, 0, shared), (1, 1, copy)]  # the last of two values for a place is the one
    hand.step(decode={0: 6, 1: 6}, block_copies_C2=np.asarray([[source, copy]], np.int32))
    hand.step(decode={0: 7, 1: 7})


def test_rows_of_nan_are_told_and_leave_the_others_alone() -> None:
    hand = Hand(twins())
    hand.join(0, prompt(6, 5))
    hand.join(1, prompt(7, 5), num_logprobs=1)
    hand.join(2, prompt(8, 5), temperature=0.7, seed=1)
    hand.step(prefill=tuple(chunk(slot, 0, 5) for slot in range(3)))
    for pool in (hand.runner.slow.kv, hand.runner.fast.programs.kv):  # type: ignore[attr-defined]
        pool.k_pool_LPKBH[0, hand.tables[1][0]] = torch.nan
    hand.launch(decode={0: 5, 1: 5, 2: 5})
    slow, fast = hand.runner.slow.collect(), hand.runner.fast.collect()
    assert slow.is_finite_S.tolist() == fast.is_finite_S.tolist() == [True, False, True]
    assert slow.tokens_S[[0, 2]].tolist() == fast.tokens_S[[0, 2]].tolist()


def test_a_plan_without_a_block_is_refused_before_it_writes_anywhere() -> None:
    hand = Hand(twins())
    hand.join(0, prompt(9, 5))
    hand.step(prefill=(chunk(0, 0, 5),))
    bad = StepPlan(step=9, decode_slots_S=np.asarray([0], np.int32), decode_positions_S=np.asarray([8], np.int32))
    with pytest.raises(RunnerError, match="slot 0 has no block for position 8"):
        hand.runner.fast.launch(bad)
    with pytest.raises(RunnerError, match="slot 0 has no block somewhere in positions 6 to 9"):
        hand.runner.fast.launch(StepPlan(step=9, prefill=(chunk(0, 6, 4),)))
    hand.step(decode={0: 5})


def test_batch_sizes_end_with_the_largest() -> None:
    assert batch_sizes(1) == (1,)
    assert batch_sizes(6) == (1, 2, 4, 6)
    assert len(batch_sizes(256)) == 27
    assert batch_sizes(256)[-3:] == (224, 240, 256)
    assert batch_sizes(300)[-3:] == (256, 288, 300)
