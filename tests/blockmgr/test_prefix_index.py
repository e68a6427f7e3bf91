"""Hashes find, comparison proves; events tell."""

from collections.abc import Callable

import numpy as np

from octavo.blockmgr import BlockEvent, BlockManager, EventKind
from octavo.blockmgr.prefix_index import RootHasher, hash_block

MakeManager = Callable[..., BlockManager]
TEN = np.arange(10, dtype=np.int32)


def constant(_parent: bytes, _token_bytes: bytes) -> bytes:
    return b"same"


def store(manager: BlockManager, name: str, tokens: np.ndarray, salt: str = "") -> int:
    slot = manager.admit(name, tokens, salt=salt, reserve_tokens=len(tokens)).slot
    manager.commit(slot, tokens, len(tokens))
    return int(slot)


def test_a_colliding_hash_gives_no_wrong_hit(make_manager: MakeManager) -> None:
    manager = make_manager(hash_function=constant)
    store(manager, "a", TEN[:5])
    assert manager.match(TEN[:5]) == 4
    assert manager.match(TEN[1:6]) == 0
    assert manager.match(TEN[:5], salt="B") == 0


def test_an_equal_block_after_a_colliding_but_different_parent_is_no_hit(make_manager: MakeManager) -> None:
    def of_tokens_alone(_parent: bytes, token_bytes: bytes) -> bytes:
        return token_bytes

    manager = make_manager(hash_function=of_tokens_alone)
    store(manager, "a", np.array([1, 1, 1, 1, 3, 3, 3, 3, 9], np.int32))
    store(manager, "b", np.array([2, 2, 2, 2, 9], np.int32))
    assert manager.match(np.array([2, 2, 2, 2, 3, 3, 3, 3, 9], np.int32)) == 4
    assert manager.match(np.array([3, 3, 3, 3, 9], np.int32)) == 0


def test_of_two_contents_with_one_hash_the_younger_stays(make_manager: MakeManager) -> None:
    manager = make_manager(hash_function=constant)
    manager.release(store(manager, "a", TEN[:5]), "a")
    store(manager, "b", TEN[3:8])
    assert (manager.match(TEN[:5]), manager.match(TEN[3:8])) == (0, 4)
    assert (manager.num_cached, manager.num_active, manager.audit().violations) == (0, 2, ())


def test_roots_depend_on_fingerprint_salt_and_secret_apart() -> None:
    def root(fingerprint: bytes, salt: str, secret: bytes = b"s") -> bytes:
        return RootHasher(fingerprint=fingerprint, secret=secret).root(salt)

    roots = [root(b"model", "A"), root(b"model", "B"), root(b"model", ""), root(b"modelA", ""), root(b"mode", "lA")]
    roots += [root(b"", "modelA"), root(b"model", "A", secret=b"t")]
    assert len(set(roots)) == len(roots)
    assert root(b"model", "A") == root(b"model", "A")


def test_a_drawn_secret_makes_hashes_unpredictable(make_manager: MakeManager) -> None:
    hashes = set()
    for _ in range(2):
        manager = make_manager(secret=b"")
        store(manager, "a", TEN)
        hashes |= {event.block_hash for event in manager.take_events()}
    assert len(hashes) == 4


def test_events_tell_what_was_stored_and_removed_in_order(make_manager: MakeManager) -> None:
    manager = make_manager(num_blocks=3)
    manager.release(store(manager, "a", TEN[:9], salt="S"), "a")
    stored = manager.take_events()
    first = hash_block(RootHasher(fingerprint=b"model", secret=b"secret").root("S"), TEN[:4].tobytes())
    second = hash_block(first, TEN[4:8].tobytes())
    assert stored == [
        BlockEvent(kind=EventKind.STORED, block_hash=first, token_ids=TEN[:4].tobytes(), salt="S"),
        BlockEvent(
            kind=EventKind.STORED, block_hash=second, parent_hash=first, token_ids=TEN[4:8].tobytes(), salt="S"
        ),
    ]  # fmt: skip
    assert manager.walk_events().take(10**6) == stored
    manager.admit("b", TEN, reserve_tokens=8)
    assert manager.take_events() == [BlockEvent(kind=EventKind.REMOVED, block_hash=second)]
    assert manager.take_events() == []


def test_a_flush_of_everything_is_one_event(make_manager: MakeManager) -> None:
    manager = make_manager()
    manager.release(store(manager, "a", TEN), "a")
    manager.take_events()
    manager.flush_prefix_cache()
    assert manager.take_events() == [BlockEvent(kind=EventKind.CLEARED)]


def test_events_that_nobody_takes_become_one_snapshot(make_manager: MakeManager) -> None:
    manager = make_manager(max_events=1)
    store(manager, "a", TEN)
    events = manager.take_events()
    assert [event.kind for event in events] == [EventKind.CLEARED, EventKind.STORED, EventKind.STORED]
    assert events[1:] == manager.walk_events().take(10**6)
    assert manager.take_events() == []


def test_a_prompt_that_is_asked_for_again_is_not_hashed_again(make_manager: MakeManager) -> None:
    hashed = []

    def counting(parent: bytes, token_bytes: bytes) -> bytes:
        hashed.append(token_bytes)
        return hash_block(parent, token_bytes)

    manager = make_manager(hash_function=counting)
    slot = store(manager, "a", TEN)
    hashed.clear()
    assert (manager.match(TEN), manager.match(TEN), manager.admit("b", TEN).num_cached_tokens) == (8, 8, 8)
    assert len(hashed) == 1  # the first block's digest was known from the miss at admission
    manager.release(slot, "a")
    assert (manager.match(TEN, salt="S"), manager.match(TEN[1:]), manager.match(TEN)) == (0, 0, 8)
