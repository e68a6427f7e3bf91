"""Planted bugs are found: by walks through the state machine, or by one direct check."""

from collections.abc import Callable

import numpy as np
import pytest

from octavo.blockmgr import BlockManager
from octavo.blockmgr.prefix_index import PrefixIndex, RootHasher
from tests.support.blockmgr.mutants import MUTANTS
from tests.support.blockmgr.walk import walk

MAX_SEEDS = 60


def first_seed_that_fails() -> int | None:
    for seed in range(MAX_SEEDS):
        try:
            walk(seed)
        except Exception:  # whatever a broken manager raises
            return seed
    return None


@pytest.mark.parametrize("mutant", MUTANTS)
def test_a_walk_kills(mutant: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for owner, attribute, replacement in MUTANTS[mutant]:
        monkeypatch.setattr(owner, attribute, replacement)
    assert first_seed_that_fails() is not None


def test_m13_tainted_blocks_that_return_through_a_child_are_seen(
    make_manager: Callable[..., BlockManager], monkeypatch: pytest.MonkeyPatch
) -> None:
    def stays_out() -> bool:
        manager = make_manager()
        tokens = np.arange(5, dtype=np.int32)
        parent = manager.admit("p", tokens, reserve_tokens=5).slot
        child = manager.fork(parent, "c", num_tokens=5)
        manager.taint(parent)
        manager.commit(child, tokens, 5)
        return manager.match(tokens) == 0

    assert stays_out()
    monkeypatch.setattr(PrefixIndex, "bar", lambda *_: None)
    assert not stays_out()


def test_m6_a_root_without_the_salt_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    def differ() -> bool:
        roots = RootHasher(fingerprint=b"model", secret=b"secret")
        return roots.root("A") != roots.root("B")

    assert differ()
    monkeypatch.setattr(RootHasher, "root", lambda *_: b"root")
    assert not differ()


def test_m6_a_salt_that_looks_like_a_fingerprint_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    def differ() -> bool:
        joined = RootHasher(fingerprint=b"modelA", secret=b"s").root("")
        return joined != RootHasher(fingerprint=b"model", secret=b"s").root("A")

    assert differ()
    monkeypatch.setattr(RootHasher, "root", lambda self, salt: self._prefix[8:] + salt.encode())
    assert not differ()


def test_m7_a_predictable_hash_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    def differ() -> bool:
        return len({RootHasher(fingerprint=b"model", secret=b"").root("") for _ in range(2)}) == 2

    assert differ()
    monkeypatch.setattr("octavo.blockmgr.prefix_index.secrets.token_bytes", lambda num: b"0" * num)
    assert not differ()
