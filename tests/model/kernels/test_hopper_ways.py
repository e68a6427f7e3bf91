"""On a Hopper GPU its own kernels are what serves, without being asked for; elsewhere the plain ones are."""

import pytest
import torch

pytest.importorskip("triton", reason="triton is not installed")

from bench.shapes import PUBLISHED
from octavo.model.gpu import overlapping_layers
from octavo.model.gpu.overlapping_layers import fits_overlapping
from octavo.model.kernels.attention import decode_ring, prefill_hopper


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
        monkeypatch.setattr(module, "_is_hopper", lambda device: is_hopper)
        monkeypatch.setattr(module.triton, "__version__", version)
    monkeypatch.setattr(overlapping_layers, "fits", lambda weight: expected)
    tensor = OnDevice()
    assert decode_ring.is_faster(tensor, tensor, 14) is expected  # type: ignore[arg-type]
    assert prefill_hopper.fits(tensor, tensor) is expected  # type: ignore[arg-type]
    assert fits_overlapping(PUBLISHED["0.5B"].config, tensor) is expected  # type: ignore[arg-type]
