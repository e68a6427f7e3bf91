"""Every backend equals dense attention in float64, at the edges of blocks, with poison wherever nothing may be read."""

from collections.abc import Sequence

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from octavo.model import BACKENDS, AttentionInputs, BackendName, get_backend, make_inputs

LIMITS = {torch.float32: 1e-5, torch.bfloat16: 2e-2, torch.float16: 3e-3}


def dense_reference(q_QNH: torch.Tensor, k_CKH: torch.Tensor, v_CKH: torch.Tensor, scale: float) -> torch.Tensor:
    """One softmax over everything, every KV head repeated for its group, in float64."""
    group = q_QNH.shape[1] // k_CKH.shape[1]
    k_CNH, v_CNH = (x.double().repeat_interleave(group, dim=1) for x in (k_CKH, v_CKH))
    scores_NQC = torch.einsum("qnh,cnh->nqc", q_QNH.double(), k_CNH) * scale
    is_future_QC = torch.ones(len(q_QNH), len(k_CKH)).triu(1 + len(k_CKH) - len(q_QNH)).bool()
    return torch.einsum("nqc,cnh->qnh", scores_NQC.masked_fill(is_future_QC, -torch.inf).softmax(-1), v_CNH)


class Case:
    """A random step: sequences of (cached, new) tokens in a pool that is NaN wherever no token of theirs lies."""

    def __init__(
        self,
        lens: Sequence[tuple[int, int]],
        *,
        heads: int,
        kv_heads: int,
        head_dim: int = 16,
        block_size: int = 16,
        dtype: torch.dtype = torch.float32,
    ) -> None:
        generator = torch.Generator().manual_seed(sum(cached * 7 + new for cached, new in lens) + heads)
        widths = [-(-(cached + new) // block_size) for cached, new in lens]
        blocks = torch.randperm(sum(widths) + 3, generator=generator).tolist()
        self.tables = [[blocks.pop() for _ in range(width)] for width in widths]
        self.scale, self.lens, self.block_size = head_dim**-0.5, lens, block_size

        def normal(*shape: int) -> torch.Tensor:
            return torch.randn(*shape, generator=generator).to(dtype)

        pool_shape = (sum(widths) + 3, kv_heads, block_size, head_dim)
        self.k_pool_PKBH, self.v_pool_PKBH = (torch.full(pool_shape, torch.nan, dtype=dtype) for _ in "kv")
        self.q_TNH = normal(sum(new for _, new in lens), heads, head_dim)
        self.contexts = [(normal(c + n, kv_heads, head_dim), normal(c + n, kv_heads, head_dim)) for c, n in lens]
        for table, (k_CKH, v_CKH) in zip(self.tables, self.contexts, strict=True):
            position_C = torch.arange(len(k_CKH))
            block_C, offset_C = torch.tensor(table)[position_C // block_size], position_C % block_size
            self.k_pool_PKBH[block_C, :, offset_C] = k_CKH
            self.v_pool_PKBH[block_C, :, offset_C] = v_CKH

    def inputs(self) -> AttentionInputs:
        starts, new = zip(*self.lens, strict=True)
        return make_inputs(self.tables, starts, new, block_size=self.block_size)[1]

    def largest_error(self, backend: str) -> float:
        args = (self.q_TNH, self.k_pool_PKBH, self.v_pool_PKBH, self.inputs(), self.scale)
        out_TNH = get_backend(backend).attend(*args)
        assert out_TNH.shape == self.q_TNH.shape
        assert out_TNH.dtype == self.q_TNH.dtype
        queries = self.q_TNH.split([new for _, new in self.lens])
        expected = [dense_reference(q, k, v, self.scale) for q, (k, v) in zip(queries, self.contexts, strict=True)]
        return float((out_TNH.double() - torch.cat(expected)).abs().max())


STEPS = {
    "one decode at the first position": [(0, 1)],
    "decodes around a block's edge": [(14, 1), (15, 1), (16, 1), (17, 1), (30, 1), (31, 1), (32, 1), (47, 1)],
    "decodes of one length": [(20, 1), (20, 1), (20, 1)],
    "whole prompts around a block's edge": [(0, 15), (0, 16), (0, 17), (0, 33)],
    "chunks behind a prefix": [(16, 16), (15, 2), (1, 33), (33, 15), (17, 17)],
    "chunks and decodes between each other": [(0, 16), (40, 1), (15, 17), (0, 1), (16, 2), (3, 1)],
}


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(("heads", "kv_heads"), [(4, 4), (14, 2), (3, 1), (12, 2)])
@pytest.mark.parametrize("step", STEPS)
def test_the_edges_of_blocks(step: str, heads: int, kv_heads: int, backend: str) -> None:
    assert Case(STEPS[step], heads=heads, kv_heads=kv_heads).largest_error(backend) < LIMITS[torch.float32]


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("head_dim", [64, 128])
def test_half_precision(head_dim: int, dtype: torch.dtype, backend: str) -> None:
    case = Case(STEPS["chunks and decodes between each other"], heads=14, kv_heads=2, head_dim=head_dim, dtype=dtype)
    assert case.largest_error(backend) < LIMITS[dtype]


@settings(max_examples=25)
@given(
    lens=st.lists(st.tuples(st.integers(0, 40), st.integers(1, 20)), min_size=1, max_size=6),
    group=st.integers(1, 8),
    kv_heads=st.integers(1, 3),
    block_size=st.sampled_from([1, 2, 8, 16]),
)
def test_any_step(lens: list[tuple[int, int]], group: int, kv_heads: int, block_size: int) -> None:
    case = Case(lens, heads=group * kv_heads, kv_heads=kv_heads, head_dim=4, block_size=block_size)
    for backend in BACKENDS:
        assert case.largest_error(backend) < LIMITS[torch.float32]


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_poisoned_sequence_poisons_nobody_else(backend: str) -> None:
    case = Case([(20, 1), (33, 1), (0, 17), (5, 1)], heads=4, kv_heads=2)
    clean = get_backend(backend).attend(case.q_TNH, case.k_pool_PKBH, case.v_pool_PKBH, case.inputs(), case.scale)
    case.v_pool_PKBH[case.tables[1][0]] = torch.nan
    poisoned = get_backend(backend).attend(case.q_TNH, case.k_pool_PKBH, case.v_pool_PKBH, case.inputs(), case.scale)
    assert bool(poisoned[1].isnan().all())
    torch.testing.assert_close(torch.cat([poisoned[:1], poisoned[2:]]), torch.cat([clean[:1], clean[2:]]))


@pytest.mark.parametrize("backend", BACKENDS)
def test_shared_blocks_of_a_prefix_are_read_by_all_who_name_them(backend: str) -> None:
    case = Case([(32, 1), (32, 1)], heads=4, kv_heads=2)
    case.tables[1][:2] = case.tables[0][:2]
    for ours, first in zip(case.contexts[1], case.contexts[0], strict=True):
        ours[:32] = first[:32]
    assert case.largest_error(backend) < LIMITS[torch.float32]


@pytest.mark.parametrize("backend", BACKENDS)
def test_the_pool_is_only_read(backend: str) -> None:
    case = Case(STEPS["chunks and decodes between each other"], heads=4, kv_heads=2)
    before = case.k_pool_PKBH.clone(), case.v_pool_PKBH.clone()
    case.largest_error(backend)
    torch.testing.assert_close((case.k_pool_PKBH, case.v_pool_PKBH), before, rtol=0, atol=0, equal_nan=True)


def test_an_unknown_backend_is_refused_by_name() -> None:
    with pytest.raises(BackendName, match="no attention backend 'flash': there are reference, sdpa"):
        get_backend("flash")
