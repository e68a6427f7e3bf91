"""The row kernels against their references, on a GPU or in Triton's interpreter."""

import pytest
import torch

pytest.importorskip("triton", reason="triton is not installed")

from octavo.model.kernels.rows import embed, rms_norm, rms_norm_reference, rms_scale, rms_scale_reference

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def ints(*values: int) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32, device=DEVICE)


@pytest.mark.sanitize
def test_embed_takes_the_id_or_the_last_token_of_the_row() -> None:
    table, out = torch.randn(50, 40, device=DEVICE), torch.full((4, 40), float("nan"), device=DEVICE)
    embed(ints(7, -1, 49, -1), ints(0, 2, 0, 1), ints(3, 5, 11), table, out)
    assert torch.equal(out, table[[7, 11, 49, 5]])


@pytest.mark.sanitize
def test_embed_of_some_rows_gives_zeros_for_the_others() -> None:
    table, out = torch.randn(20, 40, device=DEVICE), torch.full((5, 40), float("nan"), device=DEVICE)
    embed(ints(30, -1, 49, 29, 50), ints(0, 2, 0, 1, 0), ints(3, 5, 31), table, out, first=30)
    assert torch.equal(out, torch.stack([table[0], table[1], table[19], *torch.zeros(2, 40, device=DEVICE)]))


@pytest.mark.sanitize(only=lambda dtype: dtype != torch.float32)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_rms_norm_equals_its_reference(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    x, weight = torch.randn(5, 100).to(dtype), torch.randn(100).to(dtype)
    out = torch.full((3, 100), float("nan"), dtype=dtype, device=DEVICE)
    rms_norm(x.to(DEVICE), ints(4, 0, 4), weight.to(DEVICE), out, 1e-6)
    limit = 1e-5 if dtype == torch.float32 else 5e-3
    expected = rms_norm_reference(x, weight, 1e-6)[[4, 0, 4]]
    torch.testing.assert_close(out.cpu().float(), expected, atol=limit, rtol=limit)


@pytest.mark.sanitize(only=lambda T, dtype: T == 7 and dtype != torch.float32)
@pytest.mark.parametrize("T", [1, 4, 7])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_rms_scale_equals_its_reference(T: int, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    x = (torch.randn(T, 100) * 3).to(dtype)
    scale = torch.full((T + 4,), float("nan"), device=DEVICE)
    rms_scale(x.to(DEVICE), scale[:T], 1e-6)
    torch.testing.assert_close(scale[:T].cpu(), rms_scale_reference(x, 1e-6), atol=1e-6, rtol=1e-5)
    assert scale[T:].isnan().all()
