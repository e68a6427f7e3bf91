"""Attention that does not depend on the batch: right, and the same bits however a context came to be."""

import numpy as np
import pytest
import torch

pytest.importorskip("triton", reason="triton is not installed")

from octavo.model.kernels.attention.invariant import AttentionParts, invariant_attention, tile_tokens
from octavo.model.kernels.attention.invariant_work import (
    CHUNK_TOKENS,
    InvariantWork,
    plan_invariant_reference,
    plan_invariant_work,
)
from octavo.model.kernels.attention.prefill import list_tiles, prefill_attention_reference

pytestmark = pytest.mark.usefixtures("one_order")
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
DTYPES = [torch.float32, torch.bfloat16 if DEVICE == "cuda" else torch.float16]
S = 16


class Cache:
    """One sequence per row over blocks in random order; what is not written is NaN."""

    def __init__(self, lengths: list[int], N: int, K: int, H: int, dtype: torch.dtype) -> None:
        torch.manual_seed(0)
        R, M = len(lengths), max(lengths) // S + 1
        P = R * M + 3
        self.lengths, self.N, self.K, self.H, self.dtype = lengths, N, K, H, dtype
        self.table = torch.randperm(P)[: R * M].view(R, M).int()
        self.pools = [torch.full((P, K, S, H), float("nan"), dtype=dtype) for _ in range(2)]
        for row, length in enumerate(lengths):
            for token in range(length):
                for pool in self.pools:
                    pool[self.table[row, token // S], :, token % S] = torch.randn(K, H).to(dtype)
        self.q = [torch.randn(length, N, H).to(dtype) for length in lengths]
        self.on_device = [tensor.to(DEVICE) for tensor in (*self.pools, self.table)]

    def run(self, decodes: list[tuple[int, int]], chunks: list[tuple[int, int, int]]) -> list[torch.Tensor]:
        """decodes: (row, position). chunks: (row, start, count). The result of each, decodes first."""
        pieces = [(row, position, 1) for row, position in decodes] + chunks
        q = torch.cat([self.q[row][start : start + count] for row, start, count in pieces]).to(DEVICE)
        firsts = np.cumsum([0, *(count for _, _, count in pieces)]).tolist()
        tiles = list_tiles(
            (row, firsts[len(decodes) + i], start, count) for i, (row, start, count) in enumerate(chunks)
        )
        tokens = tile_tokens(self.N, self.K)
        work = InvariantWork.allocate(
            max_decodes=max(len(decodes), 1), max_tiles=len(tiles) + 2, max_context=max(self.lengths) + 1,
            tile_tokens=tokens, device=DEVICE,
        )  # fmt: skip
        parts = AttentionParts.allocate(max(len(decodes), 1), work.max_chunks, self.N, self.H, DEVICE)
        position_R = torch.zeros(len(self.lengths), dtype=torch.int32)
        for row, position in decodes:
            position_R[row] = position
        tiles_t = torch.from_numpy(np.concatenate([tiles, np.zeros((1, 4), np.int32)]))  # one of padding
        rows_B = torch.tensor([row for row, _ in decodes], dtype=torch.int32, device=DEVICE)
        plan_invariant_work(rows_B, position_R.to(DEVICE), tiles_t.to(DEVICE), work)
        wanted = plan_invariant_reference(decodes, tiles_t.tolist(), tokens)
        assert work.count_1.item() == len(wanted)
        assert [tuple(item[:7]) for item in work.item_I8[: len(wanted)].tolist()] == wanted
        out = torch.full_like(q, float("nan"))
        *pools, table = self.on_device
        invariant_attention(q, *pools, out, table, work, parts, self.H**-0.5, num_decodes=len(decodes))
        return [out[firsts[i] : firsts[i + 1]].cpu() for i in range(len(pieces))]


@pytest.mark.sanitize(only=lambda dtype: dtype != torch.float32)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("N", "K", "H"), [(14, 2, 64), (3, 3, 32), (2, 1, 128)])
def test_every_token_equals_the_reference(N: int, K: int, H: int, dtype: torch.dtype) -> None:
    cache = Cache([1, 17, CHUNK_TOKENS + 5], N, K, H, dtype)
    decodes = [(0, 0), (1, 16), (2, CHUNK_TOKENS + 3)]
    chunks = [(2, 0, 20), (1, 15, 2), (2, CHUNK_TOKENS - 20, 25)]
    got = cache.run(decodes, chunks)
    limit = 2e-5 if dtype == torch.float32 else 2e-2
    for (row, start, count), out in zip([(r, p, 1) for r, p in decodes] + chunks, got, strict=True):
        q = cache.q[row][start : start + count]
        tile = torch.tensor([[row, 0, start, count]])
        wanted = prefill_attention_reference(q, *cache.pools, cache.table, tile, H**-0.5)
        torch.testing.assert_close(out.float(), wanted, atol=limit, rtol=limit)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("N", "K", "H"), [(14, 2, 64), (4, 4, 32)])
def test_a_token_has_the_same_bits_decoded_or_in_a_chunk_of_any_size(
    N: int, K: int, H: int, dtype: torch.dtype
) -> None:
    length = 3 * CHUNK_TOKENS + 9 if DEVICE == "cuda" else CHUNK_TOKENS + 40
    cache = Cache([length, 30], N, K, H, dtype)
    (whole,) = cache.run([], [(0, 0, length)])
    assert not whole.isnan().any()
    for position in (0, 6, 7, 63, 64, 65, CHUNK_TOKENS - 1, CHUNK_TOKENS, CHUNK_TOKENS + 1, length - 1):
        assert torch.equal(cache.run([(0, position), (1, 20)], [])[0][0], whole[position]), position
    for start, count in ((0, 1), (5, 7), (64, 64), (60, 70), (CHUNK_TOKENS - 3, 7), (CHUNK_TOKENS, 1)):
        other, chunk = cache.run([(1, 29)], [(0, start, count)])
        assert torch.equal(chunk, whole[start : start + count]), (start, count)
        assert not other.isnan().any()


def test_tensors_that_do_not_fit_are_refused() -> None:
    with pytest.raises(ValueError, match="group"):
        tile_tokens(7, 2)
    work = InvariantWork.allocate(max_decodes=1, max_tiles=1, max_context=20, tile_tokens=9, device="cpu")
    rows, tiles = torch.zeros(2, dtype=torch.int32), torch.zeros(2, 4, dtype=torch.int32)
    with pytest.raises(ValueError, match="more than the list"):
        plan_invariant_work(rows, torch.zeros(2, dtype=torch.int32), tiles, work)
    parts = AttentionParts.allocate(1, 2, 4, 16, "cpu")
    q, pool = torch.zeros(1, 4, 16), torch.zeros(2, 2, 16, 16)
    with pytest.raises(ValueError, match="tiles of 9 tokens"):
        invariant_attention(
            q, pool, pool, q.clone(), torch.zeros(1, 2, dtype=torch.int32), work, parts, 1.0, num_decodes=1
        )
