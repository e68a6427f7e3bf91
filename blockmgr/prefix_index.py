"""The prefix cache: which block holds which full block of tokens after which prefix, and the changes to it.

It must not know who references a block, nor who listens to the changes. Legend: P blocks of both pools · B block size.

    root = H(secret; fingerprint, salt)        one per salt, never published
    h[0] = H(root + tokens of block 0)         h[i] = H(h[i-1] + tokens of block i)

A digest only finds a candidate: this counts only if its tokens and its salt are equal, and its parent is the very entry
that was matched before it. Every insertion gets an entry number that is never reused, so a chain of equal parents
proves the whole prefix without comparing it again, even if hashes collide.
"""

import secrets
from collections.abc import Callable
from dataclasses import dataclass, field
from hashlib import blake2b

import numpy as np

from octavo.blockmgr.changes import BlockEvent, EventKind, EventLog, IndexWalk
from octavo.blockmgr.ids import Tier

HashBlock = Callable[[bytes, bytes], bytes]
"""(parent digest, token bytes of one block) -> digest."""

_ROOT_ENTRY = 0  # parent of every first block
_NO_ENTRY = -1  # the block is not in the index
_NO_BLOCKS = np.empty(0, np.int32)
_DIGEST_BYTES = 16
_ROOT_PERSON = b"octavo.kv.root.1"  # at most 16 bytes: keeps roots apart from every other use of the hash


def hash_block(parent: bytes, token_bytes: bytes) -> bytes:
    """The next digest of a chain: BLAKE2b (RFC 7693) of the parent's digest and the block's int32 tokens."""
    return blake2b(parent + token_bytes, digest_size=_DIGEST_BYTES).digest()


class RootHasher:
    """Roots of the chains of one model.

    The fingerprint is length-prefixed, so that no salt can look like another fingerprint's end; the secret keys the
    hash, so that a digest cannot be predicted from outside (CVE-2025-25183).
    """

    def __init__(self, *, fingerprint: bytes, secret: bytes) -> None:
        self._key = secret or secrets.token_bytes(32)
        self._prefix = len(fingerprint).to_bytes(8, "little") + fingerprint

    def root(self, salt: str) -> bytes:
        """The root digest of all chains with this salt."""
        data = self._prefix + salt.encode("utf-8", "surrogatepass")
        return blake2b(data, digest_size=_DIGEST_BYTES, key=self._key, person=_ROOT_PERSON).digest()


class DigestMemo:
    """The digests of the prompt that was looked up last: a scheduler looks it up in each step until there is room for
    it, and once more to admit it."""

    def __init__(self) -> None:
        self._salt = ""
        self._data = b""
        self._digests: list[bytes] = []

    def of(self, salt: str, data: bytes) -> list[bytes]:
        """The digests known so far, head first; the caller appends those that it computes."""
        if salt != self._salt or data != self._data:
            self._salt, self._data, self._digests = salt, data, []
        return self._digests


@dataclass(slots=True, kw_only=True)
class Chain:
    """What a slot knows of its own prefix: digest and index entry of each committed full block, head first.

    The entry is that of the indexed block with this content, the slot's own or another with equal tokens.
    root: parent of the first block's digest. is_tainted: nothing of this slot may enter the index.
    """

    salt: str
    root: bytes
    digests: list[bytes] = field(default_factory=list)
    entries: list[int] = field(default_factory=list)
    is_tainted: bool = False

    def __len__(self) -> int:
        return len(self.digests)

    def append(self, digest: bytes, entry: int) -> None:
        """Add one more committed block."""
        self.digests.append(digest)
        self.entries.append(entry)

    def truncate(self, num_blocks: int) -> None:
        """Drop all but the first num_blocks blocks."""
        del self.digests[num_blocks:], self.entries[num_blocks:]

    def fork(self, num_blocks: int) -> "Chain":
        """The chain of a child that shares the first num_blocks blocks."""
        return Chain(
            salt=self.salt,
            root=self.root,
            digests=self.digests[:num_blocks],
            entries=self.entries[:num_blocks],
            is_tainted=self.is_tainted,
        )


class PrefixIndex:
    """Maps digests to blocks, with what proves a hit. There is one block per digest: of two blocks with equal content,
    the first stays and the second is not indexed. If contents differ under an equal digest, or the first has lost its
    parent, so that no prompt can reach it, the second replaces the first.

    num_blocks: of both tiers. first_host_block: blocks from this id on are the host's; None: all are the device's.
    """

    def __init__(
        self,
        num_blocks: int,
        block_size: int,
        roots: RootHasher,
        max_events: int,
        hash_block: HashBlock = hash_block,
        *,
        first_host_block: int | None = None,
    ) -> None:
        self.first_host_block = num_blocks if first_host_block is None else first_host_block
        self.events = EventLog(max_events, lambda: IndexWalk(self).take(num_blocks))
        self.roots = roots
        self.hash_block = hash_block
        self.block_of: dict[bytes, int] = {}
        self.entry_P = np.full(num_blocks, _NO_ENTRY, np.int64)
        self.is_tainted_P = np.zeros(num_blocks, np.bool_)
        self.parent_entry_P = np.full(num_blocks, _NO_ENTRY, np.int64)
        self._tokens_PB = np.empty((num_blocks, block_size), np.int32)
        self.digest_of: list[bytes | None] = [None] * num_blocks
        self._parent_of: list[bytes] = [b""] * num_blocks
        self._salt_of: list[str] = [""] * num_blocks
        self._block_size = block_size
        self._last_entry = _ROOT_ENTRY
        self._entered: list[tuple[int, int, bytes]] = []  # block, entry of its parent, tokens; empty between calls
        self._memo = DigestMemo()
        self._watched: frozenset[bytes] = frozenset()
        self.has_watched_entered = False

    def __len__(self) -> int:
        return len(self.block_of)

    def holds(self, blocks: np.ndarray) -> np.ndarray:
        """bool per block: whether it is in the index."""
        return self.entry_P[blocks] != _NO_ENTRY

    def taint(self, blocks: np.ndarray) -> None:
        """Keep these blocks out of the index until they are handed out anew."""
        self.is_tainted_P[blocks] = True

    def clear_taint(self, blocks: np.ndarray) -> None:
        """Let these blocks enter the index again: their former content is gone."""
        self.is_tainted_P[blocks] = False

    def find(self, token_ids_T: np.ndarray, salt: str) -> tuple[np.ndarray, Chain]:
        """The longest run of indexed blocks at the head of a prompt that leaves at least one token.

        token_ids_T: int32. Returns the blocks, int32, head first, and the chain that describes them.
        """
        chain = Chain(salt=salt, root=self.roots.root(salt))
        num_full = max(0, len(token_ids_T) - 1) // self._block_size
        data, width = token_ids_T[: num_full * self._block_size].tobytes(), 4 * self._block_size
        known, parent, blocks = self._memo.of(salt, data), chain.root, []
        for i in range(num_full):
            if i == len(known):
                known.append(self.hash_block(parent, data[i * width : (i + 1) * width]))
            parent = known[i]
            block = self.block_of.get(parent)
            if block is None:
                break
            blocks.append(block)
        hits = self._proven(np.array(blocks, np.int32), token_ids_T, salt, _ROOT_ENTRY)
        chain.digests = known[: len(hits)]
        chain.entries = self.entry_P[hits].tolist()
        return hits, chain

    def watch(self, chain: Chain, token_ids_T: np.ndarray) -> None:
        """Watch the blocks of a prompt's chain and the one behind them, and no others any more: as long as
        `has_watched_entered` is False, none of them has entered the index or come to the device. token_ids_T: int32."""
        start = len(chain) * self._block_size
        token_bytes = token_ids_T[start : start + self._block_size].tobytes()
        behind = self.hash_block(chain.digests[-1] if chain.digests else chain.root, token_bytes)
        self._watched = frozenset([*chain.digests, behind])
        self.has_watched_entered = False

    def extend(self, chain: Chain, blocks: np.ndarray, token_ids_T: np.ndarray) -> np.ndarray:
        """Enter full blocks, int32, head first; the chain has the first ones already.

        token_ids_T: int32, len(blocks) * block_size of them. Stops at a tainted block: what follows could never be hit.
        A block whose content the host has takes over that entry. Returns other blocks that had to leave the index,
        int32; the caller must update their pools.
        """
        self._forget_unreachable(chain)
        self._follow(chain, blocks[len(chain) :], token_ids_T[len(chain) * self._block_size :])
        data, width = token_ids_T[len(chain) * self._block_size :].tobytes(), 4 * self._block_size
        blocks = blocks[len(chain) :]
        replaced: list[int] = []
        for i, (block, is_tainted) in enumerate(zip(blocks.tolist(), self.is_tainted_P[blocks].tolist(), strict=True)):
            if is_tainted:
                break
            token_bytes = data[i * width : (i + 1) * width]
            digest = self.hash_block(chain.digests[-1] if chain.digests else chain.root, token_bytes)
            if digest in self.block_of:
                self._prove_entered()
            known = self._equal_block(digest, chain, token_bytes)
            if known is None:
                replaced += self._make_way(digest, block)
                chain.append(digest, self._enter(block, digest, chain, token_bytes))
                continue
            if known >= self.first_host_block and self.digest_of[block] is None:
                self.move(known, block)
                replaced.append(known)
                known = block
            chain.append(digest, int(self.entry_P[known]))
        self._prove_entered()
        return np.array(replaced, np.int32) if replaced else _NO_BLOCKS

    def move(self, source: int, target: int) -> None:
        """Move an indexed block's entry to a block that is not indexed and has the same content, or will have. The
        entry keeps its number, so that what follows it stays proven. Raises ValueError if that is not so."""
        digest = self.digest_of[source]
        if digest is None or self.digest_of[target] is not None:
            raise ValueError(f"block {source} cannot hand its entry to block {target}")
        self.entry_P[target], self.parent_entry_P[target] = self.entry_P[source], self.parent_entry_P[source]
        self._tokens_PB[target] = self._tokens_PB[source]
        self._parent_of[target], self._salt_of[target] = self._parent_of[source], self._salt_of[source]
        self.block_of[digest], self.digest_of[target], self.digest_of[source] = target, digest, None
        self.entry_P[source] = _NO_ENTRY
        if target < self.first_host_block and digest in self._watched:
            self.has_watched_entered = True
        if (source < self.first_host_block) != (target < self.first_host_block):
            self.events.stored(self.stored_event(target))

    def device_block(self, chain: Chain, i: int) -> int | None:
        """The device block with the chain's i-th content; None if that is not in the index, or is on the host."""
        if i >= len(chain) or not self._is_alive(chain, i):
            return None
        block = self.block_of[chain.digests[i]]
        return block if block < self.first_host_block else None

    def remove(self, blocks: np.ndarray) -> None:
        """Take blocks out of the index; those that are not in it are ignored."""
        for block in blocks.tolist():
            digest = self.digest_of[block]
            if digest is None:
                continue
            del self.block_of[digest]
            self.digest_of[block] = None
            self.events.removed(digest)
        self.entry_P[blocks] = _NO_ENTRY

    def clear(self) -> None:
        """Take everything out, with one event for all."""
        self.block_of.clear()
        self.digest_of = [None] * len(self.digest_of)
        self.entry_P.fill(_NO_ENTRY)
        self.events.cleared()

    def stored_event(self, block: int) -> BlockEvent:
        """The STORED event for an indexed block."""
        return BlockEvent(
            kind=EventKind.STORED,
            block_hash=self.digest_of[block] or b"",
            parent_hash=self._parent_of[block],
            token_ids=self._tokens_PB[block].tobytes(),
            salt=self._salt_of[block],
            tier=Tier.HOST if block >= self.first_host_block else Tier.DEVICE,
        )

    def _follow(self, chain: Chain, blocks: np.ndarray, token_ids_T: np.ndarray) -> None:
        """Extend the chain by blocks that another slot, which shares them, has entered. They are not hashed again;
        otherwise each of a hundred forks would hash a long prompt."""
        is_entered = self.holds(blocks)
        num_entered = len(blocks) if is_entered.all() else int(np.argmin(is_entered))
        parent = chain.entries[-1] if chain.entries else _ROOT_ENTRY
        known = self._proven(blocks[:num_entered], token_ids_T, chain.salt, parent)
        chain.digests += [self.digest_of[block] or b"" for block in known.tolist()]
        chain.entries += self.entry_P[known].tolist()

    def _proven(self, blocks: np.ndarray, token_ids_T: np.ndarray, salt: str, parent: int) -> np.ndarray:
        """The candidates before the first whose tokens or parent differ; none if the first one's salt differs. parent:
        entry before the first."""
        if not len(blocks) or self._salt_of[blocks[0]] != salt:
            return _NO_BLOCKS
        wanted = token_ids_T[: len(blocks) * self._block_size].reshape(-1, self._block_size)
        parents = np.concatenate([[parent], self.entry_P[blocks[:-1]]])
        is_equal = (self._tokens_PB[blocks] == wanted).all(axis=1) & (self.parent_entry_P[blocks] == parents)
        return blocks if is_equal.all() else blocks[: int(np.argmin(is_equal))]

    def _forget_unreachable(self, chain: Chain) -> None:
        """If the chain's last entry has left the index, cut the chain at the first that has; the slot's own blocks are
        entered instead."""
        if chain.digests and not self._is_alive(chain, len(chain) - 1):
            chain.truncate(next(i for i in range(len(chain)) if not self._is_alive(chain, i)))

    def _is_alive(self, chain: Chain, i: int) -> bool:
        block = self.block_of.get(chain.digests[i])
        return block is not None and int(self.entry_P[block]) == chain.entries[i]

    def _equal_block(self, digest: bytes, chain: Chain, token_bytes: bytes) -> int | None:
        """The indexed block with exactly this content after exactly this chain."""
        block = self.block_of.get(digest)
        if block is None or self._salt_of[block] != chain.salt:
            return None
        parent = chain.entries[-1] if chain.entries else _ROOT_ENTRY
        is_equal = self.parent_entry_P[block] == parent and self._tokens_PB[block].tobytes() == token_bytes
        return block if is_equal else None

    def _make_way(self, digest: bytes, block: int) -> list[int]:
        """Remove the entries that are in the way of an insertion. Returns other blocks that have left the index."""
        other = self.block_of.get(digest)
        if self.digest_of[block] is not None:
            self.remove(np.array([block], np.int32))
        if other is None or other == block:
            return []
        self.remove(np.array([other], np.int32))
        return [other]

    def _enter(self, block: int, digest: bytes, chain: Chain, token_bytes: bytes) -> int:
        """Enter a block. Returns its entry number; `_prove_entered` must store what proves it."""
        parent = chain.digests[-1] if chain.digests else b""
        self._last_entry += 1
        self._entered.append((block, chain.entries[-1] if chain.entries else _ROOT_ENTRY, token_bytes))
        self.block_of[digest] = block
        self.digest_of[block] = digest
        if digest in self._watched:
            self.has_watched_entered = True
        self._parent_of[block] = parent
        self._salt_of[block] = chain.salt
        tier = Tier.HOST if block >= self.first_host_block else Tier.DEVICE
        self.events.stored(
            BlockEvent(
                kind=EventKind.STORED,
                block_hash=digest,
                parent_hash=parent,
                token_ids=token_bytes,
                salt=chain.salt,
                tier=tier,
            )
        )
        return self._last_entry

    def _prove_entered(self) -> None:
        """Store what proves hits on the blocks entered since the last call. All at once, since accessing a single array
        element costs as much as hashing the block."""
        if not self._entered:
            return
        blocks_N, parents_N, tokens_N = zip(*self._entered, strict=True)
        at_N = np.array(blocks_N)
        self.entry_P[at_N] = np.arange(self._last_entry - len(at_N), self._last_entry) + 1
        self.parent_entry_P[at_N] = parents_N
        self._tokens_PB[at_N] = np.frombuffer(b"".join(tokens_N), np.int32).reshape(-1, self._block_size)
        self._entered.clear()
