"""The process of the command `octavo`: its streams, its exit code, and how its errors look.

Imports nothing before it runs but what Python has loaded by then: a Ctrl-C while modules are imported is one like any
other.
"""

from __future__ import annotations

import io
import os
import sys

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Sequence
    from typing import TextIO

SERVICES = ["serve"], ["gateway"], ["worker"], ["openai"]
GC_THRESHOLD = 10_000
"""Objects between two young collections: what is imported stays, and what a service makes of a message is short-lived.
With Python's own 700, 457 collections take 0.4 of the 3 s in which a worker imports torch."""


def run(arguments: Sequence[str] | None = None) -> None:
    """Entry point: run a command and exit with its code; errors in three lines on stderr."""
    try:
        _run(arguments)
    except KeyboardInterrupt:
        sys.exit(_interrupted())


def _run(arguments: Sequence[str] | None) -> None:
    import gc
    import signal

    gc.set_threshold(GC_THRESHOLD)
    words = sys.argv[1:] if arguments is None else arguments
    if os.getpid() == 1 or words[:1] in SERVICES:
        _take_signals()
    _open_closed_streams()
    for stream in (sys.stdout, sys.stderr):
        _print_what_can_be(stream)
    _leave_a_removed_folder()
    try:
        code = main(words)
    except _Ended as ended:
        _flushed(0)
        signal.signal(ended.number, signal.SIG_DFL)
        os.kill(os.getpid(), ended.number)  # whoever started this process sees by what it ended
        raise
    sys.exit(_flushed(code))


class _Ended(SystemExit):
    """By a signal."""

    def __init__(self, number: int) -> None:
        super().__init__(128 + number)
        self.number = number


def _take_signals() -> None:
    """Until a service has handlers of its own, seconds later: what it has made by then is removed. The first process of
    a container has no other way to end by SIGTERM, which the kernel keeps from one without a handler."""

    def end(number: int, frame: object) -> None:
        raise _Ended(number)

    import signal

    for number in (signal.SIGTERM, signal.SIGHUP):
        if signal.getsignal(number) is signal.SIG_DFL:  # nohup has SIGHUP ignored
            signal.signal(number, end)


def _open_closed_streams() -> None:
    """Replace streams that the parent closed (`<&-`): Python has None for those, which no library expects."""
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:
            setattr(sys, name, open(os.devnull, mode))  # noqa: SIM115  (with the lowest number that is free: its own)


def _print_what_can_be(stream: object) -> None:
    """Print `?` for characters that the locale cannot encode: without UTF-8 there are no box lines, no ×, and not
    everything that a model writes."""
    if not isinstance(stream, io.TextIOWrapper):
        return
    is_utf8 = stream.encoding.lower().replace("-", "") == "utf8"
    if stream.errors == "strict" or (stream.errors == "surrogateescape" and not is_utf8):  # what the locale C gives
        stream.reconfigure(errors="replace")


def _leave_a_removed_folder() -> None:
    """Change to another folder if the working directory was removed: libraries (MKL) abort the process there."""
    try:
        os.getcwd()
    except OSError:
        os.chdir("/")


def _flushed(code: int) -> int:
    """The exit code after flushing the output. Python would flush at exit, and on failure print two lines and exit with
    120. A failure to write to a reader that has gone (`| head`) does not count, nor does one to write the log."""
    import errno

    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except OSError as error:
            os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())
            if error.errno != errno.EPIPE and stream is sys.stdout:
                code = code or _fail(error)
    return code


def main(arguments: Sequence[str]) -> int:
    """The exit code of a command line: 0 done, 1 failed, 2 the command line or a setting is wrong, 130 interrupted."""
    streams, output = (sys.stdout, sys.stderr), _file_of(sys.stdout)
    for name in ("COLUMNS", "LINES"):  # 0 is an unknown size, and rich would print nothing into it
        if os.environ.get(name) == "0":
            del os.environ[name]
    try:
        from octavo.cli.settings.setting import DEBUG_VARIABLE
        from octavo.gateway.observability import grpc_environment  # noqa: F401  (sets it: before grpc)

        if "--debug" in arguments:
            os.environ[DEBUG_VARIABLE] = "1"
        words = [each for each in arguments if each != "--debug"]
        code = _process(words) if _is_process(words) else _command(words)
    except KeyboardInterrupt:
        return _interrupted()
    except SystemExit as ended:  # also typer's and rich's, without a word, where any pipe is broken
        if not isinstance(ended.__context__, BrokenPipeError):
            raise
        sys.stdout, sys.stderr = streams  # it has put others in their place
        return 0 if output is not None and _has_lost_its_reader(output) else _fail(ended.__context__)
    except Exception as error:
        return _fail(error)
    finally:
        if output is not None:
            os.close(output)
    return code if isinstance(code, int) else 0


def _file_of(stream: TextIO) -> int | None:
    """A descriptor of its own for the stream's file, since rich puts /dev/null behind a stdout that it cannot write to;
    None where the stream is no file."""
    try:
        return os.dup(stream.fileno())
    except (AttributeError, OSError, ValueError):  # None where it was closed before the start
        return None


def _is_process(words: Sequence[str]) -> bool:
    """Whether it is a process of a service with a file of settings and no options."""
    return len(words) == 3 and words[:1] in SERVICES[1:] and words[1] == "--config" and os.path.isabs(words[2])


def _process(words: Sequence[str]) -> int:
    from pathlib import Path

    from octavo.cli.serve.commands import run_process

    return run_process(words[0], Path(words[2]))


def _command(words: Sequence[str]) -> object:
    from octavo.cli.app import service_command, whole_command

    command = service_command() if words[:1] in SERVICES else whole_command()
    return command(words, standalone_mode=False, prog_name="octavo")


def _has_lost_its_reader(file: int) -> bool:
    """Whether it is a pipe that nobody reads any more; then what could not be written is discarded."""
    import select

    poll = select.poll()
    poll.register(file, 0)
    return bool(poll.poll(0))


def _interrupted() -> int:
    from octavo.cli.errors import INTERRUPTED

    return INTERRUPTED


def _fail(error: Exception) -> int:
    from octavo.cli.errors import CliError
    from octavo.cli.explain import explain, show_error
    from octavo.cli.settings.setting import DEBUG_VARIABLE

    if type(error).__name__ == "Abort":  # typer's: an interrupted prompt
        return _interrupted()
    if type(error).__name__ == "NoArgsIsHelpError":
        print(error.format_message())  # type: ignore[attr-defined]  # noqa: T201
        return 2
    if os.environ.get(DEBUG_VARIABLE) and not isinstance(error, CliError):
        import traceback

        traceback.print_exception(error)
    explained = explain(error)
    show_error(explained)
    return explained.exit_code


if __name__ == "__main__":
    run()
