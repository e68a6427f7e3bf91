"""A real worker process without torch: `python -m tests.support.services.oracle_worker '{"gateway_endpoints": […],
…}'`.

The argument has fields of WorkerConfig; the runner is the oracle.
"""

import json
import sys
from pathlib import Path
from typing import Any

from octavo.worker.config import CurveConfig, RunnerKind, WorkerConfig
from octavo.worker.main import main


def config_of(fields: dict[str, Any]) -> WorkerConfig:
    """A WorkerConfig from JSON values."""
    curve = fields.pop("curve", None)
    return WorkerConfig(
        model=fields.pop("model", "oracle"),
        gateway_endpoints=tuple(fields.pop("gateway_endpoints")),
        runner=RunnerKind.ORACLE,
        metrics_port=fields.pop("metrics_port", None),
        curve=CurveConfig(**{name: Path(path) for name, path in curve.items()}) if curve else None,
        **fields,
    )


if __name__ == "__main__":
    sys.exit(main(config_of(json.loads(sys.argv[1]))))
