"""A program that does one piece of work after another, each in a fork of its process, so that slow imports happen only
once.

The program's module ends with `serve(...)`; callers use `Forks`.
"""

import json
import os
import subprocess
import sys
import traceback
from collections.abc import Callable, Mapping
from tempfile import TemporaryFile
from types import TracebackType
from typing import IO, Any, Self

END_TIMEOUT_S = 30.0


class WorkFailed(AssertionError):
    """The message has everything that the work wrote."""


def serve(work: Callable[..., None]) -> None:
    """Answer each line of stdin, which has an environment and arguments, with what work(*arguments) writes to stdout in
    that environment, and how it ends."""
    answers = os.fdopen(os.dup(1), "w")
    for line in sys.stdin:
        environment, arguments = json.loads(line)
        with TemporaryFile("w+") as written, TemporaryFile("w+") as errors:
            process = os.fork()
            if process == 0:
                _do(work, environment, arguments, written, errors)
            _, status = os.waitpid(process, 0)
            told = [os.waitstatus_to_exitcode(status), *(_whole(file) for file in (written, errors))]
        answers.write(json.dumps(told) + "\n")
        answers.flush()


def _do(
    work: Callable[..., None], environment: dict[str, str], arguments: list[Any], out: IO[str], errors: IO[str]
) -> None:
    os.dup2(out.fileno(), 1)
    os.dup2(errors.fileno(), 2)
    status = 1
    try:
        os.environ.update(environment)
        work(*arguments)
        status = 0
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)


def _whole(file: IO[str]) -> str:
    file.seek(0)
    return file.read()


class Forks:
    """The running program, until this context is left. environment: in addition to this process's."""

    def __init__(self, module: str, environment: Mapping[str, str]) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-m", module], env=os.environ | environment, text=True,
            stdin=subprocess.PIPE, stdout=subprocess.PIPE,
        )  # fmt: skip

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: object, where: TracebackType | None) -> None:
        try:
            self._process.communicate(timeout=END_TIMEOUT_S)
        finally:
            self._process.kill()
            self._process.wait()

    def lines(self, *arguments: Any, environment: Mapping[str, str]) -> list[str]:
        """The lines that the program's work writes for these arguments. environment: in addition to the program's."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(json.dumps([dict(environment), arguments]) + "\n")
        self._process.stdin.flush()
        answer = self._process.stdout.readline()
        if not answer:
            raise WorkFailed(f"the program ended with status {self._process.wait(END_TIMEOUT_S)}")
        status, written, errors = json.loads(answer)
        if status != 0:
            raise WorkFailed(f"status {status}\n{written}{errors}")
        return list(written.splitlines())
