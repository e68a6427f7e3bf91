"""`python -m tests.soak --minutes 30 --seed 1`: a service of one gateway and two workers under load and random faults.

Figures go to the file that OCTAVO_FIGURES names (row 60 where it was half an hour), everything to --json. Exit code 1
where anything was violated, or memory grew.
"""

import argparse
import asyncio
import sys
import tempfile
from pathlib import Path

from tests.soak.config import FAULTS, SoakConfig
from tests.soak.drive import Soak
from tests.soak.report import figures, is_good, whole
from tests.support.faults.figures import record, show

WHOLE_S = 29 * 60.0  # shorter soaks are no row of the table


def main() -> int:
    """Parse, run, report."""
    parser = argparse.ArgumentParser(prog="python -m tests.soak", description=__doc__)
    parser.add_argument("--minutes", type=float, default=30.0)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--round-s", type=float, default=20.0, help="seconds of load between two quiesce points")
    parser.add_argument("--min-life-s", type=float, default=35.0, help="leave processes alone that are younger")
    parser.add_argument("--only", metavar="NAME,NAME", help="draw from these faults alone; none: no faults")
    parser.add_argument("--json", type=Path, help="everything that was seen")
    parser.add_argument("--log", type=Path, help="keep the service's log here")
    parser.add_argument("--leak", metavar="ROLE=MIB_PER_H", help="plant a leak in gateway or worker")
    given = parser.parse_args()
    leak = given.leak.split("=") if given.leak else None
    config = SoakConfig(
        seconds=60 * given.minutes,
        seed=given.seed,
        round_s=given.round_s,
        min_life_s=given.min_life_s,
        faults=tuple(each for each in FAULTS if given.only is None or each.name in given.only.split(",")),
        leak=(leak[0], float(leak[1])) if leak else None,
    )
    soak = Soak(config=config, show=show)
    with tempfile.TemporaryDirectory(prefix="octavo-soak-") as folder:
        try:
            asyncio.run(soak.run(Path(folder)))
        except AssertionError as error:
            soak.violations.append(f"the service did not end in order: {str(error)[-2000:]}")
        finally:
            if given.log:
                given.log.write_bytes((Path(folder) / "service.log").read_bytes())
            if given.json:
                given.json.parent.mkdir(parents=True, exist_ok=True)
                given.json.write_text(whole(soak))
    for each in soak.violations:
        show(f"violation {each}")
    is_whole = soak.seconds >= WHOLE_S and given.only is None
    record("60 leak" if leak else "60" if is_whole else "60 short", **figures(soak))
    return 0 if is_good(soak) else 1


if __name__ == "__main__":
    sys.exit(main())
