"""Steps whose kernels overlap: their cuts, and their logits against the way by a library's products, on a Hopper
GPU alone."""

import pytest
import torch

pytest.importorskip("triton", reason="triton is not installed")

from bench.shapes import PUBLISHED
from octavo.model import CausalLM, KvPool, ModelConfig
from octavo.model.gpu.autotune import Autotuner, Cublas, candidates
from octavo.model.gpu.decode_step import DecodeStep
from octavo.model.gpu.mixed_step import MixedInputs, MixedStep
from octavo.model.gpu.overlapping_layers import (
    OVERLAPPING_SIZES,
    all_cuts_of,
    fits_overlapping,
    overlapping_cuts_of,
    overlapping_room,
)
from octavo.model.gpu.state import RowState
from octavo.model.gpu.weights import GpuWeights
from octavo.model.kernels.attention.prefill import list_last_tiles, list_tiles
from octavo.model.kernels.products.hopper import BLOCK
from octavo.model.kernels.products.invariant import Splits
from octavo.model.parallel import config_of_rank

IS_HOPPER = torch.cuda.is_available() and torch.cuda.get_device_capability() == (9, 0)
MOST_SHARED_BYTES = 232_448
S, M, CONTEXT = 16, 24, 300
CONFIG = {
    "model_type": "qwen2", "hidden_size": 384, "intermediate_size": 4864, "num_hidden_layers": 3,
    "num_attention_heads": 6, "num_key_value_heads": 2, "vocab_size": 512, "max_position_embeddings": 512,
    "rms_norm_eps": 1e-6, "rope_theta": 10000.0, "tie_word_embeddings": True,
}  # fmt: skip
QWEN3 = {"model_type": "qwen3", "head_dim": 64}
WIDE = {"hidden_size": 3584, "intermediate_size": 4736, "num_attention_heads": 28, "num_key_value_heads": 4}


@pytest.mark.parametrize("size", OVERLAPPING_SIZES)
@pytest.mark.parametrize("shape", PUBLISHED)
def test_every_shape_has_cuts_that_a_multiprocessor_holds_and_sums_of_the_deterministic_mode(
    shape: str, size: int
) -> None:
    config, cuts = PUBLISHED[shape].config, all_cuts_of(PUBLISHED[shape].config, size)
    D, I, A = config.hidden_size, config.intermediate_size, config.num_attention_heads * config.head_dim
    C = A + 2 * config.num_key_value_heads * config.head_dim
    matrices = {"qkv": (C, D), "output": (D, A), "gate_up": (2 * I, D), "down": (D, I)}
    for name, (num_outputs, num_inputs) in matrices.items():
        cut, splits = getattr(cuts, name), Splits.of(num_outputs, num_inputs)
        assert (cut.outputs + cut.tokens) * cut.blocks * BLOCK * 2 * cut.stages < MOST_SHARED_BYTES
        assert splits.inputs % (cut.blocks * BLOCK) == 0
        assert cut.splits == splits.count
        assert cut.ends(num_inputs)


@pytest.mark.parametrize(("shape", "size"), [("0.5B", 8), ("0.5B", 32), ("0.5B", 128), ("7B", 32), ("7B", 64)])
def test_all_programs_of_a_product_are_there_at_once(shape: str, size: int) -> None:
    """On a device of 132 multiprocessors: those of a second turn would fetch no weights while the first compute."""
    config, cuts = PUBLISHED[shape].config, overlapping_cuts_of(PUBLISHED[shape].config, size)
    heads = config.num_attention_heads + 2 * config.num_key_value_heads
    outputs = {
        "qkv": heads * config.head_dim, "output": config.hidden_size, "gate_up": 2 * config.intermediate_size,
        "down": config.hidden_size,
    }  # fmt: skip
    for name, num_outputs in outputs.items():
        cut = getattr(cuts, name)
        program_bytes = (cut.outputs + cut.tokens) * cut.blocks * BLOCK * 2 * cut.stages + 1024 + 64
        at_once = 132 * (233_472 // program_bytes)
        assert cut.num_tiles(size, num_outputs) * cut.splits <= at_once, name


@pytest.mark.parametrize(
    ("shape", "size", "expected"),
    [
        ("0.5B", 8, (2, 6)),
        ("7B", 8, (2, 2)),
        ("14B", 8, (2, 5)),
        ("32B", 8, (2, 5)),
        ("0.5B", 32, (1, 8)),
        ("7B", 32, (1, 3)),
        ("14B", 32, (2, 4)),
        ("32B", 32, (2, 4)),
    ],
)
def test_gate_and_up_are_cut_as_was_measured(shape: str, size: int, expected: tuple[int, int]) -> None:
    gate_up = overlapping_cuts_of(PUBLISHED[shape].config, size).gate_up
    assert gate_up is not None
    assert (gate_up.blocks, gate_up.stages) == expected


@pytest.mark.parametrize("num_ranks", [1, 2])
@pytest.mark.parametrize("shape", ["7B", "14B", "32B", "72B"])
def test_products_of_wide_models_and_many_rows_are_one_turn_of_the_device(shape: str, num_ranks: int) -> None:
    config = config_of_rank(PUBLISHED[shape].config, num_ranks)
    for size in (128, 256):
        cuts = overlapping_cuts_of(config, size)
        assert cuts.gate_up is None
        for name, num_inputs in (("output", config.num_attention_heads * config.head_dim), ("down", 0)):
            cut = getattr(cuts, name)
            if cut is None:
                continue
            assert cut.num_tiles(size, config.hidden_size) * cut.splits <= 132 or cut.splits == 1
            assert cut.ends(num_inputs or config.intermediate_size)
            assert (cut.outputs + cut.tokens) * cut.blocks * BLOCK * 2 * cut.stages < MOST_SHARED_BYTES


@pytest.mark.parametrize("shape", ["0.5B", "7B", "32B"])
def test_the_room_is_enough_for_every_product(shape: str) -> None:
    config, room = PUBLISHED[shape].config, overlapping_room(PUBLISHED[shape].config, "meta")
    for size in OVERLAPPING_SIZES:
        for cuts in (all_cuts_of(config, size), overlapping_cuts_of(config, size)):
            for cut in (cuts.down, cuts.output):
                if cut is None:  # a library's
                    continue
                assert room.parts.numel() >= cut.part_elements(size, config.hidden_size)
                assert len(room.arrived) >= cut.num_tiles(size, config.hidden_size)


def test_without_such_a_device_no_batch_size_is_tried_this_way() -> None:
    config, weight = PUBLISHED["0.5B"].config, torch.empty(64, 896, dtype=torch.bfloat16)
    assert not fits_overlapping(config, weight)
    autotune = Autotuner.find(config, weight)
    assert not [name for size in (2, 8, 64, 256) for name in autotune.try_all(size) if name.startswith("overlapping")]
    assert [autotune.path(256) for _ in autotune.try_all(256)] == [Cublas()]
    assert "overlapping-256" in candidates(config)


@pytest.mark.skipif(not IS_HOPPER, reason="no Hopper GPU")
@pytest.mark.parametrize("changes", [{}, QWEN3, WIDE], ids=["qwen2", "qwen3", "wide"])
@pytest.mark.parametrize(
    ("size", "num_rows"), [(8, 2), (8, 3), (16, 16), (32, 20), (64, 64), (128, 100), (192, 150), (256, 256)]
)
def test_logits_are_those_of_the_way_by_a_library(size: int, num_rows: int, changes: dict[str, object]) -> None:
    config = ModelConfig.from_dict(CONFIG | changes)
    model = CausalLM.random(config, seed=1, dtype=torch.bfloat16, device="cuda")
    kv = KvPool(config, num_rows * M + 1, S, torch.bfloat16, "cuda")
    torch.manual_seed(size)
    keys_and_values = [torch.randn_like(pool) for pool in (*kv.k_pools, *kv.v_pools)]
    state = RowState(num_slots=num_rows, table_width=M, scratch_block=num_rows * M, device=torch.device("cuda"))
    state.table_RM[:num_rows] = torch.randperm(num_rows * M, device="cuda").view(num_rows, M).int()
    positions = torch.randint(0, CONTEXT, (num_rows,), device="cuda", dtype=torch.int32)
    tokens = torch.randint(0, 512, (num_rows,), device="cuda", dtype=torch.int32)
    step = DecodeStep(GpuWeights.take(model, max_positions=512), state, kv, max_batch=256, vocab_size=512)
    step.rows_B[:num_rows] = torch.arange(num_rows, device="cuda", dtype=torch.int32)

    def logits(name: str) -> torch.Tensor:
        for pool, before in zip((*kv.k_pools, *kv.v_pools), keys_and_values, strict=True):
            pool.copy_(before)
        state.position_R[:num_rows], state.last_token_R[:num_rows] = positions, tokens
        step.autotuner.names = {num_rows: name}
        step.run(num_rows)
        return step.logits_BV[:num_rows].clone()

    expected, found = logits("cublas").float(), logits(f"overlapping-{size}")
    assert ((found.float() - expected).norm() / expected.norm()).item() < 3e-2
    assert torch.equal(logits(f"overlapping-{size}"), found)


@pytest.mark.skipif(not IS_HOPPER, reason="no Hopper GPU")
@pytest.mark.parametrize("changes", [{}, QWEN3, WIDE], ids=["qwen2", "qwen3", "wide"])
@pytest.mark.parametrize(
    ("size", "decodes", "lengths"),
    [
        (16, 0, [16]),
        (16, 3, [13]),
        (32, 20, [5, 1]),
        (64, 0, [40, 20]),
        (128, 1, [100]),
        (192, 3, [150]),
        (256, 64, [130, 62]),
    ],
)
def test_steps_of_prompts_and_decodes_have_the_logits_of_the_way_by_a_library(
    size: int, decodes: int, lengths: list[int], changes: dict[str, object]
) -> None:
    """Chunks stand behind a cached context; what they write is what later steps read."""
    config = ModelConfig.from_dict(CONFIG | changes)
    model = CausalLM.random(config, seed=1, dtype=torch.bfloat16, device="cuda")
    num_rows = decodes + len(lengths)
    kv = KvPool(config, num_rows * M + 1, S, torch.bfloat16, "cuda")
    torch.manual_seed(size)
    pools = (*kv.k_pools, *kv.v_pools)
    before = [torch.randn_like(pool) for pool in pools]
    state = RowState(num_slots=num_rows, table_width=M, scratch_block=num_rows * M, device=torch.device("cuda"))
    state.table_RM[:num_rows] = torch.randperm(num_rows * M, device="cuda").view(num_rows, M).int()
    positions = torch.randint(0, 150, (num_rows,), device="cuda", dtype=torch.int32)
    starts = positions[decodes:].tolist()
    state.last_token_R[:num_rows] = tokens = torch.randint(0, 512, (num_rows,), device="cuda", dtype=torch.int32)
    step = DecodeStep(GpuWeights.take(model, max_positions=512), state, kv, max_batch=256, vocab_size=512)
    mixed = MixedStep(step, max_tokens=256)
    firsts = [decodes + sum(lengths[:i]) for i in range(len(lengths))]
    chunks = list(zip(range(decodes, num_rows), firsts, starts, lengths, strict=True))

    def ints(values: object) -> torch.Tensor:
        return torch.tensor(values, dtype=torch.int32, device="cuda")

    inputs = MixedInputs(
        num_decodes=decodes,
        ids_T=ints([-1] * decodes + [7 * i % 512 for i in range(sum(lengths))]),
        row_T=ints([*range(decodes), *(row for row, _, _, count in chunks for _ in range(count))]),
        position_T=ints([0] * decodes + [start + i for _, _, start, count in chunks for i in range(count)]),
        tiles_W4=torch.from_numpy(list_tiles(chunks)).cuda(),
        last_tiles_W4=torch.from_numpy(list_last_tiles(chunks)).cuda(),
        last_S=ints([*range(decodes), *(first + count - 1 for _, first, _, count in chunks)]),
        rows_S=ints([*range(num_rows)]),
        ended_E=ints([row for row, *_ in chunks]),
        position_E=ints([start + count - 1 for _, _, start, count in chunks]),
    )

    def outcome(name: str) -> tuple[torch.Tensor, torch.Tensor]:
        for pool, content in zip(pools, before, strict=True):
            pool.copy_(content)
        state.position_R[:num_rows], state.last_token_R[:num_rows] = positions, tokens
        step.autotuner.names = dict.fromkeys((len(inputs.ids_T), num_rows), name)
        mixed.run(inputs)
        changes = [(pool[:-1].float() - content[:-1].float()) for pool, content in zip(pools, before, strict=True)]
        return step.logits_BV[:num_rows].float(), torch.stack(changes)

    (expected, cached), (found, written) = outcome("cublas"), outcome(f"overlapping-{size}")
    for mine, others in ((found, expected), (written, cached)):
        assert ((mine - others).norm() / others.norm()).item() < 3e-2
    again, _ = outcome(f"overlapping-{size}")
    assert torch.equal(again, found)
