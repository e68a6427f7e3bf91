"""The fault matrix: sixty-two things that go wrong, and the tests that show what callers see of each.

`python -m tests.faults.page` writes docs/reliability.md from it. A file of `tests/faults/rows` has the rows of a part.
"""

from dataclasses import replace

from tests.faults.rows import grpc_and_http2, inputs, operation, scheduler_and_blocks, worker_processes, zeromq
from tests.faults.rows.row import Row

PARTS: dict[str, dict[int, Row]] = {
    "Worker processes": worker_processes.ROWS,
    "Scheduler and blocks": scheduler_and_blocks.ROWS,
    "gRPC and HTTP/2": grpc_and_http2.ROWS,
    "Input": inputs.ROWS,
    "ZeroMQ": zeromq.ROWS,
    "Checkpoints, host, operation": operation.ROWS,
}


def headed(heading: str, rows: dict[int, Row]) -> dict[int, Row]:
    """The rows of a part, the first of them with its heading."""
    first = min(rows)
    return rows | {first: replace(rows[first], heading=heading)}


ROWS: dict[int, Row] = {number: row for part in PARTS.items() for number, row in headed(*part).items()}
