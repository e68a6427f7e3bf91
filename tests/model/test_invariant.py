"""A model on a CPU in deterministic mode: right, and the same bits for a token in any step."""

from pathlib import Path

import numpy as np
import pytest
import torch
from torch.nn import functional as F

from octavo.model import CausalLM, dense_logits
from octavo.model.attention.interface import get_backend, make_inputs
from octavo.model.attention.kv_pool import KvPool
from octavo.model.cpu import invariant
from octavo.model.cpu.native import kernels_fingerprint, native_library
from octavo.model.cpu.ops import rms_norm, silu_mul
from octavo.model.invariant import InvarianceUnavailable, TabulatedRope, arithmetic, make_invariant, sources_hash
from octavo.model.layers.decoder import Rope, plain_rms_norm
from octavo.model.layers.linear import WeightFormat
from tests.support.model.invariant_model import CONFIG, random_model

BLOCK = 4
LENGTH = 97
CUTS = [[7] * 13 + [6], [64, 33], [96, 1], [1, 96]]
needs_compiler = pytest.mark.skipif(native_library() is None, reason="no C compiler here")


class Steps:
    """One sequence beside others in a pool of NaN."""

    def __init__(self, model: CausalLM) -> None:
        self.model, self.backend = model, get_backend("invariant")
        self.rng = np.random.default_rng(0)
        self.ids = self.rng.integers(0, CONFIG.vocab_size, LENGTH)

    def hidden(self, cuts: list[int], *, num_others: int = 0) -> torch.Tensor:
        """Hidden states of the sequence, computed in pieces of these sizes, with so many other sequences beside it."""
        kv = KvPool(CONFIG, 64, BLOCK, self.model.dtype)
        kv.k_pool_LPKBH.fill_(torch.nan)
        kv.v_pool_LPKBH.fill_(torch.nan)
        blocks = self.rng.permutation(64).tolist()
        table, found, start = [blocks.pop() for _ in range(-(-LENGTH // BLOCK))], [], 0
        others = [[blocks.pop(), blocks.pop()] for _ in range(num_others)]
        for size in cuts:
            lengths = [*self.rng.integers(1, 2 * BLOCK, num_others).tolist(), size]
            positions_T, inputs = make_inputs([*others, table], [0] * num_others + [start], lengths, block_size=BLOCK)
            ids = [*self.rng.integers(0, CONFIG.vocab_size, sum(lengths) - size), *self.ids[start : start + size]]
            hidden_TD = self.model(torch.tensor(np.asarray(ids)), positions_T, kv, inputs, self.backend)
            found.append(hidden_TD[-size:])
            start += size
        assert start == LENGTH
        return torch.cat(found)


@needs_compiler
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_token_has_the_same_bits_in_any_step(dtype: torch.dtype) -> None:
    check_steps(dtype, [[1] * LENGTH, *CUTS])


def check_steps(dtype: torch.dtype, all_cuts: list[list[int]]) -> None:
    """all_cuts: lengths of the pieces of one sequence, each computed alone and beside others."""
    model = random_model(dtype)
    wanted = dense_logits(model, torch.as_tensor(np.random.default_rng(0).integers(0, CONFIG.vocab_size, LENGTH)))
    make_invariant(model, max_positions=LENGTH)
    steps = Steps(model)
    whole_TD = steps.hidden([LENGTH])
    logits_TV = model.logits(whole_TD)
    limit = 1e-4 if dtype == torch.float32 else 6e-2
    assert (logits_TV - wanted).norm() / wanted.norm() < limit
    for cuts in all_cuts:
        for num_others in (0, 13):
            hidden_TD = steps.hidden(cuts, num_others=num_others)
            assert torch.equal(hidden_TD, whole_TD), (cuts, num_others)
    for rows in (slice(0, 1), slice(3, 16), slice(90, 97)):
        assert torch.equal(model.logits(whole_TD[rows]), logits_TV[rows])


@needs_compiler
def test_fused_layers_are_used_and_have_the_bits_of_their_stages() -> None:
    model = random_model(torch.bfloat16)
    make_invariant(model, max_positions=LENGTH)
    steps = Steps(model)
    assert all(layer.rest is not None for layer in model.decoder_layers)
    fused_TD = steps.hidden([90, 7])
    for layer in model.decoder_layers:
        layer.rest = None
    assert torch.equal(steps.hidden([LENGTH]), fused_TD)


@needs_compiler
def test_integers_too() -> None:
    model = random_model(torch.bfloat16)
    make_invariant(model, max_positions=LENGTH, wanted=WeightFormat.INT8)
    steps = Steps(model)
    whole_TD = steps.hidden([LENGTH])
    for cuts in ([1] * LENGTH, [5] * 19 + [2]):
        assert torch.equal(steps.hidden(cuts, num_others=5), whole_TD)


@needs_compiler
@pytest.mark.parametrize(("M", "N", "K"), [(1, 32, 64), (7, 33, 10), (8, 70, 96), (9, 31, 5), (17, 100, 160)])
def test_a_product_equals_its_reference_and_its_rows_are_their_own(M: int, N: int, K: int) -> None:
    torch.manual_seed(0)
    x, weight, bias = torch.randn(M, K), torch.randn(N, K), torch.randn(N)
    packed = invariant.InvariantWeight.pack(weight, bias)
    out = packed.multiply(x)
    torch.testing.assert_close(out, F.linear(x, weight, bias), atol=1e-4, rtol=1e-5)
    for row in range(M):
        assert torch.equal(packed.multiply(x[row : row + 1]), out[row : row + 1])
    assert packed.num_bytes == -(-N // 32) * 32 * K * 4


@needs_compiler
def test_norm_and_silu_in_fp32_equal_their_references() -> None:
    torch.manual_seed(0)
    x, weight = torch.randn(5, 96) * 3, torch.randn(96)
    torch.testing.assert_close(rms_norm(x, weight, 1e-6), plain_rms_norm(x, weight, 1e-6))
    gate, up = x[:, :48].contiguous(), x[:, 48:].contiguous()
    torch.testing.assert_close(silu_mul(x), F.silu(gate) * up)
    extremes = torch.cat([torch.tensor([-200.0, -88.0, 200.0, 0.0] * 4), torch.ones(16)])[None]
    torch.testing.assert_close(silu_mul(extremes), F.silu(extremes[:, :16]))
    with pytest.raises(ValueError, match="gate_up_TE"):
        silu_mul(torch.zeros(1, 20))


def test_tabulated_angles_are_the_angles() -> None:
    rope = Rope(CONFIG, torch.float32, torch.device("cpu"))
    table = TabulatedRope(CONFIG, torch.float32, max_positions=90)
    positions = torch.tensor([0, 89, 3])
    for one, other in zip(
        (rope.angles(positions).cos_TH, rope.angles(positions).sin_TH),
        (table.angles(positions).cos_TH, table.angles(positions).sin_TH),
        strict=True,
    ):
        torch.testing.assert_close(one, other)
    with pytest.raises(IndexError):
        table.angles(torch.tensor([90]))


def test_what_cannot_be_invariant_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(InvarianceUnavailable, match="float16"):
        make_invariant(CausalLM.random(CONFIG, seed=0, dtype=torch.float16), max_positions=9)
    with monkeypatch.context() as patch:
        patch.setattr("octavo.model.invariant.native_library", lambda: None)
        with pytest.raises(InvarianceUnavailable, match="needs kernels, and OCTAVO_NATIVE is off"):
            make_invariant(random_model(torch.float32), max_positions=9)


def test_the_arithmetic_of_a_gpu_changes_with_its_kernels(tmp_path: Path) -> None:
    (tmp_path / "sums").mkdir()
    kernel = tmp_path / "sums" / "kernel.py"
    kernel.write_text("CHUNK = 256\n")
    before = sources_hash(tmp_path)
    assert sources_hash(tmp_path) == before
    kernel.write_text("CHUNK = 512\n")
    assert sources_hash(tmp_path) != before


def test_the_arithmetic_names_the_compiled_code() -> None:
    assert arithmetic(torch.device("cpu")) == f"cpu {kernels_fingerprint()}"
