"""What the pages say to type is typed: every block without a comment before it, beside a service.

Commands run in an empty folder. `make` only tells what it would do: its targets take minutes, and have tests of their
own. The service listens elsewhere than on the port of the pages: OCTAVO_PORT tells commands, addresses are exchanged.
"""

import ast
import asyncio
import inspect
import os
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.docs.blocks import BLOCKS, NO_COMMANDS, Block
from tests.support.services.service import REPOSITORY, Service, serve

RUN = [block for block in BLOCKS if not block.verb and block.language not in NO_COMMANDS]
PYTHON_PAGES = sorted({block.page for block in RUN if block.language == "python"})
BOUND_S = 300.0  # a busy machine is no fault
TYPED = "Hello!\n/bye\n"  # to what asks; then the input ends


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Service]:
    with serve(tmp_path_factory.mktemp("service"), "--num-blocks=256", "--num-threads=1") as running:
        yield running


@pytest.fixture
def place(tmp_path: Path) -> Path:
    """A folder with the environment of a checkout, and a `make` that only tells."""
    programs = tmp_path / ".venv/bin"
    programs.mkdir(parents=True)
    for program in ("octavo", "python"):
        (programs / program).symlink_to(Path(sys.executable).parent / program)
    (programs / "make").write_text(f'#!/bin/sh\nexec /usr/bin/env -i PATH="$REAL_PATH" make -n -C {REPOSITORY} "$@"\n')
    (programs / "make").chmod(0o755)
    return tmp_path


def typed(command: str, place: Path, service: Service) -> subprocess.CompletedProcess[str]:
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("OCTAVO_", "MAKE", "MFLAGS"))}
    return subprocess.run(
        ["bash", "-c", command.replace("127.0.0.1:50051", service.target)],
        cwd=place,
        env=kept
        | {
            "PATH": f"{place / '.venv/bin'}{os.pathsep}{os.environ['PATH']}",
            "REAL_PATH": os.environ["PATH"],
            "OCTAVO_PORT": str(service.port),
            "OMP_NUM_THREADS": "1",
        },
        input=TYPED,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=BOUND_S,
        check=False,
    )


@pytest.mark.parametrize("block", [each for each in RUN if each.language == "console"], ids=lambda block: block.name)
def test_each_command_of_a_block_ends_well(block: Block, place: Path, service: Service) -> None:
    assert block.commands()
    for command in block.commands():
        done = typed(command, place, service)
        assert done.returncode == 0, f"{command}\n{done.stdout[-3000:]}"


def test_a_command_that_is_wrong_is_found(place: Path, service: Service) -> None:
    """The control of the test above."""
    assert typed("octavo generate --chatt hello", place, service).returncode != 0
    assert typed("make nonsense", place, service).returncode != 0


@pytest.mark.parametrize("page", PYTHON_PAGES)
def test_the_python_of_a_page_runs_from_its_first_block_to_its_last(page: str, service: Service) -> None:
    """`await` may stand outside of a function, as in a notebook."""
    names: dict[str, Any] = {"__name__": "page"}
    for block in RUN:
        if block.page == page and block.language == "python":
            code = textwrap.dedent(block.code).replace("127.0.0.1:50051", service.target)
            compiled = compile(code, block.name, "exec", flags=ast.PyCF_ALLOW_TOP_LEVEL_AWAIT)
            waiting = eval(compiled, names)
            if inspect.iscoroutine(waiting):
                asyncio.run(waiting)
    service.wait_until_idle()


@pytest.mark.parametrize("block", [each for each in RUN if each.language == "toml"], ids=lambda block: block.name)
def test_a_configuration_of_the_pages_is_read(block: Block, place: Path, service: Service) -> None:
    (place / "octavo.toml").write_text(block.code)
    done = typed("env -u OCTAVO_PORT octavo config show", place, service)
    assert done.returncode == 0, done.stdout
    assert "octavo.toml" in done.stdout
