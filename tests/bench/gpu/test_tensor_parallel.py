"""The bench of tensor parallelism, with a tiny shape on a CPU, and what it makes of figures."""

import json
import math
import sys
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("triton", reason="triton is not installed")

from bench.gpu import tensor_parallel
from bench.gpu.tensor_parallel import MODULE, judge
from bench.random_checkpoint import tensor_shapes
from bench.shapes import SHAPES
from bench.turns import turn


@pytest.mark.timeout(600)
def test_one_rank_and_two_are_measured_in_turns(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    out = tmp_path / "report.json"
    words = ["--shape", "tiny", "--device", "cpu", "--only", "decode", "sums", "--json", str(out)]
    monkeypatch.setattr(sys, "argv", ["tensor_parallel", *words])
    tensor_parallel.main()
    report = json.loads(out.read_text())
    assert [report["turns"][size][0]["device"] for size in ("1", "2")] == ["cpu", "cpu, 2 ranks"]
    for size in ("1", "2"):
        (figures,) = report["turns"][size]
        assert "failed" not in figures
        assert figures["decode 4"].keys() == {"ms", "floor_ms"}  # on a busy CPU, any number
    one, two = (report["turns"][size][0]["decode 1"]["floor_ms"] for size in ("1", "2"))
    assert two == pytest.approx(one / 2)
    assert report["sums"]["sums of 8 rows"]["bytes"] == 4 * 8 * 64 * 4  # of two layers
    assert report["sums"]["sums of 8 rows"]["library_ms"] > 0
    assert report["bars"] == []


@pytest.mark.timeout(600)
def test_a_request_goes_through_the_whole_service() -> None:
    found = turn(MODULE, ["--shape", "tiny", "--device", "cpu", "--ranks", "2", "--kind", "request"])
    (run,) = found["load"]["runs"]
    assert (run["completed"], run["total_output_tokens"]) == (1, 8)


def test_a_turn_that_fails_says_why() -> None:
    found = turn(MODULE, ["--shape", "tiny", "--device", "cpu", "--ranks", "3"])
    assert "num_attention_heads: 4 cannot be divided among 3 tensor-parallel ranks" in found["failed"]


def test_figures_of_other_ranks_are_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def ranks_of(module: str, words: list[str], **limits: Any) -> dict[str, Any]:
        return {"device": f"{words[words.index('--ranks') + 1]} ranks"}

    out = tmp_path / "report.json"
    words = ["tensor_parallel", "--shape", "tiny", "--device", "cpu", "--only", "decode", "--batches", "1"]
    monkeypatch.setattr(tensor_parallel, "turn", ranks_of)
    for size in ("1", "2"):
        monkeypatch.setattr(sys, "argv", [*words, "--json", str(out), "--ranks", size])
        tensor_parallel.main()
    turns = json.loads(out.read_text())["turns"]
    assert [turns[size][0]["device"] for size in ("1", "2")] == ["1 ranks", "2 ranks"]


def test_bars_are_held_against_medians_of_what_there_is() -> None:
    def figures(ms: float, tokens_per_s: float) -> dict[str, object]:
        return {"device": "x", "decode 1": {"ms": ms, "floor_ms": 2.0}, "nano": {"tokens_per_s": tokens_per_s}}

    turns = {1: [figures(4.0, 100.0), {"failed": "no"}], 2: [figures(9.0, 160.0), figures(2.4, 180.0), figures(2, 190)]}
    assert judge("7B", turns) == [
        {"name": "decode 1, of one rank's ms", "ratio": 0.6, "bar": 0.62, "is_met": True},
        {"name": "nano, of one rank's tokens/s", "ratio": 1.8, "bar": 1.7, "is_met": True},
    ]
    assert [bar["is_met"] for bar in judge("32B", turns)] == [False]
    assert [(bar["ratio"], bar["is_met"]) for bar in judge("72B", {2: turns[2]})] == [(1.2, True)]
    assert judge("7B", {2: [{"failed": "no"}]}) == judge("14B", turns) == []


@pytest.mark.parametrize(("shape", "billions"), [("7B", 7.6), ("32B", 32.8), ("72B", 72.7)])
def test_shapes_have_as_many_weights_as_they_say(shape: str, billions: float) -> None:
    total = sum(math.prod(size) for _, size in tensor_shapes(SHAPES[shape]))
    assert total / 1e9 == pytest.approx(billions, rel=0.01)
