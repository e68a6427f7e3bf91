"""`octavo doctor` with --tensor-parallel-size: are there places for the ranks, and do they reach each other?"""

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch

from octavo.cli.settings.groups import ServeSettings
from octavo.cli.tools import doctor_ranks
from octavo.cli.tools.doctor_checks import Finding, Verdict
from octavo.cli.tools.doctor_model import check_models
from octavo.cli.tools.doctor_ranks import check_ranks
from octavo.worker.loading import rank_probe
from octavo.worker.loading.rank_probe import ProbeResult, RanksApart, probe_ranks
from tests.support.children import live_children
from tests.support.model.checkpoints import write_tiny_checkpoint


def settings(size: int = 2, **changes: Any) -> ServeSettings:
    return ServeSettings(tensor_parallel_size=size, **{"device": "cpu"} | changes)


def probes() -> list[psutil.Process]:
    """Children of this process that measure."""
    return live_children(rank_probe.__name__)


def planted(monkeypatch: pytest.MonkeyPatch, outcome: ProbeResult | RanksApart) -> list[tuple[int, str]]:
    """Instead of processes. Returns what was asked for."""
    asked: list[tuple[int, str]] = []

    def answer(size: int, *, device: str) -> ProbeResult:
        asked.append((size, device))
        if isinstance(outcome, RanksApart):
            raise outcome
        return outcome

    monkeypatch.setattr(rank_probe, "probe_ranks", answer)
    return asked


QUICK = ProbeResult(transport="gloo", token_s=0.00004, prompt_s=0.004, dtype_bytes=4)


def test_two_ranks_of_this_machine_reach_each_other_and_it_says_how_fast() -> None:
    (finding,) = check_ranks(settings())
    assert finding.name == "ranks"
    assert finding.verdict in (Verdict.GOOD, Verdict.WARNING)  # a busy machine is slow
    assert re.fullmatch(
        r"2 reach each other over gloo: a sum takes [\d,]+ µs for one token, [\d,.]+ ms for 512 \([\d.]+ GB/s\)",
        finding.detail,
    )
    assert probes() == []


def test_ranks_that_cannot_meet_are_told_in_a_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "nowhere0")
    (finding,) = check_ranks(settings())
    assert finding.verdict is Verdict.BAD
    assert re.match(r"rank \d of 2 failed: .*nowhere0", finding.detail)
    assert finding.advice == "the loopback interface must be up and named by GLOO_SOCKET_IFNAME (lo)"
    assert probes() == []


def test_ranks_that_do_not_answer_in_time_are_ended() -> None:
    with pytest.raises(RanksApart, match=r"rank \d of 2 had no answer from the others within 0.01 s"):
        probe_ranks(2, device="cpu", timeout_s=0.01)
    assert probes() == []


def test_a_rank_that_fails_is_told_at_once_and_not_one_that_waits_for_it(monkeypatch: pytest.MonkeyPatch) -> None:
    def failing(command: list[str], **options: Any) -> "subprocess.Popen[str]":
        if json.loads(command[-1])["rank"] == 1:
            command = [sys.executable, "-c", "import sys; sys.exit('no such device')"]
        return popen(command, **options)

    popen = subprocess.Popen
    monkeypatch.setattr(rank_probe.subprocess, "Popen", failing)
    with pytest.raises(RanksApart, match=r"rank 1 of 2 failed: no such device"):
        probe_ranks(2, device="cpu", timeout_s=20.0)
    assert probes() == []


def test_a_worker_of_one_rank_needs_no_others(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = planted(monkeypatch, QUICK)
    assert check_ranks(settings(1)) == []
    assert asked == []


def test_more_ranks_than_cores_are_a_warning_and_more_than_devices_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = planted(monkeypatch, QUICK)
    monkeypatch.setattr(doctor_ranks, "usable_cores", lambda: 3)  # a container may have fewer than it sees
    (finding,) = check_ranks(settings(4))
    assert (finding.verdict, finding.advice) == (Verdict.WARNING, "4 ranks share 3 cores: fewer ranks are faster")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    (finding,) = check_ranks(settings(4, device="auto"))
    assert (finding.verdict, finding.detail) == (Verdict.BAD, "4 ranks need a CUDA device each, and there are 2")
    assert finding.advice == "--tensor-parallel-size 2 or less, or --device cpu"
    assert asked == [(4, "cpu")]
    check_ranks(settings(2, device="auto"))
    assert asked == [(4, "cpu"), (2, "cuda")]


def test_slow_sums_are_a_warning(monkeypatch: pytest.MonkeyPatch) -> None:
    planted(monkeypatch, ProbeResult(transport="gloo", token_s=0.02, prompt_s=0.5, dtype_bytes=4))
    monkeypatch.setattr(doctor_ranks, "usable_cores", lambda: 3)  # a container may have fewer than it sees
    (finding,) = check_ranks(settings())
    assert finding.verdict is Verdict.WARNING
    assert finding.detail.endswith("a sum takes 20,000 µs for one token, 500.00 ms for 512 (0.03 GB/s)")


def test_a_model_that_cannot_be_cut_is_told(tmp_path: Path) -> None:
    folder = write_tiny_checkpoint(tmp_path / "model")

    def cut_of(size: int) -> list[Finding]:
        found = check_models(settings(size, model=(str(folder),)))
        return [each for each in found if each.name == "cut"]

    assert cut_of(1) == []
    (good,) = cut_of(2)
    assert (good.verdict, good.detail) == (Verdict.GOOD, "model can be cut into 2 ranks")
    (bad,) = cut_of(3)
    assert bad.verdict is Verdict.BAD
    assert bad.detail.startswith("tensor_parallel_size 3 does not fit the model: config.json: num_attention_heads: 4")
    assert bad.advice == "give 4 or 2 or 1"
