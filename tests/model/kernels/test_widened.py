"""Contexts of prompt chunks, widened from e4m3 for all their tiles at once."""

import pytest
import torch

pytest.importorskip("triton", reason="triton is not installed")

from octavo.model.kernels.attention.prefill import list_tiles, prefill_attention, prefill_attention_reference
from octavo.model.kernels.attention.widened import MOST_TILES, WideContext, plan_wide, plan_wide_reference, widen
from octavo.model.quantization.rounding import to_fp8

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
DTYPE = torch.bfloat16 if DEVICE == "cuda" else torch.float32
K, S, H = 2, 16, 32


def pools(num_blocks: int) -> list[torch.Tensor]:
    return [to_fp8(torch.randn(num_blocks, K, S, H)).to(DEVICE) for _ in range(2)]


CHUNKS = {
    "one": [(3, 0, 0, 40)],
    "several, one of them behind a cached prefix": [(5, 2, 0, 300), (0, 302, 200, 17), (6, 319, 64, 128)],
    "none": [],
}


@pytest.mark.sanitize(only=lambda chunks, num_blocks: len(chunks) > 1 and num_blocks == 25)
@pytest.mark.parametrize("num_blocks", [64, 25, 1], ids=["room for all", "for some", "for none"])
@pytest.mark.parametrize("chunks", CHUNKS.values(), ids=CHUNKS)
def test_every_chunk_is_attended_to_once(chunks: list[tuple[int, int, int, int]], num_blocks: int) -> None:
    torch.manual_seed(0)
    small = pools(200)
    table = torch.randperm(200)[:196].view(7, 28).int()
    tiles = torch.from_numpy(list_tiles(chunks))
    tiles = torch.cat([tiles, torch.zeros(3, 4, dtype=torch.int32)])  # as a recorded step is filled up
    wide = WideContext.allocate(small[0], num_tokens=num_blocks * S, dtype=DTYPE)
    wide.k_XKSH.fill_(float("nan")), wide.v_XKSH.fill_(float("nan"))
    plan_wide(tiles.to(DEVICE), table.to(DEVICE), wide)
    widen(*small, wide)
    found = wide.tiles(len(tiles))
    expected = plan_wide_reference([tuple(tile) for tile in tiles.tolist()], num_blocks, S)
    assert [[tuple(tile) for tile in part.tolist()] for part in found] == list(expected)

    T = max((first + count for _, first, _, count in chunks), default=1)
    q = torch.randn(T, 4, H, device=DEVICE).to(DTYPE)
    out = torch.full_like(q, float("nan"))
    prefill_attention(q, wide.k_XKSH, wide.v_XKSH, out, wide.table_X1, found[0], H**-0.5)
    prefill_attention(q, *small, out, table.to(DEVICE), found[1], H**-0.5)
    plain = [pool.cpu().float() for pool in small]
    reference = prefill_attention_reference(q.cpu(), *plain, table, tiles, H**-0.5)
    torch.testing.assert_close(out.cpu().float(), reference, atol=2e-2, rtol=2e-2, equal_nan=True)


def test_more_tiles_than_a_program_looks_at_are_refused() -> None:
    small = pools(2)
    wide = WideContext.allocate(small[0], num_tokens=S, dtype=DTYPE)
    tiles = torch.zeros(MOST_TILES + 1, 4, dtype=torch.int32, device=DEVICE)
    with pytest.raises(ValueError, match="tiles_W4 has 1025 tiles, more than 1024"):
        plan_wide(tiles, torch.zeros(1, 1, dtype=torch.int32, device=DEVICE), wide)
