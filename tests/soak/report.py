"""What a soak showed: figures for the matrix, a verdict, and everything as JSON. Pure."""

import json
from dataclasses import asdict
from typing import Any

from tests.soak.drive import Soak
from tests.soak.memory import Slope, slope
from tests.support.faults.figures import percentile

WARM_UP_S = 90.0  # of a process: pools and caches fill in the beginning
WARM_UP_SHARE = 0.15  # of short soaks
JUDGED_AFTER_S = 600.0  # the slope of a shorter soak is told, and no verdict


def slopes(soak: Soak) -> dict[str, Slope | None]:
    """By role."""
    warm_up_s = min(WARM_UP_S, WARM_UP_SHARE * soak.seconds)
    return {role: slope(soak.samples, role, warm_up_s=warm_up_s) for role in ("gateway", "worker")}


def availability(soak: Soak) -> float:
    """Share of requests of the well-behaved that are complete. Every other end counts against it, deserved or not."""
    return soak.outcomes["complete"] / max(1, soak.outcomes.total())


def figures(soak: Soak) -> dict[str, Any]:
    """One line of the table."""
    repairs = [seconds for _, seconds in soak.repairs]
    found = slopes(soak)
    planted = {"planted": "{} {:g} MiB/h".format(*soak.config.leak)} if soak.config.leak else {}
    return {
        **planted,
        "seed": soak.config.seed,
        "minutes": round(soak.seconds / 60, 1),
        "load_percent": 70,
        "capacity_per_s": round(soak.capacity_per_s, 1),
        "time_under_load_percent": round(100 * soak.loaded_s / max(1e-9, soak.seconds)),
        "faults": soak.injected.total(),
        "kinds_of_faults": len(soak.injected),
        "requests": soak.outcomes.total() + soak.others.total(),
        "quiesce_points": soak.num_rounds,
        "checks": soak.num_checks,
        "violations": len(soak.violations),
        "availability_percent": round(100 * availability(soak), 3),
        "new_callers_served_percent": round(100 * (1 - soak.probes.num_failed / max(1, soak.probes.num_calls)), 3),
        "serving_time_percent": round(100 * soak.probes.serving_share, 3),
        "outages": len(soak.probes.outages),
        "longest_unavailability_s": round(soak.probes.longest_s, 2),
        "whole_again_s_p50": round(percentile(repairs, 50), 2) if repairs else None,
        "whole_again_s_p95": round(percentile(repairs, 95), 2) if repairs else None,
        "outage_s_p50": round(percentile(soak.probes.outages or [0.0], 50), 2),
        "outage_s_p95": round(percentile(soak.probes.outages or [0.0], 95), 2),
        **{f"{role}_mib_per_h": str(each) if each else "too few samples" for role, each in found.items()},
        "load_generator_cpu_percent": round(100 * soak.own_cpu_s / max(1e-9, soak.seconds)),
    }


def is_good(soak: Soak) -> bool:
    """No violation, and no process grew."""
    is_judged = soak.seconds >= JUDGED_AFTER_S
    grown = [role for role, each in slopes(soak).items() if is_judged and each and not each.is_flat]
    return not soak.violations and not grown


def whole(soak: Soak) -> str:
    """Everything, as JSON."""
    found = {
        "figures": figures(soak),
        "is_good": is_good(soak),
        "slopes": {role: asdict(each) | {"is_flat": each.is_flat} for role, each in slopes(soak).items() if each},
        "faults": dict(soak.injected.most_common()),
        "outcomes": dict(soak.outcomes.most_common()),
        "outcomes_of_culprits_and_leavers": dict(soak.others.most_common()),
        "violations": soak.violations,
        "repairs": soak.repairs,
        "outages": soak.probes.outages,
        "probes": {"calls": soak.probes.num_calls, "failed": soak.probes.num_failed},
        "latest_request_s": soak.late_s,
        "samples": [asdict(each) for each in soak.samples],
    }
    return json.dumps(found, indent=1) + "\n"
