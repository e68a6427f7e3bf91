"""What the oracle's runner does wrong, on purpose: for tests of everything that has to live with it."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from octavo.worker.runners.interface import RunnerError


@dataclass(frozen=True, slots=True, kw_only=True)
class OracleFaults:
    """What goes wrong, on purpose.

    crash_token_id: the process ends (status 139) when a request with it joins.
    nan_token_id: a request with it in its prompt turns NaN at output index ``nan_output_index``.
    launch_errors, collect_errors: by step.
    """

    crash_token_id: int | None = None
    nan_token_id: int | None = None
    nan_output_index: int = 0
    launch_errors: Mapping[int, RunnerError] = field(default_factory=dict)
    collect_errors: Mapping[int, RunnerError] = field(default_factory=dict)
