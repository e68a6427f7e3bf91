"""The embedded model, served and asked as a user does, answers what transformers answers."""

import asyncio
import json
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.support.service import REPOSITORY, Service, environment, serve


@pytest.fixture(scope="module")
def answers() -> list[dict[str, Any]]:
    """What transformers answered, greedily, in float32 on a CPU (examples/train_demo/card.py)."""
    file = REPOSITORY / "model/embedded/folio-chat/answers.json"
    return list(json.loads(file.read_text())["answers"])


async def generate(service: Service, prompt: str) -> dict[str, Any]:
    """`octavo generate --chat --json PROMPT`, greedily."""
    command = [sys.executable, "-m", "cli.main", "generate", "--chat", "--json", "--token-ids", prompt]
    options = [f"--port={service.port}", "--temperature=0", "--max-tokens=120"]
    process = await asyncio.create_subprocess_exec(
        *command, *options, env=environment(), stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE
    )
    output, errors = await asyncio.wait_for(process.communicate(), 60)
    assert process.returncode == 0, errors.decode()
    return dict(json.loads(output))


async def test_the_twenty_answers_are_those_of_transformers(tmp_path: Path, answers: list[dict[str, Any]]) -> None:
    assert len(answers) == 20
    with serve(tmp_path, "--dtype=float32") as service:
        got = [await generate(service, answer["prompt"]) for answer in answers]
    assert [answer["token_ids"] for answer in got] == [answer["ids"] for answer in answers]
    assert [answer["finished"]["reason"] for answer in got] == [
        "FINISH_REASON_STOP" if answer["finish"] == "eos" else "FINISH_REASON_LENGTH" for answer in answers
    ]
