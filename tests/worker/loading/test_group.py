"""A worker of two processes with a half of the model each gives what one with all of it does."""

import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
from prometheus_client import CollectorRegistry, generate_latest

from octavo.wire.messages import Grammar, GrammarKind, Pooling, SamplingParams
from octavo.worker.config import RunnerKind, WorkerConfig
from octavo.worker.loading.group import load_group, place_of_rank
from octavo.worker.loading.loaded import Loaded
from octavo.worker.loading.loader import load_torch
from octavo.worker.metrics import RankCollector
from octavo.worker.runners.group import Constrain, Launch, decode, encode
from octavo.worker.runners.oracle.model import OracleModel
from octavo.worker.scheduler.plan import Chunk, NewRequest, Slot, StepMasks, StepPlan
from tests.support.children import live_children
from tests.support.model.checkpoints import QWEN3, write_tiny_checkpoint
from tests.support.worker.scheduling import World, WorldConfig, key

BLOCK, SLOTS, LEN = 4, 4, 48
FAMILIES: dict[str, dict[str, object]] = {"qwen2": {}, "qwen3": QWEN3}
SAMPLING: list[dict[str, Any]] = [
    {"temperature": 0.0},
    {"temperature": 1.2, "seed": 5},
    {"temperature": 0.0, "frequency_penalty": 0.7, "num_logprobs": 2},
    {"temperature": 0.9, "seed": 6, "top_k": 12, "top_p": 0.9, "bad_words": ((4, 5), (11,))},
]


def config_of(folder: Path, size: int, *, num_blocks: int = 64) -> WorkerConfig:
    return WorkerConfig(
        model=str(folder), gateway_endpoints=(), dtype="float32", num_blocks=num_blocks, block_size=BLOCK,
        host_kv_gib=0.001, max_num_seqs=SLOTS, max_batch_tokens=16, max_model_len=LEN, num_threads=1,
        tensor_parallel_size=size,
    )  # fmt: skip


def load(config: WorkerConfig) -> Loaded:
    start = load_torch if config.tensor_parallel_size == 1 else load_group
    return start(config, lambda _stage, _done, _total: None)


@pytest.fixture(scope="module", params=FAMILIES)
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_checkpoint(tmp_path_factory.mktemp(request.param), **FAMILIES[request.param])


@pytest.fixture(scope="module")
def one(folder: Path) -> Loaded:
    return load(config_of(folder, 1))


@pytest.fixture(scope="module")
def group(folder: Path) -> Iterator[Loaded]:
    loaded = load(config_of(folder, 2))
    yield loaded
    loaded.runner.close()
    assert followers() == []


def followers() -> list[psutil.Process]:
    """Children of this process that are ranks."""
    return live_children("octavo.worker.loading.group")


def outputs(loaded: Loaded, monkeypatch: pytest.MonkeyPatch, *, num_blocks: int, num_host_blocks: int = 0) -> World:
    """Chunks, prefixes that are shared, outputs that fork and, with few blocks, requests that begin again."""
    model = OracleModel(vocab_size=loaded.card.vocab_size, eos_token_ids=loaded.card.eos_token_ids)
    monkeypatch.setattr(WorldConfig, "runner", lambda _self: loaded.runner)
    world = World(
        WorldConfig(
            num_blocks=num_blocks, block_size=BLOCK, max_num_seqs=SLOTS, max_batch_tokens=16, max_model_len=LEN,
            num_host_blocks=num_host_blocks, max_copies_in=3, model=model,
        )
    )  # fmt: skip
    rng = np.random.default_rng(0)
    shared = rng.integers(0, 300, 12).tolist()
    for handle in range(8):
        prompt = shared[: rng.integers(4, 13)] + rng.integers(0, 300, rng.integers(1, 8)).tolist()
        world.add(handle, prompt, max_tokens=int(rng.integers(6, 16)), **SAMPLING[handle % len(SAMPLING)])
    world.add(20, shared, num_outputs=3, max_tokens=9, temperature=1.1)
    world.add(21, shared + shared, num_prompt_logprobs=1, max_tokens=3)
    world.add(22, shared[::-1] + shared, pooling=Pooling.MEAN)
    world.run()
    world.check_quiet()
    return world


@pytest.mark.parametrize("num_blocks", [13, 64])
def test_every_output_of_any_traffic_is_what_one_rank_gives(
    one: Loaded, group: Loaded, num_blocks: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert group.device == "cpu, 2 ranks"
    assert (group.num_blocks, len(followers())) == (one.num_blocks, 1)
    expected, found = (outputs(loaded, monkeypatch, num_blocks=num_blocks) for loaded in (one, group))
    assert {which: stream.tokens for which, stream in found.streams.items()} == {
        which: stream.tokens for which, stream in expected.streams.items()
    }
    assert (found.scheduler.counters.num_preemptions > 0) == (num_blocks == 13)
    assert found.blocks.num_hit_tokens > 0
    for handle in (2, 21):
        theirs, ours = (world.streams[key(handle)] for world in (expected, found))
        for name in ("logprobs", "prompt_logprobs"):
            pairs = zip(getattr(ours, name), getattr(theirs, name), strict=True)
            assert all(abs(left.logprob - right.logprob) < 1e-4 for left, right in pairs)
    assert found.streams[key(22)].embedding == pytest.approx(expected.streams[key(22)].embedding, abs=1e-4)


def test_every_rank_measures_its_steps_for_rank_0(group: Loaded, monkeypatch: pytest.MonkeyPatch) -> None:
    outputs(group, monkeypatch, num_blocks=64)
    assert group.card.tensor_parallel_size == 2
    assert group.read_ranks is not None
    for _ in range(10_000):  # rank 0 does not wait for the other to have written
        first, second = group.read_ranks()
        if first.num_steps == second.num_steps:
            break
        time.sleep(0.005)
    assert first.num_steps == second.num_steps > 10
    for figures in (first, second):
        assert figures.step_s > figures.exchange_s > 0
        assert figures.memory_bytes > 10_000_000
    page = generate_latest(registry_of(group)).decode()
    assert "octavo_tensor_parallel_size 2.0" in page
    assert f'octavo_rank_steps_total{{rank="1"}} {second.num_steps:.1f}' in page
    assert page.count('rank="0"') == page.count('rank="1"') == 4


def test_a_worker_of_one_rank_has_no_rows_of_ranks(one: Loaded) -> None:
    page = generate_latest(registry_of(one)).decode()
    assert "octavo_tensor_parallel_size 1.0" in page
    assert 'rank="' not in page


def registry_of(loaded: Loaded) -> CollectorRegistry:
    """What /metrics says of ranks."""
    registry = CollectorRegistry()
    registry.register(RankCollector(loaded.card.tensor_parallel_size, loaded.read_ranks))
    return registry


def test_every_rank_moves_its_part_of_a_block_to_the_host_and_back(
    one: Loaded, group: Loaded, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert 40 < group.num_host_blocks <= one.num_host_blocks
    assert group.runner.host_blocks.row_bytes * 2 == one.runner.host_blocks.row_bytes  # type: ignore[attr-defined]
    expected = outputs(one, monkeypatch, num_blocks=64)
    found = outputs(group, monkeypatch, num_blocks=13, num_host_blocks=40)
    assert {which: stream.tokens for which, stream in found.streams.items()} == {
        which: stream.tokens for which, stream in expected.streams.items()
    }
    assert found.scheduler.counters.num_swaps > 0
    assert found.blocks.host.num_copied_in > 4


def masked_token(loaded: Loaded, allowed: int) -> int:
    """The token after a prompt whose mask allows one id."""
    sampling = SamplingParams(temperature=0.0, grammar=Grammar(kind=GrammarKind.REGEX, source="a"))
    join = NewRequest(
        slot=Slot(0), request_id="m", token_ids_T=np.arange(5, dtype=np.int32), num_prompt_tokens=5, sampling=sampling
    )
    updates = np.array([[0, 0, 1], [0, 1, 2]], np.int32)
    chunk = Chunk(slot=Slot(0), start=0, num_tokens=5, is_last=True)
    bits = np.zeros((1, -(-loaded.card.vocab_size // 32)), np.int32)
    bits[0, allowed // 32] = 1 << allowed % 32
    loaded.runner.launch(StepPlan(step=1, new_requests=(join,), block_updates_U3=updates, prefill=(chunk,)))
    loaded.runner.constrain(StepMasks(index_N=np.zeros(1, np.int64), bits_NW=bits))
    tokens = [int(loaded.runner.collect().tokens_S[0])]
    decode_step = StepPlan(step=2, decode_slots_S=np.zeros(1, np.int32), decode_positions_S=np.full(1, 5, np.int32))
    loaded.runner.launch(decode_step)
    loaded.runner.constrain(StepMasks(index_N=np.zeros(1, np.int64), bits_NW=np.full_like(bits, -1)))
    return [*tokens, int(loaded.runner.collect().tokens_S[0])]


def test_masks_reach_every_rank(one: Loaded, group: Loaded) -> None:
    for allowed in (3, 30):
        first, second = masked_token(group, allowed)
        assert first == allowed
        assert [first, second] == masked_token(one, allowed)


def test_orders_come_back_as_they_went() -> None:
    plan = StepPlan(step=7, block_updates_U3=np.ones((2, 3), np.int32), decode_slots_S=np.arange(3, dtype=np.int32))
    found = decode(encode(Launch(plan)))
    assert isinstance(found, Launch)
    assert (found.plan.step, found.plan.block_updates_U3.tolist()) == (7, [[1, 1, 1], [1, 1, 1]])
    assert found.plan.decode_slots_S.dtype == np.int32
    found.plan.decode_slots_S[0] = 5  # as rank 0 may, too
    masks = decode(encode(Constrain(StepMasks(index_N=np.arange(2), bits_NW=np.ones((2, 3), np.int32)))))
    assert isinstance(masks, Constrain)
    assert masks.masks.bits_NW.shape == (2, 3)


def test_each_rank_has_a_gpu_of_its_own() -> None:
    assert place_of_rank("cpu", 1, {}) == ("cpu", {})
    for named in ("", "3,1", "GPU-1c2,GPU-77"):
        assert place_of_rank("cuda", 1, {"CUDA_VISIBLE_DEVICES": named}) == ("cuda:1", {})
    parts = {"CUDA_VISIBLE_DEVICES": "MIG-8, MIG-9"}
    assert [place_of_rank("cuda", rank, parts) for rank in (0, 1)] == [
        ("cuda:0", {"CUDA_VISIBLE_DEVICES": "MIG-8"}),
        ("cuda:0", {"CUDA_VISIBLE_DEVICES": "MIG-9"}),
    ]


def test_what_a_group_cannot_be_had_with_is_refused_before_anything_starts(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    good = config_of(folder, 2)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.setattr("torch.cuda.device_count", lambda: 1)
    for changes, reason in (
        ({"device": "cuda"}, "tensor_parallel_size 2 needs a GPU for each rank, and torch sees 1"),
        ({"device": "cuda:1"}, "the device is cuda:1, and 2 ranks take the first 2 GPUs: give cuda, and CUDA_VISIBLE_"),
        ({"runner": RunnerKind.ORACLE}, "the oracle has nothing to cut"),
    ):
        with pytest.raises(ValueError, match=reason):
            load(replace(good, **changes))  # type: ignore[arg-type]
    reason = "tensor_parallel_size 3 does not fit the model: config.json: num_attention_heads: 4 cannot be divided"
    with pytest.raises(ValueError, match=reason):
        load(replace(good, tensor_parallel_size=3))
    assert len(followers()) <= 1  # of the group that other tests share
