"""Mirrors what Dynamo's router knows of a service's prefix cache, and finds what a batch of events changes. Pure.

A service sends its present state, then each change. A change may already be part of the state, and a block may be
removed before the blocks that follow it. The router expects each block to be stored once, after the block that it
follows, and removed once; and the same prompt to have the same hashes on every backend, so hashes are computed here
from the tokens.
"""

import hashlib
from array import array
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

from octavo.openengine import openengine_pb2 as oe


@dataclass(frozen=True, slots=True, kw_only=True)
class Stored:
    """Consecutive blocks of a prompt. parent: the hash of the block before the first; None if that begins a prompt."""

    hashes: list[int] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)
    parent: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Removed:
    """Blocks that are no longer cached."""

    hashes: list[int]


@dataclass(slots=True, kw_only=True)
class _Block:
    """mediums: where the block is stored. hash: the router's name for it; None unless the router knows the block, and
    with it all blocks before it. depth: how many blocks are before it."""

    parent: int | None
    token_ids: list[int]
    mediums: set[int] = field(default_factory=set)
    hash: int | None = None
    depth: int = 0


class CacheMirror:
    """block_size: in tokens, as registered with Dynamo; blocks of another size are counted in `num_alien` and not
    reported."""

    def __init__(self, block_size: int) -> None:
        self._block_size = block_size
        self._blocks: dict[int, _Block] = {}  # by the service's block ids
        self._followers: dict[int | None, set[int]] = {}
        self._stored: dict[int, _Block] = {}  # in this batch, by hash, in order
        self._removed: dict[int, int] = {}  # hash -> depth
        self.num_alien = 0

    def take(self, batch: oe.KvEventBatch) -> list[Stored | Removed]:
        """Apply a batch; returns what to tell the router. A block counts on whichever medium it is: one in host memory
        can be brought back. Removals come last and leave out blocks that the same batch stores again: when a router
        forgets a block, it also forgets those that follow it."""
        for event in batch.events:
            match event.WhichOneof("event"):
                case "all_blocks_cleared":
                    self._clear()
                case "block_stored":
                    self._store(event.block_stored)
                case "block_removed":
                    for number in map(_number, event.block_removed.block_hashes):
                        self._remove(number, event.block_removed.medium)
        return self._news()

    def forget(self) -> list[Stored | Removed]:
        """Forget all blocks, which are gone or unknown. Returns what to tell the router."""
        self._clear()
        return self._news()

    def _clear(self) -> None:
        for block in self._blocks.values():
            self._withdraw(block)
        self._blocks, self._followers = {}, {}

    def _store(self, event: oe.BlockStored) -> None:
        if event.block_size != self._block_size:
            self.num_alien += len(event.block_hashes)
            return
        parent = _number(event.parent_block_hash) if event.HasField("parent_block_hash") else None
        for index, number in enumerate(map(_number, event.block_hashes)):
            if number not in self._blocks:
                first = index * self._block_size
                token_ids = list(event.token_ids[first : first + self._block_size])
                self._blocks[number] = _Block(parent=parent, token_ids=token_ids)
                self._followers.setdefault(parent, set()).add(number)
                self._tell_from(number)
            self._blocks[number].mediums.add(event.medium)
            parent = number

    def _tell_from(self, number: int) -> None:
        """Report a block if all blocks before it are known, and then those that follow it."""
        waiting = [number]
        while waiting:
            number = waiting.pop()
            block = self._blocks[number]
            before = None if block.parent is None else self._blocks.get(block.parent)
            if block.parent is not None and (before is None or before.hash is None):
                continue
            block.hash = _name(None if before is None else before.hash, block.token_ids)
            block.depth = before.depth + 1 if before is not None else 0
            if block.hash in self._removed:
                del self._removed[block.hash]
            else:
                self._stored[block.hash] = block
            waiting += self._followers.get(number, ())

    def _remove(self, number: int, medium: int) -> None:
        block = self._blocks.get(number)
        if block is None:
            return
        block.mediums.discard(medium)
        if block.mediums:
            return
        waiting = [number]
        while waiting:  # the blocks that follow it cannot be used without it
            each = waiting.pop()
            self._withdraw(self._blocks[each])
            waiting += self._followers.get(each, ())
        del self._blocks[number]
        siblings = self._followers[block.parent]
        siblings.discard(number)
        if not siblings:
            del self._followers[block.parent]

    def _withdraw(self, block: _Block) -> None:
        if block.hash is None:
            return
        if block.hash in self._stored:
            del self._stored[block.hash]
        else:
            self._removed[block.hash] = block.depth
        block.hash = None

    def _news(self) -> list[Stored | Removed]:
        stored, self._stored = self._stored, {}
        removed, self._removed = self._removed, {}
        gone = sorted(removed, key=removed.__getitem__, reverse=True)
        return [*self._runs(stored), *([Removed(hashes=gone)] if gone else [])]

    def _runs(self, stored: dict[int, _Block]) -> Iterator[Stored]:
        run: Stored | None = None
        for name, block in stored.items():
            before = None if block.parent is None else self._blocks[block.parent].hash
            if run is None or run.hashes[-1] != before:
                if run is not None:
                    yield run
                run = Stored(parent=before)
            run.hashes.append(name)
            run.token_ids.extend(block.token_ids)
        if run is not None:
            yield run


def _number(name: oe.KvBlockHash) -> int:
    return int.from_bytes(name.value, "big", signed=True)


def _name(before: int | None, token_ids: Iterable[int]) -> int:
    """The hash of a block, from the hash of the block before it and its tokens."""
    data = b"" if before is None else before.to_bytes(8, "little", signed=True)
    digest = hashlib.blake2b(data + array("I", token_ids).tobytes(), digest_size=8).digest()
    return int.from_bytes(digest, "little", signed=True)
