"""The bench of the second tier does on a CPU, with a tiny model, all that it does on a device."""

from pathlib import Path

import pytest

from bench.gpu import host_tier

SMALL = [
    "--device",
    "cpu",
    "--shape",
    "tiny",
    "--long",
    "320",
    "--repeats",
    "1",
    "--conversations",
    "6",
    "--turns",
    "3",
    "--opening",
    "80",
    "--question",
    "16",
    "--answer",
    "4",
    "--host-gib",
    "0.05",
    "--max-batch-tokens",
    "256",
]


def test_every_workload_runs_and_moves_blocks(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    found = host_tier.main([*SMALL, "--json", str(tmp_path / "found.json")])
    again, idle, talk = found["again"], found["idle"], found["conversations"]
    assert again["cached_tokens_least"] > 0  # type: ignore[index]
    assert again["blocks_in"] > 0  # type: ignore[index]
    assert set(idle) == {"with_tokens_per_s", "without_tokens_per_s", "cost_percent", "spread_percent"}  # type: ignore[call-overload]
    assert talk["with"]["cached_tokens"] > talk["without"]["cached_tokens"]  # type: ignore[index]
    assert talk["with"]["prefill_tokens"] < talk["without"]["prefill_tokens"]  # type: ignore[index]
    assert talk["with"]["blocks_in"] > 0  # type: ignore[index]
    assert talk["without"]["blocks_out"] == 0  # type: ignore[index]
    assert set(talk["ratio"]) == {"tokens_per_s", "first_token_p50_ms"}  # type: ignore[index]
    assert (tmp_path / "found.json").exists()
    assert "s in all" in capsys.readouterr().out


def test_what_has_not_begun_in_time_is_left_out_and_said_so(capsys: pytest.CaptureFixture[str]) -> None:
    found = host_tier.main([*SMALL, "--budget-s", "0", "--only", "again", "conversations"])
    assert "again" not in found
    assert capsys.readouterr().out.count("left out") == 2


def test_without_a_device_it_says_so_in_a_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    with pytest.raises(SystemExit, match="torch finds none"):
        host_tier.main([])
