"""`verify` passes a sound checkpoint, and does not pass when the two sides differ."""

from pathlib import Path
from typing import Any

import pytest
import torch

from octavo.model import BackendName, CausalLM, CheckpointError, load_model
from octavo.model.verify import verify
from octavo.model.verify.verify import VerifyReport, verify_checkpoint
from tests.support.model.checkpoints import write_tiny_checkpoint


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_checkpoint(tmp_path_factory.mktemp("verify"))


def run(folder: Path, **options: Any) -> VerifyReport:
    return verify_checkpoint(folder, **({"num_prompts": 3, "max_new_tokens": 6} | options))


def test_every_comparison_is_a_row_and_all_are_within_their_limits(folder: Path) -> None:
    report = run(folder)
    per_backend = [
        *((f"hidden states, {name}", "whole") for name in ("embedding", "layer 0", "layer 1 + norm")),
        *(("logits", mode) for mode in ("whole", "chunks of 1", "chunks of 7", "chunks of 16", "chunks of 33")),
        ("greedy tokens", "3 prompts × 6"),
    ]
    rope = [("RoPE q", "-", "positions 0 to 511"), ("RoPE k", "-", "positions 0 to 511")]
    expected = rope + [(check, name, mode) for name in ("reference", "sdpa") for check, mode in per_backend]
    assert [(row.check, row.backend, row.mode) for row in report.rows] == expected
    assert report.is_ok
    assert all(row.num_equal == row.num_compared == 18 for row in report.rows if row.check == "greedy tokens")
    assert all(row.max_abs_error < 1e-4 for row in report.rows)


@pytest.mark.parametrize("dtype", ["bfloat16", torch.float16])
def test_half_precision_is_within_its_wider_limits(folder: Path, dtype: str | torch.dtype) -> None:
    assert run(folder, dtype=dtype).is_ok


def broken_loader(damage: Any) -> Any:
    def load(folder: Path, *, dtype: torch.dtype | None) -> CausalLM:
        model = load_model(folder, dtype=dtype)
        damage(model)
        return model

    return load


def failing(report: VerifyReport) -> set[str]:
    return {row.check for row in report.rows if not row.is_ok}


def test_a_wrong_frequency_fails_rope_and_what_follows_but_not_the_embedding(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    damage = broken_loader(lambda model: model.rope._frequencies.mul_(1.001))
    monkeypatch.setattr(verify, "load_model", damage)
    found = failing(run(folder, backends=["sdpa"]))
    assert {"RoPE q", "RoPE k", "hidden states, layer 0", "logits"} <= found
    assert "hidden states, embedding" not in found


@pytest.mark.parametrize("value", [torch.nan, 3.0])
def test_a_wrong_weight_fails_from_its_layer_on(value: float, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    damage = broken_loader(lambda model: model.layers[1].mlp.down_proj.weight[:, 0].fill_(value))
    monkeypatch.setattr(verify, "load_model", damage)
    report = run(folder, backends=["sdpa"])
    assert not report.is_ok
    assert failing(report) >= {"hidden states, layer 1 + norm", "logits"}
    assert not failing(report) & {"RoPE q", "RoPE k", "hidden states, embedding", "hidden states, layer 0"}


def test_logits_that_are_nan_never_count_as_equal_tokens(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(verify, "load_model", broken_loader(lambda model: model.norm.weight.fill_(torch.nan)))
    rows = [row for row in run(folder, backends=["sdpa"]).rows if row.check == "greedy tokens"]
    assert not any(row.is_ok for row in rows)


def test_a_folder_without_a_tokenizer_is_verified_on_random_ids(tmp_path: Path) -> None:
    folder = write_tiny_checkpoint(tmp_path)
    (folder / "tokenizer.json").unlink()
    assert run(folder, backends=["sdpa"]).is_ok


@pytest.mark.parametrize(
    ("options", "error", "text"),
    [
        ({"dtype": "int8"}, ValueError, "'int8' is not one of float32"),
        ({"backends": ["flash"]}, BackendName, "no attention backend 'flash'"),
        ({"num_prompts": 0}, ValueError, "must be at least 1"),
    ],
)
def test_wrong_options_are_refused(options: dict[str, Any], error: type[Exception], text: str, folder: Path) -> None:
    with pytest.raises(error, match=text):
        run(folder, **options)


def test_a_broken_checkpoint_is_refused_before_transformers_sees_it(tmp_path: Path) -> None:
    folder = write_tiny_checkpoint(tmp_path)
    (folder / "model.safetensors").write_bytes(b"")
    with pytest.raises(CheckpointError, match=r"model\.safetensors: truncated"):
        run(folder)
