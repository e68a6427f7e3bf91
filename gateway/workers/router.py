"""Which worker gets a request: the one where it costs the least, in prompt tokens to compute.

A request costs a worker what it lacks of the prompt, what it has to compute before it, and, the fuller its cache is,
what the new tokens push out. A beginning that many prompts share is soon worth having on every worker, so a worker
that lacks it is charged only one branch's share of it: new conversations spread, and then stay where they are.

A hot prefix does not pin its traffic to one worker: where the holder is much busier than the idlest worker, the request
goes there instead and computes the prefix again; from then on two workers hold it.

Pure. Must not know where the numbers of a candidate come from (`gateway.workers.prefix_index`,
`gateway.workers.outputs`).
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from octavo.gateway.workers.registry import WorkerRecord
from octavo.gateway.workers.stats import RouteReason

MAX_CHOICES = 3  # for one request: a worker may leave between the choice and the send
IMBALANCE_RATIO = 1.5  # a holder may be this many times busier than the idlest worker…
IMBALANCE_SLACK = 0.25  # …plus this share of its own capacity


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidate:
    """A ready worker of the model. load: requests divided by the number that run at once (above 1: it queues).
    waiting_tokens: prompt tokens it must compute first. fill: share of its blocks in use or cached. step_tokens: its
    token budget per step."""

    incarnation: int
    load: float
    cached_tokens: int
    waiting_tokens: int = 0
    fill: float = 0.0
    step_tokens: int = 0


def candidates_of(
    records: Iterable[WorkerRecord], match: Mapping[int, int], waiting: Mapping[int, int]
) -> list[Candidate]:
    """match, waiting: tokens by incarnation."""
    return [
        Candidate(
            incarnation=each.incarnation,
            load=each.load,
            cached_tokens=match.get(each.incarnation, 0),
            waiting_tokens=waiting.get(each.incarnation, 0),
            fill=1 - each.num_free_blocks / each.capacity.num_blocks,
            step_tokens=each.capacity.max_batch_tokens,
        )
        for each in records
    ]


def choose(
    candidates: Sequence[Candidate], *, turn: int, num_tokens: int, num_branches: int = 0
) -> tuple[Candidate, RouteReason]:
    """The cheapest candidate (of at least one) for a prompt of this many tokens. turn: any counter, which breaks ties
    in rotation. num_branches: see `prefix_index.Match`."""
    if len(candidates) == 1:
        return candidates[0], RouteReason.ONLY
    rotated = [candidates[(turn + offset) % len(candidates)] for offset in range(len(candidates))]
    least_load = min(candidate.load for candidate in rotated)
    longest = max(candidate.cached_tokens for candidate in rotated)

    def cost(candidate: Candidate) -> float:
        # A single branch is no sign of sharing: it may be the caller's own last turn, whose answer comes back as other
        # tokens than were sampled.
        lacking = (longest - candidate.cached_tokens) / max(num_branches, 1)
        queue = candidate.waiting_tokens + candidate.load * candidate.step_tokens
        return lacking + queue + candidate.fill * (num_tokens - candidate.cached_tokens)

    best = min((each for each in rotated if not _is_overloaded(each, least_load)), key=cost)
    if best.cached_tokens < longest:
        return best, RouteReason.BALANCE
    return best, RouteReason.PREFIX if best.cached_tokens else RouteReason.LOAD


def _is_overloaded(candidate: Candidate, least_load: float) -> bool:
    return candidate.load > IMBALANCE_RATIO * least_load + IMBALANCE_SLACK
