"""Turns what went wrong into three lines for a person. Knows errors by name, imports none of them."""

import errno
import os
import re
import sys

from octavo.cli.errors import CliError, nearest, usage

REPORT = "run it again with --debug for the traceback"
_NO_MEMORY = (
    "there is too little memory",
    "raise the limit (ulimit -v, the container's), close other programs, or take a smaller model",
)
_LIMITS = {
    errno.ENOMEM: _NO_MEMORY,
    errno.EAGAIN: (
        "no more processes or threads can be started",
        "raise ulimit -u, or the container's limit of processes (pids)",
    ),
    errno.EMFILE: ("too many files are open", "raise ulimit -n"),
    errno.ENFILE: ("too many files are open on this machine", "raise fs.file-max, or close other programs"),
    errno.EFBIG: ("a file may not become so large", "raise ulimit -f"),
}
"""A limit that the system sets this process -> what happened, what to change."""
_SIGNS = {
    "can't start new thread": errno.EAGAIN,
    "failed to map segment": errno.ENOMEM,  # of a library, by the loader
    "cannot allocate memory": errno.ENOMEM,
    "can't allocate memory": errno.ENOMEM,  # torch's
}
"""What an error that has no number says of such a limit."""
_KNOWN = {
    "CheckpointError": ("the checkpoint cannot be used", "check the name of the model, or download it again"),
    "HubUnreachable": (
        "the checkpoint cannot be fetched",
        "look at the network (HF_ENDPOINT names another hub), or give a folder with --model",
    ),
    "NoRoom": (
        "the disk has no room for the checkpoint",
        "free some space there, or set HF_HOME to a folder on a larger disk",
    ),
    "ConfigError": (
        "the checkpoint is not supported",
        "Qwen2.5 and Qwen3 dense checkpoints are; see docs/architecture.md",
    ),
    "CacheUnusable": (
        "a cache cannot be used",
        "name a folder that can be written and executed from; in a container, mount a volume there",
    ),
    "RunDirError": ("the run directory cannot be used", "mend the folder, or give another with --run-dir"),
    "EndpointError": ("bad endpoint", "an endpoint is ipc:///folder/name.sock or tcp://host:port"),
    "AddressError": ("bad address", "see --host, --metrics-host and --exposure in --help"),
    "BindError": ("cannot listen", "give another port (0 takes a free one), or an address of this host"),
    "GroupLost": (
        "a rank of the worker was lost",
        "see what it logged; status -9 without a word is most often the system's, which is out of memory",
    ),
    "MemoryError": _NO_MEMORY,
    "UnicodeEncodeError": (
        "a path or a word has bytes that are no text in this locale",
        "choose a locale with UTF-8 (LC_ALL=C.UTF-8), or rename the file or folder",
    ),
    "TooFewDescriptors": ("too few files may be open", "raise ulimit -n (a container's is --ulimit nofile)"),
    "KeyFileError": ("the key file cannot be used", "`octavo keys new` makes key files"),
    "TracingError": ("traces cannot be had", "or set OTEL_SDK_DISABLED=true"),
    "FormatUnavailable": (
        "the weights cannot be had in that form",
        "change --quantization, --kv-cache-dtype or --device, or leave them out",
    ),
    "InvarianceUnavailable": (
        "deterministic mode cannot be had so",
        "leave --deterministic out, or what is named here",
    ),
    "TextError": ("the text cannot be used", "see docs/operations.md, the table of statuses"),
    "ValueError": ("bad value", "see --help"),
    "CardError": ("the checkpoint cannot be served", "check the name of the model, and the file that is named here"),
    "OverflowError": (
        "a number is too large",
        "look at the numbers among the settings (`octavo config show`) and in the checkpoint's config.json",
    ),
    "RecursionError": (
        "something is nested too deeply to be read",
        "look at the JSON files of the checkpoint, and at the configuration file",
    ),
}
"""Name of an exception -> what happened, what to change."""
_OF_SETTINGS = frozenset({"EndpointError", "AddressError", "KeyFileError", "TracingError"})
"""Those of them that say that a setting is wrong."""


def explain(error: BaseException, *, address: str = "--host and --port") -> CliError:
    """The three lines for any exception. address: the flags by which the command is told where a service is."""
    if isinstance(error, CliError):
        return error
    name = type(error).__name__
    if (full := _disk_full(error)) is not None:
        where = full.filename or "a file or folder of this process"
        return CliError("the disk is full", str(where), "free some space there, or name another disk's folder")
    if (limit := _limit(error)) is not None:
        what, change = limit
        return CliError(what, str(error) or name, change)
    if hasattr(error, "format_message"):  # typer's own complaints about a command line
        return _of_command_line(error)
    if hasattr(error, "reason") and hasattr(error, "code"):
        return _of_call(error, address)
    if isinstance(error, OSError) and error.errno == errno.EADDRINUSE:
        return CliError(
            "a port is busy", str(error), "choose another with --port, --metrics-port or --worker-metrics-port"
        )
    if all(hasattr(error, part) for part in ("what", "numbers", "change")):  # they already come in three parts
        exit_code = getattr(error, "exit_code", 1)
        return CliError(error.what, error.numbers, error.change, exit_code)  # type: ignore[attr-defined]
    for kind in type(error).__mro__:
        if kind.__name__ in _KNOWN:
            what, change = _KNOWN[kind.__name__]
            return CliError(what, str(error) or name, change, 2 if kind.__name__ in _OF_SETTINGS else 1)
    if isinstance(error, OSError) and "temporary directory" in (error.strerror or ""):  # tempfile's
        return CliError("there is no folder for temporary files", str(error.strerror), "name one with TMPDIR")
    if isinstance(error, OSError) and error.strerror and error.errno is not None:
        numbers = error.filename or (error.strerror if error.strerror != os.strerror(error.errno) else error)
        return CliError(os.strerror(error.errno).lower(), str(numbers), REPORT)
    if "home directory" in str(error):  # pathlib's, of a user without an entry in passwd
        return CliError("this user has no home folder", str(error), "set HOME, and write no path with ~")
    if isinstance(error, ModuleNotFoundError):
        return CliError("a package is missing", str(error), "`octavo doctor` lists what is installed")
    return CliError(name, str(error) or "no details", REPORT)


def _limit(error: BaseException) -> tuple[str, str] | None:
    """The system limit that the error is about, if any."""
    if isinstance(error, OSError) and error.errno in _LIMITS:
        return _LIMITS[error.errno]
    if isinstance(error, RuntimeError | ImportError | OSError):
        return next((_LIMITS[number] for sign, number in _SIGNS.items() if sign in str(error).lower()), None)
    return None


def _disk_full(error: BaseException | None) -> OSError | None:
    """The error, or a cause of it, that says that the disk is full; its consequences (such as a half download) need no
    mention then."""
    for _ in range(8):
        if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT):
            return error
        error = error.__cause__ or error.__context__ if error is not None else None
    return None


def show_error(error: CliError) -> None:
    """Print the three lines on stderr."""
    from rich.console import Console
    from rich.text import Text

    text = Text()
    text.append("error: ", "bold red").append(error.what + "\n", "bold")
    text.append(f"  {error.numbers}\n").append(f"  → {error.change}", "green")
    Console(file=sys.stderr, soft_wrap=True, highlight=False).print(text)


def _of_command_line(error: BaseException) -> CliError:
    message = str(error.format_message()).replace(": Value error, ", ": ")  # type: ignore[attr-defined]
    head, _, hint = message.partition(" Did you mean ")
    possible = getattr(error, "possibilities", None)
    if possible:
        head = f"no such option: {error.option_name}"  # type: ignore[attr-defined]
        hint = f"{nearest(error.option_name, possible) or possible[0]}?"  # type: ignore[attr-defined]
    context = getattr(error, "ctx", None)
    path = context.command_path if context is not None else "octavo"
    return usage("bad command line", head.strip(), f"did you mean {hint}" if hint else f"see `{path} --help`")


def _of_call(error: BaseException, address: str) -> CliError:
    """The three lines of an OctavoError."""
    message, reason, code = (getattr(error, name, "") for name in ("message", "reason", "code"))
    fields = "; ".join(f"{each.field}: {each.description}" for each in getattr(error, "violations", ()))
    if not reason and getattr(code, "name", "") == "UNAVAILABLE":
        if any(word in message for word in ("Socket closed", "handshake", "SSL")):
            return CliError("no connection", message, "is it TLS? see --tls, --tls-ca-file and --client-cert-file")
        return CliError("no service answers", message, f"start one with `octavo serve`, or give its {address}")
    if found := re.search(r"message larger than max \((\d+) vs\. (\d+)\)", message):
        size, limit = map(int, found.groups())
        return CliError(
            "the message is too large", f"{size:,} bytes, and at most {limit:,} may be", "ask for less at once"
        )
    advice = {
        "MODEL_NOT_FOUND": "`octavo models` lists what is served; choose with --model-name",
        "INVALID_FIELD": "change that field",
        "EXCEEDS_CAPACITY": "ask for less of what the line above counts, such as a shorter prompt",
        "CONSTRAINT": "ask for something simpler; docs/structured-output.md tells the limits",
        "UNAUTHENTICATED": "give the key in OCTAVO_API_KEY, or a certificate with --client-cert-file",
        "PERMISSION_DENIED": "ask the operator for a key with that scope",
        "TENANT_LIMIT": "try again in a moment, or ask the operator for more",
        "QUEUE_FULL": "try again in a moment, or serve with more --workers",
        "NO_WORKER": "wait until a worker is ready; the log of `octavo serve` tells where it stands",
        "WORKER_LOST": "try again: the supervisor restarts workers",
        "DEADLINE": "give a longer --timeout-s",
        "DEADLINE_EXCEEDED": "give a longer --timeout-s",  # before the service could say so
    }.get(reason or getattr(code, "name", ""), "see docs/operations.md, the table of statuses")
    return CliError(f"the request failed: {reason or getattr(code, 'name', '')}", fields or message, advice)
