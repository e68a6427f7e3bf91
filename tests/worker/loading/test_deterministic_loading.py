"""A worker that is asked for deterministic mode: what it loads, which model it passes for, what it refuses."""

import inspect
import re
from pathlib import Path
from typing import Any

import pytest

from octavo.model.cpu.native import native_library
from octavo.model.invariant import InvarianceUnavailable
from octavo.worker.config import CheckNumerics, Deterministic, WorkerConfig
from octavo.worker.loading import combinations
from octavo.worker.loading.loaded import Loaded
from octavo.worker.loading.loader import load_torch
from tests.support.model.packed_checkpoints import GPTQ_CONFIG, write_packed_checkpoint

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


@needs_compiler
def test_a_packed_checkpoint_is_unpacked_for_it(tmp_path: Path) -> None:
    folder = tmp_path / "packed"
    write_packed_checkpoint(folder, GPTQ_CONFIG | {"group_size": 32}, num_attention_heads=2, num_key_value_heads=1)
    assert load(model=str(folder), deterministic=Deterministic.ON).device == "cpu, int4 weights (gptq), deterministic"


def test_operations_names_what_does_not_go_with_it_and_nothing_else(repository: Path) -> None:
    page = (repository / "docs/operations.md").read_text()
    told = page.partition("it is refused with ")[2].partition(". ")[0]
    code = inspect.getsource(combinations.why_not_deterministic) + inspect.getsource(combinations.why_no_cache_format)
    assert set(re.findall(r"--[a-z-]+", told)) == set(re.findall(r"--[a-z-]+", code))
    assert [each for each in ("packed", "quantised", "GPTQ") if each in told] == []
