"""What callers of the whole service get, with the embedded model at tiny sizes, and with callers that fail."""

import json
from pathlib import Path

import pytest

from bench import talks
from bench.callers import Callers, CallersError
from bench.gpu.service import measure, parse, stages

CALLER = """
import time

def client(target, jobs, begin, results, temperature):
    begin.wait()
    if target == "slow":
        time.sleep(3600)
    if target == "dead":
        raise SystemExit
    results.put([dict(want=count, got=len(ids), arrivals=[(0.1, 1), (0.3, count - 1)]) for _, ids, count in jobs])
"""


@pytest.fixture
def callers(tmp_path: Path) -> Callers:
    file = tmp_path / "load.py"
    file.write_text(CALLER)
    return Callers(2, file)


def of(*lengths: tuple[int, int]) -> list[talks.Conversation]:
    return [(talks.Turn(ids=(7,) * num_prompt, num_output=num_output),) for num_prompt, num_output in lengths]


def test_every_part_tells_its_figures_and_one_that_fails_does_not_end_the_others(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    trace, out = tmp_path / "trace.csv", tmp_path / "out.json"
    trace.write_text("no trace at all\n")
    parts = ["one", "cached", "conversations", "trace", "burst"]
    figures = measure(parse(["--quick", "--only", *parts, "--trace", str(trace), "--out", str(out)]), tmp_path)
    said = capsys.readouterr().out
    assert "trace, default: FAILED" in said
    assert "trace.csv" in said
    assert all(word in said for word in ("ONE STREAM ", "CACHED / fresh: ", "worst single turn", "BURST lowest "))
    assert {"cached / fresh", "conversations, worst cached turn, ms", "burst, tok/s"} <= figures.keys()
    assert isinstance(one := figures["one stream, ms"], dict)
    assert {name: len(each) for name, each in one.items()} == {"first token": 2, "a token": 2}
    assert json.loads(out.read_text()) == figures
    again, fresh = figures["cached, cached, seed 13"], figures["cached, fresh, seed 13"]
    assert isinstance(again, dict)
    assert isinstance(fresh, dict)
    assert again["cached"] > fresh["cached"] == 0


def test_a_service_that_does_not_start_is_told_and_the_next_one_runs(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    figures = measure(parse(["--quick", "--only", "nano", "--best-flags=--max-model-len=9999"]), tmp_path)
    said = capsys.readouterr().out
    assert said.count("service best: FAILED") == 2
    assert said.count("service default: ready") == 2
    assert "nano, default, seed 3" in figures


def test_nothing_begins_when_the_seconds_are_over(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert measure(parse(["--quick", "--only", "start", "--seconds", "0.5"]), tmp_path) == {}
    assert "start: NOT RUN" in capsys.readouterr().out


def test_callers_share_the_conversations_and_tell_of_each(callers: Callers) -> None:
    try:
        heard = callers.call("any", of((3, 3), (4, 4), (2, 5)), timeout_s=60)
        assert sorted((each.want, each.got) for each in heard.answers) == [(3, 3), (4, 4), (5, 2)]
        assert heard.first_ms() == [100.0] * 3
        assert heard.gaps_ms == pytest.approx([200.0] * 3)
        assert heard.complaint == "1 of 3 answers not whole: 2 of 5 tokens"
    finally:
        callers.close()


@pytest.mark.parametrize(("target", "why"), [("slow", "did not end within"), ("dead", "ended")])
def test_callers_that_fail_are_told_and_others_take_their_place(callers: Callers, target: str, why: str) -> None:
    try:
        callers.call("any", of((3, 3), (3, 3)), timeout_s=60)
        with pytest.raises(CallersError, match=why):
            callers.call(target, of((3, 3), (3, 3)), timeout_s=5)
        assert not callers.call("any", of((3, 3)), timeout_s=60).complaint
    finally:
        callers.close()


def test_conversations_have_their_begin_in_common_and_are_drawn_anew_by_seed() -> None:
    sizes = talks.Sizes()
    ours, others = talks.conversations(sizes, 1), talks.conversations(sizes, 2)
    assert (len(ours), {len(each) for each in ours}) == (64, {6})
    assert len({each[0].ids[:1000] for each in ours}) == 1
    assert len({each[0].ids for each in ours}) == 64
    assert ours == talks.conversations(sizes, 1) != others


def test_the_lengths_of_a_trace_are_those_of_its_file_or_those_of_a_code_assistant(tmp_path: Path) -> None:
    file = tmp_path / "trace.csv"
    file.write_text(
        "TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:15:46.68,374,44\n2023-11-16 18:15:50.99,99999,9\n"
    )
    assert talks.trace_lengths(talks.Sizes(), file) == [(374, 44), (30_000, 9)]
    drawn = talks.trace_lengths(talks.Sizes(), None)
    assert len(drawn) == 1000
    assert 1500 < sum(prompt for prompt, _ in drawn) / 1000 < 2500
    assert 20 < sum(answer for _, answer in drawn) / 1000 < 40


def test_the_stages_of_a_start_are_told_by_seconds_since_its_first_word() -> None:
    log = "\n".join([
        '{"event": "starting", "timestamp": "2026-11-22T16:42:26.5Z"}',
        "Octavo is ready after 7.0 s",
        '{"event": "warming_up", "done": 9, "total": 9, "timestamp": "2026-11-22T16:42:28.0Z"}',
    ])  # fmt: skip
    assert stages(log) == ["  0.00 starting", "  1.50 warming_up done=9 total=9"]
