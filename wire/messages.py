"""The messages between gateway and worker, grouped by receiver (between gateways: `wire.peer_messages`).

Plain msgspec structs: no sockets, no text of prompts, and no behaviour but what both sides must share. Arrays
travel as little-endian bytes (``int32`` for tokens, ``int64`` for handles), so that numpy reads them without a copy.

A **handle** names one output stream: an integer that the gateway chooses, never reused by that
gateway process. Every message of a worker carries its **epoch**, drawn anew at each start of the process: messages
of an epoch that the gateway has given up are dropped and counted.
"""

from enum import IntEnum
from typing import Annotated

import msgspec

Count = Annotated[int, msgspec.Meta(ge=0, le=2**31 - 1)]
Total = Annotated[int, msgspec.Meta(ge=0, le=2**63 - 1)]  # since the start of a process


class WireFinishReason(IntEnum):
    """Why the worker ended an output."""

    STOP = 1  # end token or stop token: Finished.stop_token_id
    LENGTH = 2  # max_tokens, the end of the context, or the end of the pool while alone
    CANCELLED = 3  # a Cancel arrived
    DEADLINE = 4  # Run.timeout_s passed
    ERROR = 5  # Finished.error has which


class OutputPhase(IntEnum):
    """What an output is doing at its worker."""

    QUEUED = 1
    PREFILL = 2
    DECODE = 3
    PAUSED = 4


class KvEventKind(IntEnum):
    """What happened to a block of the prefix cache."""

    STORED = 1
    REMOVED = 2
    CLEARED = 3  # every block


class KvTier(IntEnum):
    """Which of the worker's memories a block is in."""

    DEVICE = 1
    HOST = 2


class Message(msgspec.Struct, frozen=True, kw_only=True, tag=True, omit_defaults=True, forbid_unknown_fields=True):
    """Base of all messages; the tag is the class name."""


# ---------------------------------------------------------------- both ways, inside others


class GrammarKind(IntEnum):
    """How a Grammar's source is written."""

    JSON_SCHEMA = 1
    JSON_OBJECT = 2  # no source
    REGEX = 3
    EBNF = 4
    CHOICE = 5  # source: a JSON array of strings
    TOOL_CALLS = 6  # source: JSON, made by the gateway from the tools of a chat


class Grammar(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, forbid_unknown_fields=True):
    """What an output must match."""

    kind: GrammarKind
    source: str = ""
    format_as_annotation: bool = False  # for JSON schemas and tools: ignore unknown formats


class Pooling(IntEnum):
    """How the last hidden states become an embedding."""

    LAST_TOKEN = 1
    MEAN = 2


class SamplingParams(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, forbid_unknown_fields=True):
    """How one output's tokens are chosen, and which tokens end it. Checked by the gateway, and complete: no defaults of
    the model are left to fill in. Numbers that the sampler reads: `model.sampling.params.COLUMNS`.

    seed: the same seed gives the same tokens, whatever else is in the batch. repetition_penalty: over prompt and
    output; presence and frequency over the output only. min_tokens: until that many are out, neither end tokens nor
    stop_token_ids are sampled.
    """

    temperature: float = 1.0  # 0 is greedy
    top_k: int = 0  # 0 keeps all
    top_p: float = 1.0
    min_p: float = 0.0
    seed: int = 0  # uint64; always set by the gateway
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    max_tokens: int = 1
    min_tokens: int = 0
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    num_logprobs: int | None = None  # None: none; 0: the chosen token's only
    num_prompt_logprobs: int | None = None  # the same for the prompt's tokens
    typical_p: float = 1.0
    top_n_sigma: float = 0.0  # 0 keeps all
    logit_bias: dict[int, float] = {}
    allowed_token_ids: tuple[int, ...] = ()  # empty: all
    bad_words: tuple[tuple[int, ...], ...] = ()  # token sequences that never appear
    grammar: Grammar | None = None


def seed_of_output(seed: int, index: int) -> int:
    """uint64: the seed of output number ``index`` of a request with this seed."""
    return (seed + index) % (1 << 64)


def sampling_of_output(sampling: SamplingParams, index: int) -> SamplingParams:
    """The parameters of output number ``index``, at least 1: it has its own seed, and only output 0 has the prompt's
    log-probabilities."""
    seed = seed_of_output(sampling.seed, index)
    return msgspec.structs.replace(sampling, seed=seed, num_prompt_logprobs=None)


class ModelCard(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, forbid_unknown_fields=True):
    """What a gateway must know of a worker's model. Defaults are left out: an older gateway takes a card that says
    nothing new."""

    name: str
    fingerprint: str
    architecture: str
    dtype: str
    max_model_len: int
    vocab_size: int  # ids that may be sampled or sent: the tokenizer's, not the embedding's rows
    eos_token_ids: tuple[int, ...]
    default_sampling: dict[str, float]  # from generation_config.json, by SamplingParams' names
    tokenizer_digest: str  # SHA-256 hex over the bundle's files, in name order
    tensor_parallel_size: int = 1  # ranks that have a part of the model each
    kv_cache_dtype: str = "auto"  # "fp8"; auto: the dtype above


class Capacity(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What a worker can hold."""

    num_blocks: int  # blocks that requests can use
    block_size: int
    max_num_seqs: int  # requests running at once
    max_waiting: int  # requests queued besides
    max_batch_tokens: int  # token budget of one step


class TokenLogprobs(msgspec.Struct, frozen=True, array_like=True):
    """Log-probabilities at one position."""

    logprob: float  # of the chosen token
    top_ids: tuple[int, ...]
    top_logprobs: tuple[float, ...]


class Finished(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The end of one output. Durations are the worker's own monotonic differences, in seconds."""

    handle: int
    reason: WireFinishReason
    stop_token_id: int | None = None
    error: str = ""  # name of octavo.v1.ErrorReason without its prefix, where reason is ERROR
    detail: str = ""  # for the caller: what, with which numbers
    prompt_tokens: int = 0
    completion_tokens: int = 0
    cached_tokens: int = 0
    computed_tokens: int = 0
    preemptions: int = 0
    swaps: int = 0  # those of them where the blocks were copied to host memory and back
    queue_s: float = 0.0
    prefill_s: float = 0.0
    decode_s: float = 0.0
    inter_token_p50_s: float = 0.0
    inter_token_p99_s: float = 0.0
    block_seconds: float = 0.0
    preempted: tuple[tuple[float, float], ...] = ()  # (from, to) since arrival; only if its Run is traced, at most 64


class KvEvent(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, gc=False):
    """A change of the prefix cache. STORED carries the block's tokens, so that routers can match prompts without
    knowing how the worker hashes. STORED for a known block means that it is on another tier now."""

    kind: KvEventKind
    block_hash: bytes = b""
    parent_hash: bytes = b""  # empty for a first block
    token_ids: bytes = b""  # int32, block_size of them
    salt: str = ""
    tier: KvTier = KvTier.DEVICE  # of STORED


# ---------------------------------------------------------------- worker -> gateway


class Register(Message, frozen=True, kw_only=True):
    """First message of a worker to each gateway, repeated until a Welcome arrives."""

    worker_id: str
    epoch: str  # random hex, new at each start
    card: ModelCard
    capacity: Capacity
    pid: int
    pid_namespace: str  # readlink /proc/self/ns/pid plus boot id: equal strings mean that pids can be compared
    token: str = ""  # registration token, where the gateway asks for one


class TokenizerBundle(Message, frozen=True, kw_only=True):
    """Answer to NeedTokenizer: file name -> bytes (tokenizer.json, tokenizer_config.json, chat_template.jinja …)."""

    epoch: str
    digest: str
    files: dict[str, bytes]


class Heartbeat(Message, frozen=True, kw_only=True):
    """Sent every heartbeat interval by a thread of its own. It shows whether steps advance, not just that the process
    exists."""

    epoch: str
    num_steps: Total
    has_work: bool
    num_running: Count = 0
    num_waiting: Count = 0
    num_free_blocks: Count = 0
    num_cached_blocks: Count = 0
    is_draining: bool = False
    num_paused: Count = 0  # in no step: paused by their gateways, or waiting for grammars
    num_prefill_tokens: Total = 0  # since the start, as all below
    num_generated_tokens: Total = 0
    num_preemptions: Total = 0
    num_queried_tokens: Total = 0  # of prompts that got blocks
    num_hit_tokens: Total = 0  # of them, found in the prefix cache


class StepOutput(Message, frozen=True, kw_only=True):
    """What one engine step produced for one gateway."""

    epoch: str
    seq: int  # 1, 2, 3 … per gateway and epoch: a gap means a lost message
    step: int
    handles: bytes = b""  # int64[N], one per new token
    tokens: bytes = b""  # int32[N]
    logprobs: dict[int, list[TokenLogprobs]] = {}  # by handle, one per token, for requests that asked
    started: tuple[int, ...] = ()  # handles scheduled for the first time
    finished: tuple[Finished, ...] = ()  # after the tokens above
    prompt_logprobs: dict[int, list[TokenLogprobs]] = {}  # by handle, from the second token of the prompt on
    embeddings: dict[int, bytes] = {}  # by handle: float32[hidden size]


class KvEvents(Message, frozen=True, kw_only=True):
    """Changes of the prefix cache, in order."""

    epoch: str
    events: tuple[KvEvent, ...]


class HostBlocks(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, forbid_unknown_fields=True):
    """A worker's second tier. Blocks not counted here are being copied between the tiers."""

    num_blocks: int
    num_free: int = 0
    num_cached: int = 0
    num_swapped: int = 0
    blocks_per_cell: int = 0
    cells: bytes = b""  # uint8, one of octavo.v1.HostBlockState each, in order of the blocks' ids


class AdminReply(Message, frozen=True, kw_only=True):
    """Answer to an AdminQuery. Arrays are empty unless asked for."""

    epoch: str
    query_id: int
    num_blocks: Count = 0
    num_free_blocks: Count = 0
    num_cached_blocks: Count = 0
    num_active_blocks: Count = 0
    num_flushed_blocks: Count = 0
    violations: tuple[str, ...] = ()
    blocks_per_cell: Count = 0
    cells: bytes = b""  # uint8, one of octavo.v1.BlockState each, in order of the blocks' ids
    num_shared_blocks: Count = 0
    host: HostBlocks | None = None  # where cells were asked for and there is a second tier
    handles: bytes = b""  # int64[N]: unfinished outputs of the gateway that asks, the oldest first
    phases: bytes = b""  # uint8[N]: OutputPhase
    held_blocks: bytes = b""  # int32[N]


class Leaving(Message, frozen=True, kw_only=True):
    """The worker exits now (drained or stopped); everything it still held is lost."""

    epoch: str
    reason: str = ""


# ---------------------------------------------------------------- gateway -> worker


class Welcome(Message, frozen=True, kw_only=True):
    """The registration is accepted."""

    gateway_id: str  # new at each start of the gateway: a changed one cancels what the former had asked for
    epoch: str


class Refused(Message, frozen=True, kw_only=True):
    """The registration is refused for good; the worker exits with this reason."""

    epoch: str
    reason: str


class NeedTokenizer(Message, frozen=True, kw_only=True):
    """The gateway does not have the bundle of this digest yet."""

    epoch: str
    digest: str


class Run(Message, frozen=True, kw_only=True):
    """Generate one output, or several from one prompt, or turn the prompt into a vector.

    fork_handles: of outputs 1 and up, which draw with seed + 1 and up and share the prompt's blocks.
    pooling: set: nothing is sampled, the prompt's embedding is sent; sampling is then meaningless.
    num_resumed_tokens: this many last prompt_ids were generated by a worker that was lost; they count as output.
    tenant: an opaque label; requests with the same one share one place in the worker's fair queue.
    weight: of that tenant's share, 1 to 1000.
    traceparent: of the span that the request belongs to (W3C Trace Context); empty without traces.
    """

    handle: int
    request_id: str
    prompt_ids: bytes  # int32
    sampling: SamplingParams
    priority: int = 0
    cache_salt: str = ""
    timeout_s: float | None = None  # remaining at the time of sending
    fork_handles: tuple[int, ...] = ()
    pooling: Pooling | None = None
    num_resumed_tokens: int = 0
    tenant: str = ""
    weight: int = 1
    traceparent: str = ""


class Cancel(Message, frozen=True, kw_only=True):
    """End an output; its Finished(CANCELLED) follows. Unknown and finished handles are ignored."""

    handles: tuple[int, ...]


class Pause(Message, frozen=True, kw_only=True):
    """Leave these outputs out of steps: their readers are behind. Tokens of steps in flight still come. Unknown,
    finished and paused handles are ignored."""

    handles: tuple[int, ...]


class Resume(Message, frozen=True, kw_only=True):
    """Continue these outputs. Unknown, finished and running handles are ignored."""

    handles: tuple[int, ...]


class AdminQuery(Message, frozen=True, kw_only=True):
    """Ask for block counts, and optionally an audit, a flush of the prefix cache, a map of the blocks, or the gateway's
    own outputs."""

    query_id: int
    audit: bool = False
    flush_prefix_cache: bool = False
    max_cells: int = 0  # of the map; 0: none
    max_outputs: int = 0  # 0: none


class Drain(Message, frozen=True, kw_only=True):
    """Take no new requests, finish the running ones, then leave."""

    grace_s: float


class GatewayLeaving(Message, frozen=True, kw_only=True):
    """The gateway ends soon, in order: the end of the connection is no loss then. Workers of older versions drop it."""


ToGateway = Register | TokenizerBundle | Heartbeat | StepOutput | KvEvents | AdminReply | Leaving
ToWorker = Welcome | Refused | NeedTokenizer | Run | Cancel | Pause | Resume | AdminQuery | Drain | GatewayLeaving
