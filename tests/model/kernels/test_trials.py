"""What is on trial is off unless it is named, also on the devices that it was written for."""

import pytest
import torch

pytest.importorskip("triton", reason="triton is not installed")

from bench.shapes import PUBLISHED
from octavo.model.gpu import overlapping_layers
from octavo.model.gpu.overlapping_layers import fits_overlapping
from octavo.model.kernels.attention import decode_ring, prefill_hopper
from octavo.model.kernels.trials import VARIABLE, Trial


class OnHopper:
    """What the choices ask of a tensor there."""

    is_cuda, dtype, device = True, torch.bfloat16, torch.device("cuda", 0)
    shape = (9, 2, 16, 64)

    def element_size(self) -> int:
        return 2


@pytest.mark.parametrize(
    ("value", "named"),
    [
        (None, set()),
        ("", set()),
        ("rings", set()),
        ("ring", {Trial.RING}),
        ("ring, warp_groups", {Trial.RING, Trial.WARP_GROUPS}),
        ("all", set(Trial)),
    ],
)
def test_a_kernel_on_trial_serves_where_it_is_named(
    value: str | None, named: set[Trial], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv(VARIABLE, raising=False)
    if value is not None:
        monkeypatch.setenv(VARIABLE, value)
    for module in (decode_ring, prefill_hopper):
        monkeypatch.setattr(module, "_is_hopper", lambda device: True)
        monkeypatch.setattr(module.triton, "__version__", "3.6.0")
    monkeypatch.setattr(overlapping_layers, "fits", lambda weight: True)
    tensor = OnHopper()
    chosen = {
        Trial.RING: decode_ring.is_faster(tensor, tensor, 14),  # type: ignore[arg-type]
        Trial.WARP_GROUPS: prefill_hopper.fits(tensor, tensor),  # type: ignore[arg-type]
        Trial.OVERLAPPING: fits_overlapping(PUBLISHED["0.5B"].config, tensor),  # type: ignore[arg-type]
    }
    assert {trial for trial, is_chosen in chosen.items() if is_chosen} == named
    assert {each for each in Trial if each.is_on} == named
