"""What is on trial is off unless it is named, also on the devices that it was written for."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch

pytest.importorskip("triton", reason="triton is not installed")

from octavo.model.gpu.invariant_attention import HopperAttention
from octavo.model.kernels.attention import invariant_hopper
from octavo.model.kernels.trials import VARIABLE, Trial


@pytest.mark.parametrize(
    ("value", "named"),
    [
        (None, set()),
        ("", set()),
        ("invariant", set()),
        ("other, invariant_attention", {Trial.INVARIANT_ATTENTION}),
        ("all", set(Trial)),
    ],
)
def test_a_kernel_on_trial_serves_where_it_is_named(
    value: str | None, named: set[Trial], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv(VARIABLE, raising=False)
    if value is not None:
        monkeypatch.setenv(VARIABLE, value)
    monkeypatch.setattr(invariant_hopper, "fits", lambda queries, pool: True)
    config = SimpleNamespace(num_attention_heads=2, head_dim=64)
    weights: Any = SimpleNamespace(config=config, layers=[], embed_VD=torch.zeros(1))
    kv: Any = SimpleNamespace(k_pools=[None])
    assert HopperAttention.fits(weights, kv) is (Trial.INVARIANT_ATTENTION in named)
    assert {each for each in Trial if each.is_on} == named
