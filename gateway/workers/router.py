"""Which worker gets a request: the longest cached prefix, then the least load.

Pure. A hot prefix does not pin its traffic to one worker: where the holder is much busier than the idlest worker,
the request goes there instead, computes the prefix again, and from then on two workers hold it.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum

MAX_CHOICES = 3  # for one request: a worker may leave between the choice and the send
IMBALANCE_RATIO = 1.5  # a holder may be this many times busier than the idlest worker…
IMBALANCE_SLACK = 0.25  # …plus this share of its own capacity


class RouteReason(StrEnum):
    """Why a worker was chosen; a closed label set."""

    ONLY = "only"
    PREFIX = "prefix"
    LOAD = "load"  # nobody had a prefix
    BALANCE = "balance"  # the holder of the longest prefix was too busy


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidate:
    """A ready worker of the model. load: requests over the number that run at once (above 1: it queues)."""

    incarnation: int
    load: float
    cached_tokens: int


def choose(candidates: Sequence[Candidate], *, turn: int) -> tuple[Candidate, RouteReason]:
    """The best of at least one candidate. turn: any counter; equals take turns by it."""
    if len(candidates) == 1:
        return candidates[0], RouteReason.ONLY
    rotated = [candidates[(turn + offset) % len(candidates)] for offset in range(len(candidates))]
    least_load = min(candidate.load for candidate in rotated)
    fair = [candidate for candidate in rotated if not _is_overloaded(candidate, least_load)]
    best = min(fair, key=lambda candidate: (-candidate.cached_tokens, candidate.load))
    longest = max(candidate.cached_tokens for candidate in rotated)
    if best.cached_tokens < longest:
        return best, RouteReason.BALANCE
    return best, RouteReason.PREFIX if best.cached_tokens else RouteReason.LOAD


def _is_overloaded(candidate: Candidate, least_load: float) -> bool:
    return candidate.load > IMBALANCE_RATIO * least_load + IMBALANCE_SLACK
