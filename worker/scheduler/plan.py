"""What one engine step does: the plan that the scheduler makes, the result that the runner returns, and the outputs
that are sent to each gateway.

Plain data between the pure scheduler and whatever executes it. Rows are **slots**: stable small integers, one per
request that holds blocks, and also the row of its block table. A plan is self-contained: a runner that applies every
plan in order (`StepPlan`) needs nothing else, in particular not the block manager.

    tokens of a request   |--- computed (in the KV cache) ---|--- chunk of this step ---|--- not yet ---|
    positions             0                               start                start + num_tokens
"""

from dataclasses import dataclass, field
from typing import NamedTuple, NewType

import numpy as np

from octavo.wire.messages import Finished, Pooling, SamplingParams, TokenLogprobs

Slot = NewType("Slot", int)
GatewayIndex = NewType("GatewayIndex", int)
"""One run of one gateway process. After the gateway is lost, its index may be reused for a new one."""


class RequestKey(NamedTuple):
    """Identifies one output: the gateway that asked for it, and the gateway's own handle for it."""

    gateway: GatewayIndex
    handle: int


def _no_rows(width: int) -> np.ndarray:
    return np.empty((0, width), np.int32)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class NewRequest:
    """A request enters a slot, for the first time or after a preemption. The runner forgets what the slot held before.

    token_ids_T: int32, the prompt, followed by tokens generated earlier (before a preemption, or by another worker).
    num_prompt_tokens: where the output starts in token_ids_T.
    pooling: how to pool the embedding, which is in the result of its last chunk's step; None: no embedding.
    """

    slot: Slot
    request_id: str
    token_ids_T: np.ndarray
    num_prompt_tokens: int
    sampling: SamplingParams
    pooling: Pooling | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Chunk:
    """Prompt (or recomputed) tokens of one request, positions [start, start + num_tokens).

    is_last: the chunk ends at the last known token, so a token is sampled after it.
    forks: slots of further outputs of the same prompt, which join in this plan. For each, a token is sampled with its
        own parameters from the logits after this last chunk; its block table has the same blocks.
    """

    slot: Slot
    start: int
    num_tokens: int
    is_last: bool
    forks: tuple[Slot, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class StepPlan:
    """One step. Order of execution: copies_out, new_requests, block_updates, block_copies, then all tokens in one
    forward pass, then copies_in. A plan may consist of copies alone.

    copies_out_C2: int32 rows (device block, host block): copied before anything of this plan writes to the device.
    copies_in_C2: int32 rows (host block, device block): copied before anything of the next plan; nothing in this plan
        reads or writes these device blocks.
    block_updates_U3: int32 rows (slot, column of the slot's table row, block id), in order.
    block_copies_C2: int32 rows (source block, destination block): copy-on-write, before any write of this step.
    prefill: chunks.
    decode_slots_S / decode_positions_S: int32; the slot's last token goes through the model at that position. The
        runner has this token: the previous step sampled it, or is still sampling it.
    A token is sampled for every slot in ``sampled_slots``, in that order.
    """

    step: int
    new_requests: tuple[NewRequest, ...] = ()
    block_updates_U3: np.ndarray = field(default_factory=lambda: _no_rows(3))
    block_copies_C2: np.ndarray = field(default_factory=lambda: _no_rows(2))
    copies_out_C2: np.ndarray = field(default_factory=lambda: _no_rows(2))
    copies_in_C2: np.ndarray = field(default_factory=lambda: _no_rows(2))
    prefill: tuple[Chunk, ...] = ()
    decode_slots_S: np.ndarray = field(default_factory=lambda: np.empty(0, np.int32))
    decode_positions_S: np.ndarray = field(default_factory=lambda: np.empty(0, np.int32))

    @property
    def num_tokens(self) -> int:
        """Tokens that go through the model."""
        return len(self.decode_slots_S) + sum(chunk.num_tokens for chunk in self.prefill)

    @property
    def sampled_slots(self) -> np.ndarray:
        """int32: decode slots first, then the slots of last chunks, each followed by its forks. Read-only."""
        if not self.prefill:
            return self.decode_slots_S
        ends = [slot for chunk in self.prefill if chunk.is_last for slot in (chunk.slot, *chunk.forks)]
        return np.concatenate([self.decode_slots_S, np.asarray(ends, np.int32)])


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class SlotLogprobs:
    """Natural log-probabilities of one sampled row, or of one prompt position, whose request asked for them."""

    logprob: float
    top_ids: tuple[int, ...]
    top_logprobs: tuple[float, ...]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class StepResult:
    """The result of a step, aligned with ``plan.sampled_slots``.

    tokens_S: int32. is_finite_S: bool; False if the logits had NaN or no finite entry: the token is meaningless.
    logprobs: by index into tokens_S, for rows whose sampling asks for them.
    embeddings: by index into tokens_S, for rows that joined with a pooling; float32 [hidden size]. Their tokens are
        meaningless.
    is_exhausted_S: bool; True if the row's masks forbid every token: its output ends without one. None: no such row.
    prompt_logprobs: by index into plan.prefill, of the prompt's tokens from position start + 1 on, for rows whose
        sampling asks for them.
    num_copied_blocks, copy_s: blocks copied between the tiers, by this step or earlier ones, and the seconds that took;
        only copies measured since the previous result.
    """

    step: int
    tokens_S: np.ndarray
    is_finite_S: np.ndarray
    logprobs: dict[int, SlotLogprobs] = field(default_factory=dict)
    embeddings: dict[int, np.ndarray] = field(default_factory=dict)
    is_exhausted_S: np.ndarray | None = None
    prompt_logprobs: dict[int, list[SlotLogprobs]] = field(default_factory=dict)
    num_copied_blocks: int = 0
    copy_s: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class StepMasks:
    """The masks of a step whose rows have grammars.

    index_N: int64 positions in ``plan.sampled_slots``, ascending. bits_NW: int32 [N, ceil(vocabulary / 32)]; a token is
    allowed if its bit is set, the lowest bit of a word first.
    """

    index_N: np.ndarray
    bits_NW: np.ndarray


class MaskedSlots:
    """Which slots have a grammar, so that their rows wait for a mask. Known from new requests alone. R slots."""

    def __init__(self, *, max_slots: int) -> None:
        self._is_masked_R = np.zeros(max_slots, np.bool_)
        self._num_joined = 0

    def join(self, new: NewRequest) -> None:
        """A request enters the slot."""
        has_grammar = new.sampling.grammar is not None
        self._num_joined += has_grammar
        self._is_masked_R[new.slot] = has_grammar

    def index_of(self, plan: StepPlan) -> np.ndarray:
        """int64: positions in ``plan.sampled_slots`` of rows that need a mask."""
        if not self._num_joined:  # the usual case is free
            return np.empty(0, np.int64)
        return np.flatnonzero(self._is_masked_R[plan.sampled_slots])


_NO_HANDLES = np.empty(0, np.int64)
_NO_TOKENS = np.empty(0, np.int32)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class GatewayOutput:
    """One gateway's part of a step's result; N new tokens. handles_N int64 and tokens_N int32 are aligned;
    ``finished`` applies after them.

    started: handles scheduled for the first time. logprobs: by handle, one per token of that handle. embeddings: by
    handle, float32 [hidden size]. prompt_logprobs: by handle, continuing after those sent before.
    """

    handles_N: np.ndarray = field(default_factory=lambda: _NO_HANDLES)
    tokens_N: np.ndarray = field(default_factory=lambda: _NO_TOKENS)
    logprobs: dict[int, list[TokenLogprobs]] = field(default_factory=dict)
    started: tuple[int, ...] = ()
    finished: tuple[Finished, ...] = ()
    embeddings: dict[int, np.ndarray] = field(default_factory=dict)
    prompt_logprobs: dict[int, list[TokenLogprobs]] = field(default_factory=dict)


StepOutputs = dict[GatewayIndex, GatewayOutput]
"""By gateway; only gateways with news."""


class OutputBuffer:
    """Collects news until they are taken."""

    def __init__(self) -> None:
        self._tokens: dict[GatewayIndex, tuple[np.ndarray, np.ndarray]] = {}
        self._logprobs: dict[GatewayIndex, dict[int, list[TokenLogprobs]]] = {}
        self._started: dict[GatewayIndex, list[int]] = {}
        self._finished: dict[GatewayIndex, list[Finished]] = {}
        self._embeddings: dict[GatewayIndex, dict[int, np.ndarray]] = {}
        self._prompt_logprobs: dict[GatewayIndex, dict[int, list[TokenLogprobs]]] = {}

    def put_tokens(self, gateways_N: np.ndarray, handles_N: np.ndarray, tokens_N: np.ndarray) -> None:
        """The new tokens of one step; at most once before each ``take``."""
        if not len(gateways_N):
            return
        if (gateways_N == gateways_N[0]).all():
            self._tokens[GatewayIndex(int(gateways_N[0]))] = (handles_N, tokens_N)
            return
        order_N = gateways_N.argsort(kind="stable")
        gateways_N, handles_N, tokens_N = gateways_N[order_N], handles_N[order_N], tokens_N[order_N]
        ends = [*(gateways_N[1:] != gateways_N[:-1]).nonzero()[0].tolist(), len(order_N) - 1]
        start = 0
        for end, gateway in zip(ends, gateways_N[ends].tolist(), strict=True):
            self._tokens[GatewayIndex(gateway)] = (handles_N[start : end + 1], tokens_N[start : end + 1])
            start = end + 1

    def put_logprobs(self, key: RequestKey, logprobs: TokenLogprobs) -> None:
        """Log-probabilities of one of the tokens put in this step."""
        self._logprobs.setdefault(key.gateway, {}).setdefault(key.handle, []).append(logprobs)

    def put_prompt_logprobs(self, key: RequestKey, logprobs: list[TokenLogprobs]) -> None:
        """Log-probabilities of the next positions of the prompt."""
        self._prompt_logprobs.setdefault(key.gateway, {}).setdefault(key.handle, []).extend(logprobs)

    def put_embedding(self, key: RequestKey, embedding_D: np.ndarray) -> None:
        """The embedding, float32, of a request that ends in this step."""
        self._embeddings.setdefault(key.gateway, {})[key.handle] = embedding_D

    def put_started(self, key: RequestKey) -> None:
        """An output was scheduled for the first time."""
        self._started.setdefault(key.gateway, []).append(key.handle)

    def put_finished(self, gateway: GatewayIndex, finished: Finished) -> None:
        """An output ended."""
        self._finished.setdefault(gateway, []).append(finished)

    def forget(self, gateway: GatewayIndex) -> None:
        """Drop the news of a gateway that is lost."""
        for news in (
            self._tokens, self._logprobs, self._started, self._finished, self._embeddings, self._prompt_logprobs,
        ):  # fmt: skip
            news.pop(gateway, None)

    def take(self) -> StepOutputs:
        """All news since the last call."""
        gateways = {*self._tokens, *self._started, *self._finished, *self._prompt_logprobs}
        if not gateways:
            return {}
        outputs = {gateway: self._of(gateway) for gateway in sorted(gateways)}
        self._tokens, self._logprobs, self._started, self._finished = {}, {}, {}, {}
        self._embeddings, self._prompt_logprobs = {}, {}
        return outputs

    def _of(self, gateway: GatewayIndex) -> GatewayOutput:
        handles_N, tokens_N = self._tokens.get(gateway, (_NO_HANDLES, _NO_TOKENS))
        return GatewayOutput(
            handles_N=handles_N,
            tokens_N=tokens_N,
            logprobs=self._logprobs.get(gateway, {}),
            started=tuple(self._started.get(gateway, ())),
            finished=tuple(self._finished.get(gateway, ())),
            embeddings=self._embeddings.get(gateway, {}),
            prompt_logprobs=self._prompt_logprobs.get(gateway, {}),
        )
