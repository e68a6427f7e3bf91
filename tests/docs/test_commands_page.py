"""docs/commands.md shows what the commands print: each is typed beside a service, and what came is compared but for
numbers, ids and the width of columns. `…` on the page stands for anything."""

import os
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from octavo.cli.app import whole_command
from tests.docs.blocks import blocks_of
from tests.support.services.service import Service, environment, free_port, launch

PAGE = "docs/commands.md"
SHOWN = [block.code.partition("\n") for block in blocks_of(PAGE)]
INPUT = "/exit\n"  # to what asks


@pytest.fixture(scope="module")
def beside(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Service, Path]]:
    """A service with the embedded model and a front, and the run directory of its user."""
    folder = tmp_path_factory.mktemp("beside")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_RUNTIME_DIR", str(folder))
        arguments = ("--num-blocks=2048", "--num-threads=1", f"--openai={free_port()}")
        with launch(tmp_path_factory.mktemp("service"), *arguments) as running:
            running.wait_until_supervised()
            yield running, folder


def plain(line: str) -> str:
    """Without what differs from run to run: numbers, ids, the width of columns, which bars of blocks are full."""
    line = re.sub(r"\b[0-9a-f]{12}\b", "0", line)
    line = re.sub(r"\d+([,.:]\d+)*", "0", line)
    line = re.sub(r"([=─━-])\1{3,}", r"\1", line)
    return re.sub(r"\s+", " ", line).strip()


def is_like(shown: str, printed: str) -> bool:
    pieces = [re.escape(piece) for piece in plain(shown).split("…")]
    return re.fullmatch(r"\s*" + ".*".join(pieces) + r"\s*", plain(printed)) is not None


def said_by(command: str, service: Service, folder: Path, place: Path) -> str:
    words = shlex.split(command.removeprefix("$ octavo "))
    if words[0] == "serve":
        return service.log.read_text()
    variables = environment() | {"XDG_RUNTIME_DIR": str(folder), "COLUMNS": "120"}
    variables |= {} if words[0] in ("ps", "doctor", "config") else {"OCTAVO_PORT": str(service.port)}
    done = subprocess.run(
        [sys.executable, "-m", "octavo.cli.main", *words],
        cwd=place,
        env=variables,
        input=INPUT,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=240,
        check=False,
    )
    assert done.returncode in (0, 1), done.stdout
    return done.stdout


@pytest.mark.slow
@pytest.mark.parametrize(("command", "_newline", "shown"), SHOWN, ids=[command for command, _, _ in SHOWN])
def test_the_page_shows_what_is_printed(
    command: str, _newline: str, shown: str, beside: tuple[Service, Path], tmp_path: Path
) -> None:
    """In this order; lines that the page leaves out may come between."""
    printed = said_by(command, *beside, tmp_path)
    rest = iter(printed.splitlines())
    for line in shown.splitlines():
        assert any(is_like(line, other) for other in rest), f"not printed: {line}\n{printed}"


def test_every_command_has_a_section(repository: Path) -> None:
    titles = re.findall(r"^### (.+)$", (repository / PAGE).read_text(), re.MULTILINE)
    told = {name.strip() for title in titles for name in title.split(",")}
    commands = whole_command().commands
    assert told == {name for name, command in commands.items() if not command.hidden}


def test_a_line_is_compared_but_for_what_differs() -> None:
    assert is_like("KV pool:  2,048 blocks × 16 = 32,768 tokens", "  KV pool:  512 blocks × 16 = 8,192 tokens")
    assert is_like("model:  folio-chat  (…)", "  model:    folio-chat  (cpu, bfloat16)")
    assert not is_like("model:  folio-chat", "model: folio-cat")
    assert is_like(f"{os.sep}…{os.sep}x", "/a/b/x")
