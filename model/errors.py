"""The ways in which a checkpoint can be wrong. A command prints them as they are.

Must not know: processes, requests, status codes.
"""


class CheckpointError(Exception):
    """A checkpoint cannot be used: absent, truncated, malformed, or not the tensors that its config asks for.

    problems: one line each, with file and tensor name where there is one; the message has the first few dozen of them.
    """

    MAX_SHOWN = 40

    def __init__(self, summary: str, problems: tuple[str, ...] = ()) -> None:
        shown = list(problems[: self.MAX_SHOWN])
        if len(problems) > self.MAX_SHOWN:
            shown.append(f"… and {len(problems) - self.MAX_SHOWN} more")
        super().__init__("\n  ".join([summary, *shown]))
        self.summary = summary
        self.problems = problems


class HubUnreachable(CheckpointError):
    """The checkpoint is not on this machine, and the hub could not be asked for it."""


class NoRoom(CheckpointError):
    """The hub has the checkpoint, and the disk of the hub's cache has no room for it."""


class ConfigError(CheckpointError):
    """A field of config.json is absent, of the wrong type, out of range, or asks for what is not supported."""

    def __init__(self, field: str, reason: str) -> None:
        super().__init__(f"config.json: {field}: {reason}")
        self.field = field
