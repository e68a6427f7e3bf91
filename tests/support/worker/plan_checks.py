"""Views of step plans by handle, for readable expectations, and checks of what no plan may do."""

from collections.abc import Mapping
from dataclasses import dataclass

from octavo.blockmgr.manager import BlockManager
from octavo.worker.scheduler.plan import StepPlan
from octavo.worker.scheduler.request import Request


@dataclass(frozen=True, slots=True, kw_only=True)
class Seen:
    """A plan by handle: chunks (handle, start, num_tokens), decodes (handle, position).
    ``samples``: requests whose chunk is their last."""

    joins: tuple[int, ...] = ()
    prefill: tuple[tuple[int, int, int], ...] = ()
    samples: tuple[int, ...] = ()
    decode: tuple[tuple[int, int], ...] = ()


def seen(plan: StepPlan, by_slot: Mapping[int, Request]) -> Seen:
    """The plan by handles. by_slot: the running requests right after planning."""
    handles = {slot: request.key.handle for slot, request in by_slot.items()}
    return Seen(
        joins=tuple(handles[join.slot] for join in plan.new_requests),
        prefill=tuple((handles[chunk.slot], chunk.start, chunk.num_tokens) for chunk in plan.prefill),
        samples=tuple(handles[chunk.slot] for chunk in plan.prefill if chunk.is_last),
        decode=tuple((handles[slot], position) for slot, position in _decodes(plan)),
    )


def _decodes(plan: StepPlan) -> list[tuple[int, int]]:
    return list(zip(plan.decode_slots_S.tolist(), plan.decode_positions_S.tolist(), strict=True))


def _ranges(plan: StepPlan) -> list[tuple[int, int, int]]:
    """(slot, start, end) of every range of positions that is computed."""
    decodes = [(slot, position, position + 1) for slot, position in _decodes(plan)]
    return decodes + [(int(chunk.slot), chunk.start, chunk.start + chunk.num_tokens) for chunk in plan.prefill]


class BlocksInFlight:
    """The blocks that steps in flight read or write, and for which requests."""

    def __init__(self) -> None:
        self._owners: dict[int, dict[int, set[int]]] = {}  # step -> block -> requests by order

    def check(self, plan: StepPlan, blocks: BlockManager, by_slot: Mapping[int, Request]) -> None:
        """Check that every request in the plan runs and is in it once, and that none writes to a block that a step in
        flight uses for another request, or that another request's table contains."""
        arriving = set(plan.copies_in_C2[:, 1].tolist())
        assert plan.num_tokens > 0 or plan.new_requests or arriving
        ranges, size, owners = _ranges(plan), blocks.config.block_size, dict[int, set[int]]()
        assert len({slot for slot, _, _ in ranges}) == len(ranges)
        fork_slots = {int(chunk.slot): chunk.forks for chunk in plan.prefill}
        forks = {int(chunk.slot): {by_slot[slot].order for slot in chunk.forks} for chunk in plan.prefill}
        for slot, start, end in ranges:
            order = by_slot[slot].order
            for column in range(-(-end // size)):
                block = int(blocks.table_SM[slot, column])
                assert block >= 0, f"slot {slot} has no block for column {column}"
                assert block not in arriving, f"block {block} of slot {slot} arrives after the step that reads it"
                if (column + 1) * size > start:
                    self._check_writable(block, order)
                    holders = (blocks.table_SM == block).any(axis=1).nonzero()[0].tolist()
                    assert set(holders) <= {slot, *fork_slots.get(slot, ())}, f"block {block} of {slot} in {holders}"
                owners.setdefault(block, set()).add(order)
                owners[block].update(forks.get(slot, ()))
        self._owners[plan.step] = owners

    def forget(self, step: int) -> None:
        """The step has ended."""
        del self._owners[step]

    def _check_writable(self, block: int, order: int) -> None:
        for step, owners in self._owners.items():
            others = owners.get(block, set()) - {order}
            is_shared = order in owners.get(block, set())  # forks share it until one writes, and steps run in order
            assert is_shared or not others, f"block {block} is written for {order}; step {step} uses it for {others}"
