"""The table of `octavo models`."""

from contextlib import nullcontext
from types import SimpleNamespace

import pytest

from octavo.cli.main import main
from octavo.v1 import model_pb2

MODEL = model_pb2.ModelInfo(
    name="Qwen2.5-7B-Instruct-1M", dtype="bfloat16", kv_cache_dtype="float8_e4m3fn", max_model_len=1_010_000,
    num_workers=4, kv_capacity_tokens=4_194_304, fingerprint="03ea85d7c2590123",
)  # fmt: skip


SHORT = model_pb2.ModelInfo(
    name="folio-chat", dtype="bfloat16", max_model_len=2048, num_workers=1, kv_capacity_tokens=32_768,
    fingerprint="03ea85d7c2590123",
)  # fmt: skip


@pytest.mark.parametrize("model", [MODEL, SHORT])
@pytest.mark.parametrize("columns", [60, 80, 120])
def test_a_fingerprint_and_a_short_name_stand_on_one_line_in_a_narrow_terminal(
    model: model_pb2.ModelInfo, columns: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", str(columns))
    client = SimpleNamespace(models=lambda: [model])
    monkeypatch.setattr("octavo.cli.client.calls.connect", lambda settings: nullcontext(client))
    assert main(["models"]) == 0
    shown = capsys.readouterr().out
    assert "03ea85d7c259" in shown
    assert model is MODEL or "folio-chat" in shown
    assert max(map(len, shown.splitlines())) <= columns
