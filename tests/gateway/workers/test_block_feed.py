"""The feed of prefix caches: a late follower's view equals an early one's, and a slow one is cut."""

import asyncio

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from octavo.gateway.workers import events
from octavo.gateway.workers.errors import FeedCut, FeedEnded, FeedFull
from octavo.gateway.workers.events import BlockChange, BlockFeed, BlockSubscription, ChangeKind, Chunk
from octavo.gateway.workers.prefix_index import PrefixIndex
from octavo.wire.messages import KvEvent, KvEventKind, KvTier

BLOCK = 2


def tokens(*ids: int) -> bytes:
    return np.array(ids, "<i4").tobytes()


def stored(name: str, ids: tuple[int, int], parent: str = "", salt: str = "", tier: KvTier = KvTier.DEVICE) -> KvEvent:
    return KvEvent(
        kind=KvEventKind.STORED,
        block_hash=name.encode(),
        parent_hash=parent.encode(),
        token_ids=tokens(*ids),
        salt="" if parent else salt,
        tier=tier,
    )


def removed(name: str) -> KvEvent:
    return KvEvent(kind=KvEventKind.REMOVED, block_hash=name.encode())


class Rig:
    """One index with its feed."""

    def __init__(self) -> None:
        self.feed = BlockFeed(lambda: 1000)
        self.index = PrefixIndex(block_size=BLOCK, max_nodes=1000, feed=self.feed)

    def apply(self, worker: int, *events: KvEvent) -> None:
        for event in events:
            self.index.apply(worker, event)
        while self.index.has_leaving:
            self.index.drop_part()
        self.feed.flush()

    def follow(self, salt: str = "") -> "Follower":
        return Follower(self.feed.follow(salt, self.index.blocks(salt), self.index.num_blocks(salt)))


class Follower:
    """Replays what it hears."""

    def __init__(self, subscription: BlockSubscription) -> None:
        self.subscription = subscription
        self.blocks: dict[int, BlockChange] = {}
        self.sequences: list[int] = []
        self.chunks: list[Chunk] = []

    async def hear(self) -> None:
        """Everything that waits now."""
        while self.subscription._next_chunk < self.subscription._num_chunks or self.subscription._waiting:
            batch = await self.subscription.next()
            self.sequences.append(batch.sequence)
            if batch.chunk is not None:
                self.chunks.append(batch.chunk)
            for change in batch.changes:
                if change.kind is ChangeKind.STORED:
                    self.blocks[change.block_id] = change
                else:
                    self.blocks.pop(change.block_id, None)

    def prompts(self) -> set[tuple[bytes, ...]]:
        """The blocks as paths of tokens."""
        return {self._path(change) for change in self.blocks.values()}

    def _path(self, change: BlockChange) -> tuple[bytes, ...]:
        if change.parent_id is None:
            return (change.token_ids,)
        parent = self.blocks.get(change.parent_id)
        return (*(self._path(parent) if parent else (b"gone",)), change.token_ids)


async def test_a_follower_hears_the_state_and_then_each_change() -> None:
    rig = Rig()
    rig.apply(1, stored("a", (1, 2)), stored("b", (3, 4), parent="a"))
    late = rig.follow()
    await late.hear()
    assert late.prompts() == {(tokens(1, 2),), (tokens(1, 2), tokens(3, 4))}
    assert (late.sequences, late.chunks) == ([1000], [Chunk(index=0, count=1, num_blocks=2)])
    rig.apply(1, removed("b"), stored("c", (5, 6), parent="a"))
    await late.hear()
    assert late.prompts() == {(tokens(1, 2),), (tokens(1, 2), tokens(5, 6))}
    assert late.sequences == [1000, 1001]


async def test_numbers_rise_from_one_subscription_to_the_next_also_where_the_clock_is_set_back() -> None:
    rig = Rig()
    rig.apply(1, stored("a", (1, 2)))
    for expected in (1000, 1001, 1002):  # a clock that stands has been set back by as much as has passed
        follower = rig.follow()
        await follower.hear()
        assert follower.sequences == [expected]
        follower.subscription.leave()


async def test_workers_are_told_as_one_cache() -> None:
    rig = Rig()
    follower = rig.follow()
    rig.apply(1, stored("mine", (1, 2)))
    rig.apply(2, stored("yours", (1, 2)))
    rig.apply(1, removed("mine"))
    await follower.hear()
    assert follower.prompts() == {(tokens(1, 2),)}
    assert follower.sequences == [1000, 1001]  # the state, and the first store
    rig.apply(2, KvEvent(kind=KvEventKind.CLEARED))
    await follower.hear()
    assert follower.prompts() == set()


async def test_other_salts_are_not_heard() -> None:
    rig = Rig()
    rig.apply(1, stored("a", (1, 2), salt="theirs"))
    follower = rig.follow("mine")
    rig.apply(1, stored("b", (3, 4), salt="theirs"), stored("c", (5, 6), salt="mine"), removed("a"))
    await follower.hear()
    assert follower.prompts() == {(tokens(5, 6),)}


async def test_a_large_state_comes_in_chunks_with_changes_between(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(events, "CHUNK_CHANGES", 3)
    rig = Rig()
    rig.apply(1, *(stored(f"n{index}", (index, index)) for index in range(8)))
    follower = rig.follow()
    first = await follower.subscription.next()
    assert (len(first.changes), first.chunk) == (3, Chunk(index=0, count=3, num_blocks=8))
    for change in first.changes:
        follower.blocks[change.block_id] = change
    rig.apply(1, removed("n0"), removed("n7"), *(stored(f"m{index}", (100 + index, 1)) for index in range(5)))
    await follower.hear()
    early = {(tokens(index, index),) for index in range(1, 7)}
    assert follower.prompts() == early | {(tokens(100 + index, 1),) for index in range(5)}
    assert follower.sequences == list(range(1001, 1001 + len(follower.sequences)))


async def test_a_slow_follower_is_cut_and_costs_nothing_more(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(events, "MAX_WAITING_CHANGES", 4)
    rig = Rig()
    follower = rig.follow()
    rig.apply(1, *(stored(f"n{index}", (index, index)) for index in range(5)))
    rig.apply(1, stored("more", (9, 9)))
    assert len(follower.subscription._waiting) == 0
    with pytest.raises(FeedCut):
        await follower.subscription.next()


async def test_a_feed_that_ends_wakes_its_followers() -> None:
    rig = Rig()
    waiting, behind = rig.follow(), rig.follow()
    await waiting.hear()
    asleep = asyncio.create_task(waiting.subscription.next())
    await asyncio.sleep(0)
    rig.feed.end()
    rig.apply(1, stored("more", (9, 9)))
    for each in (asleep, behind.subscription.next()):
        with pytest.raises(FeedEnded):
            await each


def test_followers_are_counted_and_leave_twice_without_harm(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(events, "MAX_FOLLOWERS", 1)
    rig = Rig()
    only = rig.follow()
    with pytest.raises(FeedFull):
        rig.follow()
    only.subscription.leave()
    only.subscription.leave()
    assert not rig.feed.is_followed
    rig.follow()


async def test_a_block_that_goes_to_the_host_and_back_is_removed_from_one_tier_and_stored_on_the_other() -> None:
    rig = Rig()
    rig.apply(1, stored("head", (1, 2)), stored("tail", (3, 4), parent="head"))
    follower = rig.follow()
    await follower.hear()
    rig.apply(1, stored("tail", (3, 4), parent="head", tier=KvTier.HOST))
    rig.apply(1, stored("head", (1, 2), tier=KvTier.HOST))
    await follower.hear()
    assert [change.tier for change in follower.blocks.values()] == [KvTier.HOST, KvTier.HOST]
    rig.apply(2, stored("other's", (1, 2)))  # one worker has it on its device: so it is told
    await follower.hear()
    assert sorted(change.tier for change in follower.blocks.values()) == [KvTier.DEVICE, KvTier.HOST]
    rig.apply(2, removed("other's"))
    await follower.hear()
    assert [change.tier for change in follower.blocks.values()] == [KvTier.HOST, KvTier.HOST]
    assert len(rig.index) == 2


NAMES = [f"b{index}" for index in range(6)]
steps = st.lists(
    st.tuples(
        st.integers(1, 2),
        st.one_of(
            st.builds(
                lambda name, ids, parent, tier: stored(name, (ids, ids), parent=parent, tier=tier),
                st.sampled_from(NAMES),
                st.integers(0, 2),
                st.sampled_from(["", *NAMES]),
                st.sampled_from(list(KvTier)),
            ),
            st.builds(removed, st.sampled_from(NAMES)),
            st.just(KvEvent(kind=KvEventKind.CLEARED)),
        ),
    ),
    max_size=25,
)


@settings(max_examples=150)
@given(steps, steps)
async def test_whenever_it_joins_a_follower_ends_with_what_the_index_holds(before: list, after: list) -> None:  # type: ignore[type-arg]
    rig = Rig()
    early = rig.follow()
    for worker, event in before:
        rig.apply(worker, event)
    late = rig.follow()
    for worker, event in after:
        rig.apply(worker, event)
    await early.hear()
    await late.hear()
    truth = {change.block_id: change for change in rig.index.blocks("")}
    assert early.blocks == late.blocks == truth
    assert rig.index.num_blocks("") == len(truth)
