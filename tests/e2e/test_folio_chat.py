"""The embedded model, served and asked as a user does, answers what transformers answers."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from octavo.cli.main import main
from tests.support.services.service import REPOSITORY, Service, environment, serve


@pytest.fixture(scope="module")
def answers() -> list[dict[str, Any]]:
    """What transformers answered, greedily, in float32 on a CPU (examples/train_demo/card.py)."""
    file = REPOSITORY / "model/embedded/folio-chat/answers.json"
    return list(json.loads(file.read_text())["answers"])


def command(service: Service, prompt: str) -> list[str]:
    """`octavo generate --chat --json PROMPT`, greedily."""
    options = [f"--port={service.port}", "--temperature=0", "--max-tokens=120"]
    return ["generate", "--chat", "--json", "--token-ids", prompt, *options]


def by_a_process(service: Service, prompt: str) -> dict[str, Any]:
    """As a user types it."""
    done = subprocess.run(
        [sys.executable, "-m", "octavo.cli.main", *command(service, prompt)],
        env=environment(), capture_output=True, text=True, timeout=200, check=True,
    )  # fmt: skip
    return dict(json.loads(done.stdout))


def test_the_twenty_answers_are_those_of_transformers(
    tmp_path: Path, answers: list[dict[str, Any]], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """One by a process of its own, whose start takes longer than an answer; the others by its main."""
    monkeypatch.chdir(tmp_path)
    assert len(answers) == 20
    with serve(tmp_path, "--dtype=float32") as service:
        got = [by_a_process(service, answers[0]["prompt"])]
        for answer in answers[1:]:
            assert main(command(service, answer["prompt"])) == 0
            got.append(json.loads(capsys.readouterr().out))
    assert [answer["token_ids"] for answer in got] == [answer["ids"] for answer in answers]
    assert [answer["finished"]["reason"] for answer in got] == [
        "FINISH_REASON_STOP" if answer["finish"] == "eos" else "FINISH_REASON_LENGTH" for answer in answers
    ]
