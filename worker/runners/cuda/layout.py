"""How the inputs of a mixed step lie in one upload, and for which shapes steps are recorded.

A recorded step has a fixed shape: decode rows are filled up with scratch, chunk tokens with tokens of no row, tiles
with empty ones, sampled rows with scratch. A step that fits no recorded shape has a layout of exactly its own size.

    tokens    |-- decode rows --|-- scratch --|--- chunk ---|--- chunk ---|-- of no row --|
    sampled   |-- decode rows --|-- scratch --|-- ended --|-- scratch --|

Legend: T tokens · B decode rows · S sampled rows · E ends of chunks · W tiles.
"""

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch

from octavo.model.gpu.mixed_step import MixedInputs
from octavo.model.kernels.attention.prefill import QUERY_TILE, list_tiles
from octavo.worker.scheduler.plan import StepPlan

_ALIGNMENT_WORDS = 4
DECODE_SIZES = (0, 8, 32, 64, 128, 256, 512, 1024)
TOKEN_SIZES = (16, 32, 64, 128, 256, 384, 512, 768, 1024, 1536, 2048, 3072, 4096, 6144, 8192)
MAX_RECORDED_CHUNKS = 32


@dataclass(frozen=True, kw_only=True)
class MixedLayout:
    """A shape. num_decodes: B. num_ends: sampled rows beyond the decodes."""

    num_decodes: int
    num_chunk_tokens: int
    num_tiles: int
    num_ends: int

    @classmethod
    def exact(cls, plan: StepPlan) -> "MixedLayout":
        """No padding."""
        return cls(
            num_decodes=len(plan.decode_slots_S),
            num_chunk_tokens=sum(chunk.num_tokens for chunk in plan.prefill),
            num_tiles=sum(-(-chunk.num_tokens // QUERY_TILE) for chunk in plan.prefill),
            num_ends=sum(1 + len(chunk.forks) for chunk in plan.prefill if chunk.is_last),
        )

    @property
    def num_tokens(self) -> int:
        """T, padding included."""
        return self.num_decodes + self.num_chunk_tokens

    @cached_property
    def sections(self) -> dict[str, slice]:
        """Where each field of MixedInputs lies in the payload, in words."""
        num_sampled = self.num_decodes + self.num_ends
        counts = {
            "ids_T": self.num_tokens, "row_T": self.num_tokens, "position_T": self.num_tokens,
            "tiles_W4": 4 * self.num_tiles, "last_S": num_sampled, "rows_S": num_sampled,
            "ended_E": self.num_ends, "position_E": self.num_ends,
        }  # fmt: skip
        sections, end = {}, 0
        for name, count in counts.items():
            sections[name] = slice(end, end + count)
            end += -(-count // _ALIGNMENT_WORDS) * _ALIGNMENT_WORDS
        return sections

    @cached_property
    def num_words(self) -> int:
        """Of the whole payload."""
        return self.sections["position_E"].stop

    def inputs(self, payload_U: torch.Tensor) -> MixedInputs:
        """Views of the payload on the device."""
        views = {name: payload_U[section] for name, section in self.sections.items()}
        views["tiles_W4"] = views["tiles_W4"].view(-1, 4)
        return MixedInputs(num_decodes=self.num_decodes, **views)

    def fill(self, words_U: np.ndarray, plan: StepPlan, tokens_R: Sequence[np.ndarray], *, scratch_row: int) -> None:
        """Write the plan, at most this large, into the payload. tokens_R: known tokens of each slot."""
        words_U[:] = 0
        part = {name: words_U[section] for name, section in self.sections.items()}
        num_decodes = len(plan.decode_slots_S)
        part["ids_T"][: self.num_decodes] = -1
        part["row_T"][:num_decodes] = plan.decode_slots_S
        part["row_T"][num_decodes : self.num_decodes] = scratch_row
        part["row_T"][self.num_decodes :] = -1
        part["last_S"][:num_decodes] = np.arange(num_decodes)
        part["rows_S"][:] = scratch_row
        part["rows_S"][:num_decodes] = plan.decode_slots_S
        part["ended_E"][:] = scratch_row
        self._fill_chunks(part, plan, tokens_R)

    def _fill_chunks(self, part: dict[str, np.ndarray], plan: StepPlan, tokens_R: Sequence[np.ndarray]) -> None:
        token, num_ended, placed = self.num_decodes, 0, []
        for chunk in plan.prefill:
            start, stop, end = chunk.start, chunk.start + chunk.num_tokens, token + chunk.num_tokens
            part["ids_T"][token:end] = tokens_R[chunk.slot][start:stop]
            part["row_T"][token:end] = chunk.slot
            part["position_T"][token:end] = np.arange(start, stop)
            placed.append((chunk.slot, token, start, chunk.num_tokens))
            for slot in (chunk.slot, *chunk.forks) if chunk.is_last else ():
                part["last_S"][self.num_decodes + num_ended] = end - 1
                part["rows_S"][self.num_decodes + num_ended] = slot
                part["ended_E"][num_ended] = slot
                part["position_E"][num_ended] = stop - 1
                num_ended += 1
            token = end
        tiles_W4 = list_tiles(placed)
        part["tiles_W4"][: tiles_W4.size] = tiles_W4.ravel()


@dataclass(frozen=True, slots=True, kw_only=True)
class MixedShapes:
    """The shapes that are recorded for a runner: every pair of these sizes."""

    decode_sizes: tuple[int, ...]
    token_sizes: tuple[int, ...]

    @classmethod
    def of(cls, *, max_slots: int, max_batch_tokens: int) -> "MixedShapes":
        """Up to all slots; up to the largest token size, beyond which launching is faster than computing."""
        decode_sizes = (*(size for size in DECODE_SIZES if size < max_slots), max_slots)
        largest = min(max_batch_tokens, TOKEN_SIZES[-1])
        token_sizes = (*(size for size in TOKEN_SIZES if size < largest), largest)
        return cls(decode_sizes=decode_sizes, token_sizes=token_sizes)

    def layouts(self) -> list[MixedLayout]:
        """Largest first: what a recording needs, smaller ones find there."""
        sizes = [(tokens, decodes) for tokens in self.token_sizes for decodes in self.decode_sizes]
        return [_padded(decodes, tokens) for tokens, decodes in sorted(sizes, reverse=True)]

    def find(self, exact: MixedLayout, num_chunks: int) -> MixedLayout | None:
        """The smallest shape that a step of this layout and so many chunks fits into; None where there is none. Forks
        of a prompt end with it: they may be more than the chunks."""
        num_chunks = max(num_chunks, exact.num_ends)
        if exact.num_chunk_tokens > self.token_sizes[-1] or exact.num_decodes > self.decode_sizes[-1]:
            return None
        decodes = self.decode_sizes[bisect_left(self.decode_sizes, exact.num_decodes)]
        for tokens in self.token_sizes[bisect_left(self.token_sizes, exact.num_chunk_tokens) :]:
            if num_chunks <= _num_chunks(tokens):
                return _padded(decodes, tokens)
        return None


def _num_chunks(num_tokens: int) -> int:
    """Chunks that a recorded step of so many chunk tokens has room for."""
    return min(MAX_RECORDED_CHUNKS, max(2, num_tokens // 16))


def _padded(num_decodes: int, num_tokens: int) -> MixedLayout:
    num_chunks = _num_chunks(num_tokens)
    return MixedLayout(
        num_decodes=num_decodes,
        num_chunk_tokens=num_tokens,
        num_tiles=num_tokens // QUERY_TILE + num_chunks,
        num_ends=num_chunks,
    )


def worst_layout(*, max_slots: int, max_batch_tokens: int) -> MixedLayout:
    """At least as large as any step, recorded or not, in every field."""
    return MixedLayout(
        num_decodes=max_slots,
        num_chunk_tokens=max_batch_tokens,
        num_tiles=max_batch_tokens // QUERY_TILE + max(max_slots, MAX_RECORDED_CHUNKS),
        num_ends=max(max_slots, MAX_RECORDED_CHUNKS),
    )
