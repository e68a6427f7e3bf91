"""A Hypothesis state machine over the block manager: any order of admit, grow, plan, end, fork, taint, release, flush,
with invariants I1 to I13 after every one. Used by the test of the manager and by the tests of its mutants."""

import numpy as np
from hypothesis import strategies as st
from hypothesis.stateful import initialize, invariant, precondition, rule

from octavo.blockmgr import BlockManager, BlockManagerConfig, PrefixCache
from tests.support.blockmgr.reference import BLOCK_SIZE, WIDTH, KvReference, Request, Step, ToggledHash
from tests.support.blockmgr.shadow import KvShadow, expected
from tests.support.blockmgr.state import full_state

MAX_REQUESTS = 6
TOKENS = st.one_of(
    st.integers(1, 9).map(lambda length: [0] * length),
    st.tuples(st.integers(0, 6), st.integers(1, 3)).map(lambda cut: [0] * cut[0] + [1] * cut[1]),
    st.lists(st.integers(0, 2), min_size=1, max_size=9),
)
PICK = st.integers(0, 100)
WORK = st.lists(st.tuples(PICK, st.sampled_from([9, 1, 2, 3]), st.integers(0, 1)), min_size=1, max_size=4)


class KvMachine(KvReference):
    """Rules drive the manager and the model side by side; the shadow store holds what the device would hold."""

    @initialize(
        num_blocks=st.integers(4, 12),
        max_slots=st.integers(3, 6),
        cache=st.sampled_from([PrefixCache.ON, PrefixCache.ON, PrefixCache.ON, PrefixCache.OFF]),
        max_events=st.sampled_from([3, 1000]),
        num_host_blocks=st.sampled_from([0, 1, 3, 6, 20]),
        max_copies_in=st.sampled_from([1, 2, 100]),
    )
    def start(
        self,
        num_blocks: int,
        max_slots: int,
        cache: PrefixCache,
        max_events: int,
        num_host_blocks: int = 0,
        max_copies_in: int = 100,
    ) -> None:
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
            num_host_blocks=num_host_blocks,
            max_copies_in=max_copies_in,
        )
        self.manager = BlockManager(config, hash_block=self.hash)
        self.shadow = KvShadow(num_blocks + num_host_blocks, BLOCK_SIZE)
        self.requests, self.swapped, self.to_spoil = {}, {}, set()
        self.steps = []
        self.mirror_SM = np.full((max_slots, WIDTH), -1, np.int32)
        self.joined = set()
        self.router = {}
        self.num_admitted = self.num_steps = 0
        self.has_toggled = self.has_duplicates = False

    # ------------------------------------------------------------ rules

    @precondition(lambda self: len(self.requests) < MAX_REQUESTS)
    @rule(
        tokens=TOKENS,
        salt=st.sampled_from(["", "", "A"]),
        reserve=st.sampled_from([None, None, 1, 4, 7, 12]),
        use=st.sampled_from([9, 9, 9, 1, 0]),
    )
    def admit(self, tokens: list[int], salt: str, reserve: int | None, use: int = 9) -> None:
        """A request arrives. Its prefix hit must be correct and as long as possible."""
        name = f"r{self.num_admitted}"
        ids = np.array(tokens, np.int32)
        hit = self.manager.match(ids, salt=salt)
        asked: list[bool] = []

        def num_to_use(is_on_host: np.ndarray) -> int:
            asked[:] = is_on_host.tolist()
            return min(use, len(is_on_host))

        admission = self._attempt(
            lambda: self.manager.admit(name, ids, salt=salt, reserve_tokens=reserve, num_to_use=num_to_use)
        )
        if admission is None:
            return
        self.num_admitted += 1
        cached = admission.num_cached_tokens
        assert cached == (min(hit, use * BLOCK_SIZE) if asked else hit)
        assert cached in range(0, len(tokens), BLOCK_SIZE), "I9"
        self._check_hit_is_longest(salt, tokens, hit)
        assert (admission.num_awaited_blocks > 0) == any(asked[:use])
        num_blocks = max(cached // BLOCK_SIZE, -(-(reserve or 0) // BLOCK_SIZE))
        self.requests[name] = Request(int(admission.slot), salt, tokens, cached, num_blocks)
        self.joined.add(int(admission.slot))
        row = self._row(self.requests[name])
        assert self._read(row, cached) == expected(salt, tokens, cached), "a hit is not what it says"
        self._hand_out(row[cached // BLOCK_SIZE :])
        self._spoil([block for block in row if self.manager.host.is_awaited_P[block]])

    @precondition(lambda self: self.requests)
    @rule(pick=PICK)
    def swap_out(self, pick: int) -> None:
        """A request's blocks go to the host; refused if a step is in flight or there is no room."""
        name = sorted(self.requests)[pick % len(self.requests)]
        request = self.requests[name]
        if request.is_tainted or not request.num_computed:
            return
        if self.steps:
            before = full_state(self.manager)
            try:
                self.manager.swap_out(request.slot, name, request.num_computed)
                raise AssertionError("a block of a step in flight moved")
            except ValueError:
                assert full_state(self.manager) == before
                return
        row = self._row(request)
        num_new = sum(not self.manager.host.is_awaited_P[b] for b in row[: -(-request.num_computed // BLOCK_SIZE)])
        has_room = num_new <= self.manager.host.pool.num_available
        done = self._attempt(lambda: self.manager.swap_out(request.slot, name, request.num_computed))
        assert (done is not None) == has_room
        if has_room:
            self.swapped[name] = self.requests.pop(name)
            self.joined.discard(request.slot)
            held = self.manager.host.swapped[name]
            assert self._read(held.blocks.tolist(), request.num_computed) == expected(
                request.salt, request.tokens, request.num_computed
            ), "what was swapped out is not what was there"

    @precondition(lambda self: self.swapped)
    @rule(pick=PICK)
    def swap_in(self, pick: int) -> None:
        """The request comes back whole, or there is no room."""
        name = sorted(self.swapped)[pick % len(self.swapped)]
        request = self.swapped[name]
        ids = np.array(request.tokens, np.int32)
        admission = self._attempt(lambda: self.manager.admit(name, ids, salt=request.salt, reserve_tokens=len(ids)))
        if admission is None:
            return
        self.requests[name] = self.swapped.pop(name)
        request.slot = int(admission.slot)
        self.joined.add(request.slot)
        assert admission.num_cached_tokens == request.num_computed
        row = self._row(request)
        request.num_blocks = len(row)
        assert self._read(row, request.num_computed) == expected(request.salt, request.tokens, request.num_computed)
        num_filled = -(-request.num_computed // BLOCK_SIZE)
        self._hand_out(row[num_filled:])
        self._spoil([block for block in row if self.manager.host.is_awaited_P[block]])

    @precondition(lambda self: self.swapped)
    @rule(pick=PICK, how=st.sampled_from(["once", "twice"]))
    def drop_swapped(self, pick: int, how: str) -> None:
        """Cancelled while it is on the host."""
        name = sorted(self.swapped)[pick % len(self.swapped)]
        del self.swapped[name]
        self.manager.drop_swapped(name)
        if how == "twice":
            before = full_state(self.manager)
            self.manager.drop_swapped(name)
            assert full_state(self.manager) == before

    @precondition(lambda self: self.requests)
    @rule(pick=PICK, num_tokens=st.integers(0, WIDTH * BLOCK_SIZE))
    def grow(self, pick: int, num_tokens: int) -> None:
        """One slot grows, or is refused as predicted."""
        self._grow(self._pick(pick), num_tokens)

    @precondition(lambda self: self.requests)
    @rule(picks=st.sets(PICK, min_size=1, max_size=4), extra=st.integers(0, 4))
    def grow_many(self, picks: set[int], extra: int) -> None:
        """Several slots grow at once; refused are those that `grow` would refuse one by one."""
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
        """`plan` once more, so that half of all rules are plans."""
        self.plan(data, commit_at)

    @precondition(lambda self: self.requests and len(self.steps) < 3)
    @rule(
        work=WORK,
        commit_at=st.sampled_from(["plan", "end"]),
    )
    def plan(self, work: list[tuple[int, int, int]], commit_at: str) -> None:
        """Make a plan, launch it, and execute it at once: only the order of plans matters."""
        chunks = {}
        for pick, num, token in work:
            request = self._pick(pick)
            if request.slot not in chunks:
                chunk = self._prepare_chunk(request, num, token)
                if chunk is not None:
                    chunks[request.slot] = (request, *chunk)
        self.num_steps += 1
        step = Step(self.num_steps)
        ins_C2 = self._take_updates()
        self.manager.begin_step(step.number)
        for request, start, stop in chunks.values():
            self._execute(step, request, start, stop, commit_at)
        step.blocks |= set(ins_C2.ravel().tolist())
        self.shadow.copy(ins_C2)
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
        """Steps must end in order; otherwise nothing happens."""
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
        """A child shares what its parent has computed; then both continue separately."""
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
        """A request ends, in flight or not. A second release, or of another request, does nothing."""
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
        """Rare events, now and then: if they were frequent, nothing would ever stay cached."""
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
        """I1 to I3, by the manager's own recount and by ours."""
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
        """I6: the device holds what the index says, for the whole prefix."""
        if not hasattr(self, "manager"):
            return
        index = self.manager._index
        block_of_entry = {int(index.entry_P[block]): block for block in index.block_of.values()}
        for block in index.block_of.values():
            stored = index.stored_event(block)
            salt, tokens = stored.salt, np.frombuffer(stored.token_ids, np.int32).tolist()
            held_salt, held = self.content(block)[-1]
            assert (held_salt, list(held[-BLOCK_SIZE:])) == (salt, tokens), "I6"
            assert self.content(block)[0] == (salt, held[:-1]), "I6"
            parent = int(index.parent_entry_P[block])
            if parent == 0:
                assert len(held) == BLOCK_SIZE
            elif parent in block_of_entry:
                assert self.content(block_of_entry[parent])[-1] == (salt, held[:-BLOCK_SIZE]), "I6"

    @invariant()
    def tails_are_given_up_before_heads(self) -> None:
        """I8, as long as no two blocks have the same content."""
        if not hasattr(self, "manager") or self.has_duplicates or self.has_toggled:
            return
        index, order = self.manager._index, self.manager._pool.lru.to_array().tolist()
        place_of_entry = {int(index.entry_P[block]): place for place, block in enumerate(order)}
        for place, block in enumerate(order):
            assert place_of_entry.get(int(index.parent_entry_P[block]), WIDTH * 100) > place, "I8"

    @invariant()
    def events_rebuild_the_index(self) -> None:
        """A router that applied all events knows exactly what is stored."""
        if hasattr(self, "manager"):
            self._listen()
            stored = {
                e.block_hash: (e.parent_hash, e.token_ids, e.salt, e.tier)
                for e in self.manager.walk_events().take(10**6)
            }
            assert self.router == stored

    def teardown(self) -> None:
        """When all requests have ended, nothing is held."""
        if not hasattr(self, "manager"):
            return
        while self.steps:
            self.end_step()
        for name in list(self.requests):
            self.manager.release(self.requests.pop(name).slot, name)
        for name in list(self.swapped):
            del self.swapped[name]
            self.manager.drop_swapped(name)
        self.manager.take_updates()
        self.manager.take_updates()
        self.audit_is_clean_and_counts_agree()
        assert self.manager.num_active == 0
        assert self.manager.host.pool.num_available == self.manager.config.num_host_blocks
        assert len(self.manager.host.ins) == 0
