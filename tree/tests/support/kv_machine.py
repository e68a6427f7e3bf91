"""A Hypothesis state machine over the block manager: any order of admit, grow, plan, end, fork, taint, release, flush,
with invariants I1 to I13 after every one. Used by the test of the manager and by the tests of its mutants."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from blockmgr import BlockManager, BlockManagerConfig, EventKind, OutOfBlocks, OutOfSlots, PrefixCache
from blockmgr.hashing import hash_block
from tests.support.kv_shadow import KvShadow, expected
from tests.support.kv_state import full_state

BLOCK_SIZE, WIDTH, MAX_REQUESTS = 2, 6, 6
TOKENS = st.one_of(
    st.integers(1, 9).map(lambda length: [0] * length),
    st.tuples(st.integers(0, 6), st.integers(1, 3)).map(lambda cut: [0] * cut[0] + [1] * cut[1]),
    st.lists(st.integers(0, 2), min_size=1, max_size=9),
)
PICK = st.integers(0, 100)
WORK = st.lists(st.tuples(PICK, st.sampled_from([9, 1, 2, 3]), st.integers(0, 1)), min_size=1, max_size=4)


@dataclass
class Request:
    """The model of a request: tokens and counts, no blocks but the number that it should hold."""

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
    """The real hash, or one of 8 bits."""

    is_weak = False

    def __call__(self, parent: bytes, token_bytes: bytes) -> bytes:
        digest = hash_block(parent, token_bytes)
        return bytes([digest[0] % 8]) if self.is_weak else digest


class KvMachine(RuleBasedStateMachine):
    """Rules drive the manager and the model side by side; the shadow store says what the device would hold."""

    @initialize(
        num_blocks=st.integers(4, 12),
        max_slots=st.integers(3, 6),
        cache=st.sampled_from([PrefixCache.ON, PrefixCache.ON, PrefixCache.ON, PrefixCache.OFF]),
        max_events=st.sampled_from([3, 1000]),
    )
    def start(self, num_blocks: int, max_slots: int, cache: PrefixCache, max_events: int) -> None:
        """A new manager, model and shadow store."""
        self.hash = ToggledHash()
        config = BlockManagerConfig(
            num_blocks=num_blocks,
            block_size=BLOCK_SIZE,
            max_slots=max_slots,
            max_blocks_per_slot=WIDTH,
            fingerprint=b"model",
            prefix_cache=cache,
            secret=b"secret",
            max_events=max_events,
        )
        self.manager = BlockManager(config, hash_block=self.hash)
        self.shadow = KvShadow(num_blocks, BLOCK_SIZE)
        self.requests: dict[str, Request] = {}
        self.steps: list[Step] = []
        self.mirror_SM = np.full((max_slots, WIDTH), -1, np.int32)  # the runner's table
        self.joined: set[int] = set()
        self.router: dict[bytes, tuple[bytes, bytes, str]] = {}
        self.num_admitted = self.num_steps = 0
        self.has_toggled = self.has_twins = False

    # ------------------------------------------------------------ rules

    @precondition(lambda self: len(self.requests) < MAX_REQUESTS)
    @rule(tokens=TOKENS, salt=st.sampled_from(["", "", "A"]), reserve=st.sampled_from([None, None, 1, 4, 7, 12]))
    def admit(self, tokens: list[int], salt: str, reserve: int | None) -> None:
        """A request comes; what it hits must be true, and as much as there is."""
        name = f"r{self.num_admitted}"
        ids = np.array(tokens, np.int32)
        hit = self.manager.match(ids, salt=salt)
        admission = self._attempt(lambda: self.manager.admit(name, ids, salt=salt, reserve_tokens=reserve))
        if admission is None:
            return
        self.num_admitted += 1
        cached = admission.num_cached_tokens
        assert cached == hit
        assert cached in range(0, len(tokens), BLOCK_SIZE), "I9"
        self._check_hit_is_longest(salt, tokens, cached)
        num_blocks = max(cached // BLOCK_SIZE, -(-(reserve or 0) // BLOCK_SIZE))
        self.requests[name] = Request(int(admission.slot), salt, tokens, cached, num_blocks)
        self.joined.add(int(admission.slot))
        row = self._row(self.requests[name])
        assert self.shadow.read(row, cached) == expected(salt, tokens, cached), "a hit is not what it says"
        self._hand_out(row[cached // BLOCK_SIZE :])

    @precondition(lambda self: self.requests)
    @rule(pick=PICK, num_tokens=st.integers(0, WIDTH * BLOCK_SIZE))
    def grow(self, pick: int, num_tokens: int) -> None:
        """One slot grows, or the refusal was foretold."""
        self._grow(self._pick(pick), num_tokens)

    @precondition(lambda self: self.requests)
    @rule(picks=st.sets(PICK, min_size=1, max_size=4), extra=st.integers(0, 4))
    def grow_many(self, picks: set[int], extra: int) -> None:
        """Several grow at once; the refused are those that `grow` would have refused in turn."""
        chosen = list({request.slot: request for request in map(self._pick, sorted(picks))}.values())
        wanted = [min(len(r.tokens) + extra, WIDTH * BLOCK_SIZE) for r in chosen]
        free, refused = self.manager.num_free + self.manager.num_cached, []
        before = [self._row(r) for r in chosen]
        for request, num_tokens in zip(chosen, wanted, strict=True):
            missing = max(0, -(-num_tokens // BLOCK_SIZE) - request.num_blocks)
            if missing > free:
                refused.append(request.slot)
                continue
            free -= missing
            request.num_blocks += missing
        slots = np.array([r.slot for r in chosen], np.int32)
        assert self.manager.grow_many(slots, np.array(wanted)).tolist() == refused
        for request, row in zip(chosen, before, strict=True):
            self._hand_out(self._row(request)[len(row) :])

    @precondition(lambda self: self.requests and len(self.steps) < 3)
    @rule(data=WORK, commit_at=st.sampled_from(["plan", "end"]))
    def plan_again(self, data: list[tuple[int, int, int]], commit_at: str) -> None:
        """The same: half of what happens should be plans."""
        self.plan(data, commit_at)

    @precondition(lambda self: self.requests and len(self.steps) < 3)
    @rule(
        work=WORK,
        commit_at=st.sampled_from(["plan", "end"]),
    )
    def plan(self, work: list[tuple[int, int, int]], commit_at: str) -> None:
        """Make a plan, launch it, and let the device do it at once: only the order of plans matters to it."""
        chunks = {}
        for pick, num, token in work:
            request = self._pick(pick)
            if request.slot not in chunks:
                chunk = self._prepare_chunk(request, num, token)
                if chunk is not None:
                    chunks[request.slot] = (request, *chunk)
        self.num_steps += 1
        step = Step(self.num_steps)
        self._take_updates()
        self.manager.begin_step(step.number)
        for request, start, stop in chunks.values():
            self._execute(step, request, start, stop, commit_at)
        self.steps.append(step)

    @precondition(lambda self: self.steps)
    @rule()
    def end_step(self) -> None:
        """The oldest plan's result is known."""
        step = self.steps.pop(0)
        self.manager.end_step(step.number)
        for name, request, num_computed in step.commits:
            if self.requests.get(name) is request:
                self._commit(request, min(num_computed, request.num_computed))

    @precondition(lambda self: len(self.steps) > 1)
    @rule(number=st.integers(-1, 5))
    def end_wrong_step(self, number: int) -> None:
        """Steps end in order, or nothing happens."""
        if self.steps and self.steps[0].number == number:
            return
        before = full_state(self.manager)
        try:
            self.manager.end_step(number)
            raise AssertionError("a step ended that was not the oldest")
        except ValueError:
            assert full_state(self.manager) == before

    @precondition(lambda self: self.requests and len(self.requests) < MAX_REQUESTS)
    @rule(pick=PICK, num_tokens=st.integers(1, 12))
    def fork(self, pick: int, num_tokens: int) -> None:
        """A child shares what its parent has computed; then both go on by themselves."""
        parent = self._pick(pick)
        shared = min(num_tokens, parent.num_computed)
        if not shared:
            return
        name = f"r{self.num_admitted}"
        slot = self._attempt(lambda: self.manager.fork(parent.slot, name, num_tokens=shared))
        if slot is None:
            return
        self.num_admitted += 1
        tokens = parent.tokens[: max(shared, 1)]
        num_blocks = -(-shared // BLOCK_SIZE)
        self.requests[name] = Request(int(slot), parent.salt, list(tokens), shared, num_blocks, parent.is_tainted)
        self.joined.add(int(slot))
        assert self._row(self.requests[name]) == self._row(parent)[:num_blocks]

    @precondition(lambda self: self.requests)
    @rule(pick=PICK, how=st.sampled_from(["once", "twice", "stranger"]))
    def release(self, pick: int, how: str) -> None:
        """A request ends, in flight or not; a second release, or somebody else's, does nothing."""
        name = sorted(self.requests)[pick % len(self.requests)]
        request = self.requests.pop(name) if how != "stranger" else self.requests[name]
        if how != "stranger":
            self.manager.release(request.slot, name)
            self.joined.discard(request.slot)
        if how != "once":
            before = full_state(self.manager)
            self.manager.release(request.slot, "stranger" if how == "stranger" else name)
            assert full_state(self.manager) == before, "I11"

    @rule(pick=PICK, what=st.sampled_from(["nothing"] * 12 + ["taint", "taint", "flush", "toggle weak hash"]))
    def disturb(self, pick: int, what: str) -> None:
        """Now and then something rare: too often, and nothing would ever be cached."""
        if what == "taint" and self.requests:
            self._taint(self._pick(pick))
        elif what == "flush":
            self._flush()
        elif what == "toggle weak hash":
            self.hash.is_weak = not self.hash.is_weak
            self.has_toggled = True

    # ------------------------------------------------------------ invariants

    @invariant()
    def audit_is_clean_and_counts_agree(self) -> None:
        """I1 to I3 by the manager's own recount and by ours."""
        if not hasattr(self, "manager"):
            return
        audit, manager = self.manager.audit(), self.manager
        assert audit.violations == ()
        assert (audit.num_free, audit.num_cached) == (manager.num_free, manager.num_cached)
        assert (audit.num_active, audit.num_leaked) == (manager.num_active, 0)
        assert manager.num_free + manager.num_cached + manager.num_active == manager.config.num_blocks
        rows = [block for request in self.requests.values() for block in self._row(request)]
        rows += manager._growth.copies.sources
        assert manager._pool.ref_P.tolist() == [rows.count(block) for block in range(manager.config.num_blocks)]

    @invariant()
    def every_row_is_as_long_as_asked(self) -> None:
        """I5."""
        for request in getattr(self, "requests", {}).values():
            row = self.manager.table_SM[request.slot].tolist()
            assert [b >= 0 for b in row] == [i < request.num_blocks for i in range(WIDTH)]

    @invariant()
    def the_index_tells_the_truth(self) -> None:
        """I6: what the device holds is what the index says, all of the prefix."""
        if not hasattr(self, "manager"):
            return
        index = self.manager._index
        block_of_entry = {int(index.entry_P[block]): block for block in index.block_of.values()}
        for block in index.block_of.values():
            salt, token_bytes = index.content(block)
            tokens = np.frombuffer(token_bytes, np.int32).tolist()
            held_salt, held = self.shadow.blocks[block][-1]
            assert (held_salt, list(held[-BLOCK_SIZE:])) == (salt, tokens), "I6"
            assert self.shadow.blocks[block][0] == (salt, held[:-1]), "I6"
            parent = int(index.parent_entry_P[block])
            if parent == 0:
                assert len(held) == BLOCK_SIZE
            elif parent in block_of_entry:
                assert self.shadow.blocks[block_of_entry[parent]][-1] == (salt, held[:-BLOCK_SIZE]), "I6"

    @invariant()
    def tails_are_given_up_before_heads(self) -> None:
        """I8, as long as no two blocks hold the same."""
        if not hasattr(self, "manager") or self.has_twins or self.has_toggled:
            return
        index, order = self.manager._index, self.manager._pool.lru.to_array().tolist()
        place_of_entry = {int(index.entry_P[block]): place for place, block in enumerate(order)}
        for place, block in enumerate(order):
            assert place_of_entry.get(int(index.parent_entry_P[block]), WIDTH * 100) > place, "I8"

    @invariant()
    def events_rebuild_the_index(self) -> None:
        """A router that listened knows exactly what is stored."""
        if hasattr(self, "manager"):
            self._listen()
            stored = {e.block_hash: (e.parent_hash, e.token_ids, e.salt) for e in self.manager.snapshot_events()}
            assert self.router == stored

    def teardown(self) -> None:
        """When all have ended, nothing is held."""
        if not hasattr(self, "manager"):
            return
        while self.steps:
            self.end_step()
        for name in list(self.requests):
            self.manager.release(self.requests.pop(name).slot, name)
        self.manager.take_updates()
        self.manager.take_updates()
        self.audit_is_clean_and_counts_agree()
        assert self.manager.num_active == 0

    # ------------------------------------------------------------ helpers

    def _taint(self, request: Request) -> None:
        """What a request alone holds turns out to be NaN."""
        held_by_others = {b for r in self.requests.values() if r is not request for b in self._row(r)}
        self.shadow.spoil([block for block in self._row(request) if block not in held_by_others])
        request.is_tainted = True
        self.manager.taint(request.slot)

    def _flush(self) -> None:
        """Everything that nobody uses is forgotten."""
        num_cached, num_free = self.manager.num_cached, self.manager.num_free
        assert self.manager.flush_prefix_cache() >= num_cached
        assert (self.manager.num_cached, self.manager.num_free) == (0, num_free + num_cached)

    def _pick(self, pick: int) -> Request:
        return self.requests[sorted(self.requests)[pick % len(self.requests)]]

    def _row(self, request: Request) -> list[int]:
        return [block for block in self.manager.table_SM[request.slot].tolist() if block >= 0]

    def _attempt(self, call: Callable[[], Any]) -> Any:
        """What the call gives (True for nothing), or None where it was refused: I10, that changes nothing."""
        before = full_state(self.manager)
        try:
            result = call()
            return True if result is None else result
        except (OutOfBlocks, OutOfSlots):
            assert full_state(self.manager) == before, "I10"
            return None

    def _hand_out(self, blocks: list[int]) -> None:
        """I7 and I13: what is handed out is in no index and in no plan in flight."""
        busy = set().union(*(step.blocks for step in self.steps))
        assert not busy & set(blocks), "I13"
        assert not self.manager._index.holds(np.array(blocks, np.int64)).any(), "I7"
        self.shadow.spoil(blocks)

    def _grow(self, request: Request, num_tokens: int) -> bool:
        before = self._row(request)
        can_grow = self.manager.can_grow(request.slot, num_tokens)
        has_grown = self._attempt(lambda: self.manager.grow(request.slot, num_tokens)) is not None
        assert has_grown == can_grow
        if has_grown:
            request.num_blocks = max(request.num_blocks, -(-num_tokens // BLOCK_SIZE))
            self._hand_out(self._row(request)[len(before) :])
        return has_grown

    def _prepare_chunk(self, request: Request, num: int, token: int) -> tuple[int, int] | None:
        """Room and exclusive blocks for a chunk; None where there are none."""
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
        """Both forms of it, in turn."""
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
        self.has_twins |= not self.manager._index.holds(full).all()

    def _take_updates(self) -> None:
        """The runner applies joins, rows, copies; afterwards it knows every live row."""
        for slot in self.joined:
            self.mirror_SM[slot] = -1
        self.joined.clear()
        updates_U3, copies_C2 = self.manager.take_updates()
        for slot, column, block in updates_U3.tolist():
            self.mirror_SM[slot, column] = block
        for request in self.requests.values():
            assert self.mirror_SM[request.slot].tolist() == self.manager.table_SM[request.slot].tolist()
        self.shadow.copy(copies_C2)

    def _listen(self) -> None:
        for event in self.manager.take_events():
            if event.kind is EventKind.STORED:
                self.router[event.block_hash] = (event.parent_hash, event.token_ids, event.salt)
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
            found = [b for b in children if self.shadow.blocks[b][-1] == wanted]
            if not found:
                break
            longest, entry = longest + BLOCK_SIZE, int(index.entry_P[found[0]])
        assert cached == longest, "a prefix that is stored was not hit"
