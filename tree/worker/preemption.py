"""Who gives way to whom. Pure choices over requests; knows no blocks and changes nothing.

The most important running request (`Request.rank`) is never chosen while another one runs, so every round of
preemptions leaves at least one that gets on: there is no livelock. Waiting makes a request aged, aged ones are the
most important: there is no starvation either.
"""

from collections.abc import Iterable, Sequence

from worker.request import Request


def least_important(running: Sequence[Request]) -> Request:
    """Who is preempted when blocks run out: the paused, then lowest priority, then latest arrival. Raises ValueError
    for nobody."""
    return max(running, key=lambda request: request.rank)


def least_disturbed(running: Sequence[Request]) -> Request:
    """Who is preempted without need, where tests ask for that: so that in the end everybody was. Raises ValueError for
    nobody."""
    return min(running, key=lambda request: (request.num_preemptions, request.rank))


def displaceable_by(head: Request, running: Sequence[Request]) -> list[Request]:
    """Who must give way to a waiting request of higher priority, first the least important; never the aged. Paused ones
    give way to everybody and are not among them."""
    below = [
        other
        for other in running
        if other.is_running and not other.is_aged and other.asked.priority < head.asked.priority
    ]
    return sorted(below, key=lambda request: request.rank, reverse=True)


def paused_first(paused: Iterable[Request], others: Sequence[Request]) -> list[Request]:
    """All who may give way to a waiting request, in order: nobody waits for those whose callers do not read."""
    return [*sorted(paused, key=lambda request: request.rank, reverse=True), *others]
