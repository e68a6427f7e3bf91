"""On a Hopper GPU its own kernels are what serves, without being asked for; elsewhere the plain ones are."""

import pytest
import torch

pytest.importorskip("triton", reason="triton is not installed")

from bench.shapes import PUBLISHED
from octavo.model.gpu import overlapping_layers
from octavo.model.gpu.overlapping_layers import fits_overlapping
from octavo.model.kernels import precompile
from octavo.model.kernels.attention import decode_ring, prefill_hopper
from octavo.model.kernels.products.hopper import ProductTrial


class OnDevice:
    """What the choices ask of a tensor there."""

    is_cuda, dtype, device = True, torch.bfloat16, torch.device("cuda", 0)
    shape = (9, 2, 16, 64)

    def element_size(self) -> int:
        return 2


@pytest.mark.parametrize(
    ("is_hopper", "version", "expected"),
    [(True, "3.6.0", True), (True, "3.7.1", True), (False, "3.7.1", False), (True, "3.8.0", False)],
)
def test_a_devices_own_kernels_serve_unasked(
    is_hopper: bool, version: str, expected: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    for module in (decode_ring, prefill_hopper):
        monkeypatch.setattr(module, "is_hopper", lambda device: is_hopper)
        monkeypatch.setattr(module.triton, "__version__", version)
    monkeypatch.setattr(overlapping_layers, "fits", lambda weight: expected)
    tensor = OnDevice()
    assert decode_ring.is_faster(tensor, tensor, 14) is expected  # type: ignore[arg-type]
    assert prefill_hopper.fits(tensor, tensor) is expected  # type: ignore[arg-type]
    assert fits_overlapping(PUBLISHED["0.5B"].config, tensor) is expected  # type: ignore[arg-type]


CPU = torch.device("cpu")


@pytest.mark.parametrize(("factor", "expected"), [(1, True), (2, False)])
def test_a_kernel_serves_where_a_small_product_is_right(factor: int, expected: bool) -> None:
    runs = []

    def multiply(y_TK: torch.Tensor, weight_OK: torch.Tensor, out_TO: torch.Tensor) -> None:
        out_TO.copy_(factor * (y_TK.float() @ weight_OK.float().T))
        runs.append(1)

    trial = ProductTrial("products", multiply)
    assert [trial.passes(CPU), trial.passes(CPU)] == [expected] * 2
    assert len(runs) == 1


def test_a_kernel_that_fails_is_said_to_fail_and_serves_nothing() -> None:
    def multiply(*tensors: torch.Tensor) -> None:
        raise RuntimeError("of another compiler")

    with pytest.warns(UserWarning, match="do without products, whose kernel failed.*of another compiler"):
        assert not ProductTrial("products", multiply).passes(CPU)


def test_while_kernels_are_compiled_the_trials_is_one_of_them_and_its_sums_are_worth_nothing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    runs = []
    trial = ProductTrial("products", lambda *tensors: runs.append(1))
    monkeypatch.setattr(precompile, "_compiling", True)
    assert [trial.passes(CPU), trial.passes(CPU)] == [True] * 2
    assert len(runs) == 1
