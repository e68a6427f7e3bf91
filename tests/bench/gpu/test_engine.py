"""What bench/gpu/engine.py measures, without a GPU."""

import pytest

from bench.gpu import engine
from bench.gpu.engine import Report, measure_first_tokens, parse
from bench.gpu.floors import Floors
from bench.shapes import PUBLISHED


def test_the_first_token_of_every_length_is_measured_where_nobody_limits_lengths(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    asked: list[int] = []

    def first_token_ms(_: object, length: int) -> float:
        asked.append(length)
        return 1.0

    monkeypatch.setattr(engine, "first_token_ms", first_token_ms)
    report = Report()
    floors = Floors(config=PUBLISHED["0.5B"].config, bytes_per_s=4e12)
    measure_first_tokens(None, report, floors, parse([]).max_model_len)  # type: ignore[arg-type]
    assert asked == [16, 512, 2048, 8192, 30_000]
    assert report.found["first token of 30000"]["floor_ms"] == pytest.approx(75, rel=0.1)


def test_lengths_that_do_not_fit_are_told(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(engine, "first_token_ms", lambda *_: 1.0)
    floors = Floors(config=PUBLISHED["0.5B"].config, bytes_per_s=4e12)
    measure_first_tokens(None, Report(), floors, parse(["--max-model-len", "4096"]).max_model_len)  # type: ignore[arg-type]
    assert "first token of 30000: longer than --max-model-len" in capsys.readouterr().out
