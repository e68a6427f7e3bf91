"""Faults that the oracle's runner makes on purpose, for tests of everything that has to cope with them."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from octavo.worker.runners.interface import RunnerError


@dataclass(frozen=True, slots=True, kw_only=True)
class OracleFaults:
    """The faults to make.

    crash_token_id: the process ends (status 139) when a request with it joins.
    nan_token_id: a request with it in its prompt gives NaN from output index ``nan_output_index`` on.
    launch_errors, collect_errors: errors to raise, by step.
    """

    crash_token_id: int | None = None
    nan_token_id: int | None = None
    nan_output_index: int = 0
    launch_errors: Mapping[int, RunnerError] = field(default_factory=dict)
    collect_errors: Mapping[int, RunnerError] = field(default_factory=dict)
