"""What the state machine of the block manager knows of every request and plan, and how both sides are driven together.

Must not know: which rules there are.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from hypothesis.stateful import RuleBasedStateMachine

from octavo.blockmgr import BlockManager, EventKind, OutOfBlocks, OutOfSlots, PrefixCache
from octavo.blockmgr.ids import Tier
from octavo.blockmgr.prefix_index import hash_block
from tests.support.blockmgr.shadow import Content, KvShadow, expected
from tests.support.blockmgr.state import full_state

BLOCK_SIZE, WIDTH = 2, 6


@dataclass
class Request:
    """The model of a request: tokens and counts, and the number of blocks that it should hold."""

    slot: int
    salt: str
    tokens: list[int]
    num_computed: int
    num_blocks: int
    is_tainted: bool = False


@dataclass
class Step:
    """A plan in flight: blocks that it may touch, and what to commit when it ends."""

    number: int
    blocks: set[int] = field(default_factory=set)
    commits: list[tuple[str, Request, int]] = field(default_factory=list)


class ToggledHash:
    """The real hash, or an 8-bit one that collides."""

    is_weak = False

    def __call__(self, parent: bytes, token_bytes: bytes) -> bytes:
        digest = hash_block(parent, token_bytes)
        return bytes([digest[0] % 8]) if self.is_weak else digest


class KvReference(RuleBasedStateMachine):
    """The manager, a model of its requests, and the shadow store; every helper checks what it can.

    mirror_SM: the runner's table. router: what a listener has stored. has_duplicates: two blocks may hold the same.
    swapped: requests whose blocks are on the host. to_spoil: blocks handed out since the last plan, whose old contents
      may have to be copied out first.
    """

    manager: BlockManager
    hash: ToggledHash
    shadow: KvShadow
    requests: dict[str, Request]
    steps: list[Step]
    mirror_SM: np.ndarray
    joined: set[int]
    router: dict[bytes, tuple[bytes, bytes, str, Tier]]
    swapped: dict[str, Request]
    to_spoil: set[int]
    has_toggled: bool
    has_duplicates: bool

    def _taint(self, request: Request) -> None:
        """Blocks that only this request holds turn out to contain NaN."""
        held_by_others = {b for r in self.requests.values() if r is not request for b in self._row(r)}
        self._spoil([block for block in self._row(request) if block not in held_by_others])
        request.is_tainted = True
        self.manager.taint(request.slot)

    def _flush(self) -> None:
        """Drop everything that nobody uses."""
        num_cached, num_free = self.manager.num_cached, self.manager.num_free
        assert self.manager.flush_prefix_cache() >= num_cached
        assert (self.manager.num_cached, self.manager.num_free) == (0, num_free + num_cached)

    def _pick(self, pick: int) -> Request:
        return self.requests[sorted(self.requests)[pick % len(self.requests)]]

    def _row(self, request: Request) -> list[int]:
        return [block for block in self.manager.table_SM[request.slot].tolist() if block >= 0]

    def _attempt(self, call: Callable[[], Any]) -> Any:
        """The call's result (True for None), or None if it was refused, which must change nothing (I10)."""
        before = full_state(self.manager)
        try:
            result = call()
            return True if result is None else result
        except (OutOfBlocks, OutOfSlots):
            assert full_state(self.manager) == before, "I10"
            return None

    def _hand_out(self, blocks: list[int]) -> None:
        """I7 and I13: blocks that are handed out are in no index and in no plan in flight."""
        busy = set().union(*(step.blocks for step in self.steps))
        assert not busy & set(blocks), "I13"
        fresh = np.array([block for block in blocks if not self.manager.host.is_awaited_P[block]], np.int64)
        assert not self.manager._index.holds(fresh).any(), "I7"
        self._spoil(blocks)

    def _spoil(self, blocks: list[int]) -> None:
        if self.manager.config.num_host_blocks:
            self.to_spoil.update(blocks)
        else:
            self.shadow.spoil(blocks)

    def content(self, block: int) -> list[Content]:
        """What a block holds, or will hold once queued copies are done."""
        host = self.manager.host
        block = host.ins.origin(block)
        return self.shadow.blocks[host.outs.get(block, block)]

    def _read(self, row: list[int], stop: int) -> list[Content]:
        return [self.content(row[p // BLOCK_SIZE])[p % BLOCK_SIZE] for p in range(stop)]

    def _grow(self, request: Request, num_tokens: int) -> bool:
        before = self._row(request)
        missing = -(-(num_tokens - self.manager.capacity(request.slot)) // BLOCK_SIZE)
        can_grow = missing <= max(0, self.manager.num_free + self.manager.num_cached)
        has_grown = self._attempt(lambda: self.manager.grow(request.slot, num_tokens)) is not None
        assert has_grown == can_grow
        if has_grown:
            request.num_blocks = max(request.num_blocks, -(-num_tokens // BLOCK_SIZE))
            self._hand_out(self._row(request)[len(before) :])
        return has_grown

    def _prepare_chunk(self, request: Request, num: int, token: int) -> tuple[int, int] | None:
        """Room and exclusive blocks for a chunk; None if there are none, or the slot's blocks are not back from the
        host."""
        if self.manager.is_awaited(request.slot):
            return None
        if request.num_computed == len(request.tokens) and len(request.tokens) < WIDTH * BLOCK_SIZE:
            request.tokens = [*request.tokens, token]
        start, stop = request.num_computed, min(request.num_computed + num, len(request.tokens))
        if start == stop or not self._grow(request, stop):
            return None
        before = self._row(request)
        if self._prepare_write(request, start) is None:
            return None
        self._hand_out([new for new, old in zip(self._row(request), before, strict=True) if new != old])
        return start, stop

    def _prepare_write(self, request: Request, start: int) -> object | None:
        """Alternates between both forms of the call."""
        if start % 2:
            return self._attempt(lambda: self.manager.prepare_write(request.slot, start))
        refused = self.manager.prepare_write_many(np.array([request.slot], np.int32), np.array([start]))
        return None if len(refused) else True

    def _execute(self, step: Step, request: Request, start: int, stop: int, commit_at: str) -> None:
        row = [block for block in self.mirror_SM[request.slot].tolist() if block >= 0]
        refs = self.manager._pool.ref_P
        touched = row[start // BLOCK_SIZE : -(-stop // BLOCK_SIZE)]
        sources = self.manager._growth.copies.sources
        assert all(refs[block] - sources.count(block) == 1 for block in touched), "I4"
        assert not self.manager._index.holds(np.array(touched)).any(), "I4"
        self.shadow.write(row, request.salt, request.tokens, start, stop)
        if request.is_tainted:
            self.shadow.spoil(touched)
        else:
            assert self.shadow.read(row, stop) == expected(request.salt, request.tokens, stop)
        request.num_computed = stop
        step.blocks |= set(row)
        name = next(name for name, other in self.requests.items() if other is request)
        if commit_at == "plan":
            self._commit(request, stop)
        else:
            step.commits.append((name, request, stop))

    def _commit(self, request: Request, num_computed: int) -> None:
        ids = np.array(request.tokens, np.int32)
        self.manager.commit(request.slot, ids, num_computed)
        self._listen()
        before = full_state(self.manager)
        self.manager.commit(request.slot, ids, num_computed)
        assert full_state(self.manager) == before, "commit is not idempotent"
        full = np.array(self._row(request)[: num_computed // BLOCK_SIZE], np.int64)
        self.has_duplicates |= not self.manager._index.holds(full).all()

    def _take_updates(self) -> np.ndarray:
        """The runner applies joins, rows and copies; afterwards it must know every live row. Returns the (host, device)
        pairs to copy in once the plan's tokens are done."""
        for slot in self.joined:
            self.mirror_SM[slot] = -1
        self.joined.clear()
        updates_U3, copies_C2 = self.manager.take_updates()
        for slot, column, block in updates_U3.tolist():
            self.mirror_SM[slot, column] = block
        for request in self.requests.values():
            assert self.mirror_SM[request.slot].tolist() == self.manager.table_SM[request.slot].tolist()
        outs_C2, ins_C2 = self.manager.take_moves()
        first = self.manager.config.num_blocks
        busy = set().union(*(step.blocks for step in self.steps))
        assert not busy & {first + target for target in outs_C2[:, 1].tolist()}, "I13 on the host"
        self.shadow.copy(outs_C2 + np.array([0, first]))
        self.shadow.spoil(sorted(self.to_spoil))
        self.to_spoil.clear()
        self.shadow.copy(copies_C2)
        return ins_C2 + np.array([first, 0])

    def _listen(self) -> None:
        for event in self.manager.take_events():
            if event.kind is EventKind.STORED:
                self.router[event.block_hash] = (event.parent_hash, event.token_ids, event.salt, event.tier)
            elif event.kind is EventKind.REMOVED:
                del self.router[event.block_hash]
            else:
                self.router.clear()

    def _check_hit_is_longest(self, salt: str, tokens: list[int], cached: int) -> None:
        if self.has_toggled or self.manager.config.prefix_cache is PrefixCache.OFF:
            return
        index = self.manager._index
        entries = {int(index.entry_P[b]): b for b in index.block_of.values()} | {0: -1}
        longest = entry = 0
        while longest + BLOCK_SIZE < len(tokens):
            wanted = (salt, tuple(tokens[: longest + BLOCK_SIZE]))
            children = [b for e, b in entries.items() if e and int(index.parent_entry_P[b]) == entry]
            found = [b for b in children if self.content(b)[-1] == wanted]
            if not found:
                break
            longest, entry = longest + BLOCK_SIZE, int(index.entry_P[found[0]])
        assert cached == longest, "a prefix that is stored was not hit"
