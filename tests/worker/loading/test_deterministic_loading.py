"""A worker that is asked for deterministic mode: what it loads, which model it passes for, what it refuses."""

from typing import Any

import pytest

from octavo.model.cpu.native import native_library
from octavo.model.invariant import InvarianceUnavailable
from octavo.worker.config import CheckNumerics, Deterministic, WorkerConfig
from octavo.worker.loading.loaded import Loaded
from octavo.worker.loading.loader import load_torch

needs_compiler = pytest.mark.skipif(native_library() is None, reason="no C compiler here")


def load(**settings: Any) -> Loaded:
    config = WorkerConfig(
        **{
            "model": "folio-chat", "gateway_endpoints": (), "max_num_seqs": 4, "max_batch_tokens": 64,
            "max_model_len": 128, "num_blocks": 40, **settings,
        }
    )  # fmt: skip
    return load_torch(config, lambda stage, done, total: None)


@needs_compiler
def test_it_says_so_and_is_a_model_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    plain, fixed = load(), load(deterministic=Deterministic.ON)
    assert fixed.runner.config.backend == "invariant"  # type: ignore[attr-defined]
    assert (plain.device, fixed.device) == ("cpu", "cpu, deterministic")
    assert fixed.fingerprint != plain.fingerprint
    assert load(deterministic=Deterministic.ON).fingerprint == fixed.fingerprint
    monkeypatch.setattr("octavo.model.invariant.kernels_fingerprint", lambda: "compiled elsewhere")
    assert load(deterministic=Deterministic.ON).fingerprint != fixed.fingerprint


@pytest.mark.parametrize(
    "settings", [{"attention_backend": "sdpa"}, {"check_numerics": CheckNumerics.ON}, {"dtype": "float16"}]
)
def test_what_does_not_go_with_it_is_refused(settings: dict[str, Any]) -> None:
    with pytest.raises(InvarianceUnavailable):
        load(deterministic=Deterministic.ON, **settings)
