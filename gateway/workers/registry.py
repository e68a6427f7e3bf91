"""Which workers there are: registrations, epochs, heartbeats, and when a worker is given up.

An epoch is one life of a worker's process, an incarnation one registration of it here. An epoch that was given up stays
given up: a worker that comes back under it is refused, so that a worker that was frozen and resumed can never write
into streams that have moved on. Pure: events and times in, decisions out. Must not know sockets, clocks, outputs or the
prefix index.
"""

import hmac
from collections import OrderedDict
from collections.abc import Iterator
from dataclasses import dataclass

from octavo.gateway.workers.decisions import Accept, Announce, AskTokenizer, Decision, Lose, Peer, Refuse, Watch
from octavo.gateway.workers.views import LostReason, WorkerState, WorkerView
from octavo.wire.bundle import BundleError, check_bundle
from octavo.wire.messages import Capacity, Heartbeat, ModelCard, Register, TokenizerBundle

GIVEN_UP = "this epoch was given up; start anew"
MAX_REMEMBERED = 4096  # epochs given up
MAX_WORKERS = 1024
MAX_BUNDLES = 16
MAX_NAME_LEN = 256


@dataclass(slots=True, kw_only=True)
class WorkerRecord:
    """One incarnation of a worker. Mutable; owned by the registry. Times are this process's monotonic seconds."""

    incarnation: int
    peer: Peer
    worker_id: str
    epoch: str
    card: ModelCard
    capacity: Capacity
    pid: int
    state: WorkerState
    last_heard_s: float
    last_progress_s: float
    in_flight: int = 0
    last_seq: int = 0
    num_steps: int = 0
    has_work: bool = False
    num_running: int = 0
    num_waiting: int = 0
    num_paused: int = 0
    num_free_blocks: int = 0
    num_cached_blocks: int = 0
    num_prefill_tokens: int = 0
    num_generated_tokens: int = 0
    num_preemptions: int = 0
    num_queried_tokens: int = 0
    num_hit_tokens: int = 0
    is_watched: bool = False  # its process is watched: silence is then a stall, not a death
    is_full: bool = False  # it refused an output for want of room, and has not reported room since

    @classmethod
    def of(
        cls, register: Register, *, incarnation: int, peer: Peer, state: WorkerState, now_s: float
    ) -> "WorkerRecord":
        """A new record."""
        return cls(
            incarnation=incarnation,
            peer=peer,
            worker_id=register.worker_id,
            epoch=register.epoch,
            card=register.card,
            capacity=register.capacity,
            pid=register.pid,
            state=state,
            last_heard_s=now_s,
            last_progress_s=now_s,
            num_free_blocks=register.capacity.num_blocks,
        )

    def take_heartbeat(self, beat: Heartbeat, now_s: float) -> None:
        """Note the heartbeat, and whether steps advance while there is work."""
        self.last_heard_s = now_s
        self.num_paused = beat.num_paused
        is_idle = not beat.has_work and not self.has_our_work
        if is_idle or beat.num_steps != self.num_steps:
            self.last_progress_s = now_s
        self.num_steps = beat.num_steps
        self.has_work = beat.has_work
        self.num_running = beat.num_running
        self.num_waiting = beat.num_waiting
        self.num_free_blocks = beat.num_free_blocks
        self.num_cached_blocks = beat.num_cached_blocks
        self.num_prefill_tokens = beat.num_prefill_tokens
        self.num_generated_tokens = beat.num_generated_tokens
        self.num_preemptions = beat.num_preemptions
        self.num_queried_tokens, self.num_hit_tokens = beat.num_queried_tokens, beat.num_hit_tokens
        self.is_full = self.is_full and self.num_requests >= self.max_requests

    def take_step(self, now_s: float) -> None:
        """A step's output arrived."""
        self.last_heard_s = now_s
        self.last_progress_s = now_s

    @property
    def has_our_work(self) -> bool:
        """Whether it has requests of this gateway that are not paused."""
        return self.in_flight > self.num_paused

    @property
    def num_requests(self) -> int:
        """Its requests: this gateway's, or all gateways' by its last heartbeat, whichever are more."""
        return max(self.in_flight, self.num_running + self.num_waiting + self.num_paused)

    @property
    def load(self) -> float:
        """Requests divided by the number that run at once; above 1, some are queued."""
        return self.num_requests / self.capacity.max_num_seqs

    @property
    def max_requests(self) -> int:
        """How many requests it takes, running and queued."""
        return self.capacity.max_num_seqs + self.capacity.max_waiting

    def view(self, now_s: float, *, cached_tokens: int = 0) -> WorkerView:
        """A frozen snapshot. cached_tokens: of the prompt for which it was chosen."""
        return WorkerView(
            worker_id=self.worker_id,
            epoch=self.epoch,
            state=self.state,
            card=self.card,
            capacity=self.capacity,
            in_flight=self.in_flight,
            num_steps=self.num_steps,
            num_running=self.num_running,
            num_waiting=self.num_waiting,
            num_free_blocks=self.num_free_blocks,
            num_cached_blocks=self.num_cached_blocks,
            heartbeat_age_s=max(0.0, now_s - self.last_heard_s),
            pid=self.pid,
            num_paused=self.num_paused,
            num_prefill_tokens=self.num_prefill_tokens,
            num_generated_tokens=self.num_generated_tokens,
            num_preemptions=self.num_preemptions,
            num_queried_tokens=self.num_queried_tokens,
            num_hit_tokens=self.num_hit_tokens,
            cached_tokens=cached_tokens,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class RegistryLimits:
    """Times in seconds."""

    heartbeat_timeout_s: float = 5.0
    stall_timeout_s: float = 30.0
    registration_token: str = ""


class Registry:
    """The workers of one gateway."""

    def __init__(self, limits: RegistryLimits) -> None:
        self._limits = limits
        self._by_incarnation: dict[int, WorkerRecord] = {}
        self._by_id: dict[str, WorkerRecord] = {}
        self._by_epoch: dict[str, WorkerRecord] = {}
        self._by_peer: dict[Peer, WorkerRecord] = {}
        self._given_up: OrderedDict[str, Peer | None] = OrderedDict()  # where its refusal goes if it sends again
        self._bundles: dict[str, dict[str, bytes]] = {}
        self._next_incarnation = 1
        self._last_tick_s: float | None = None

    def __iter__(self) -> Iterator[WorkerRecord]:
        return iter(tuple(self._by_incarnation.values()))

    def get(self, incarnation: int) -> WorkerRecord | None:
        """The record, while that incarnation is registered."""
        return self._by_incarnation.get(incarnation)

    def find(self, worker_id: str) -> WorkerRecord | None:
        """The current incarnation of a worker."""
        return self._by_id.get(worker_id)

    def sender(self, peer: Peer, epoch: str) -> WorkerRecord | None:
        """The worker that sent a message. None if its epoch is unknown or given up, or the connection is not its
        own."""
        record = self._by_peer.get(peer)
        return record if record is not None and record.epoch == epoch else None

    def bundle(self, digest: str) -> dict[str, bytes]:
        """Tokenizer files that have arrived. Raises KeyError."""
        return self._bundles[digest]

    # ------------------------------------------------------------ events

    def on_register(self, peer: Peer, register: Register, now_s: float) -> list[Decision]:
        """A worker registers, perhaps again."""
        refusal = self._refusal(register)
        if refusal is not None:
            kind, reason = refusal
            return [Refuse(peer=peer, epoch=register.epoch, kind=kind, reason=reason)]
        known = self._by_id.get(register.worker_id)
        if known is not None and known.epoch == register.epoch and known.peer == peer:
            return [Accept(peer=peer, epoch=register.epoch), *self._ask(known)]
        ended = self._replace(register)
        return [*ended, *self._admit(peer, register, now_s)]

    def on_bundle(self, peer: Peer, bundle: TokenizerBundle) -> list[Decision]:
        """Tokenizer files arrived: every worker that waited for them becomes ready. Raises BundleError."""
        record = self.sender(peer, bundle.epoch)
        if record is None or record.card.tokenizer_digest != bundle.digest:
            raise BundleError("this peer was not asked for that bundle")
        check_bundle(bundle.files, bundle.digest)
        self._remember_bundle(bundle)
        waiting = [
            other
            for other in self
            if other.state is WorkerState.REGISTERED and other.card.tokenizer_digest == bundle.digest
        ]
        for other in waiting:
            other.state = WorkerState.READY
        return [Announce(incarnation=other.incarnation, card=other.card) for other in waiting]

    def on_heartbeat(self, beat: Heartbeat, now_s: float) -> WorkerRecord | None:
        """The worker, found by its epoch alone, since heartbeats have their own connection. None: unknown epoch."""
        record = self._by_epoch.get(beat.epoch)
        if record is not None:
            record.take_heartbeat(beat, now_s)
        return record

    def on_stale_heartbeat(self, epoch: str) -> list[Decision]:
        """A worker that was given up is still running: refuse it, on the connection that it reads."""
        peer = self._given_up.get(epoch)
        if peer is None:
            return []
        return [Refuse(peer=peer, epoch=epoch, kind="given_up", reason=GIVEN_UP)]

    def on_sequence(self, record: WorkerRecord, seq: int) -> list[Decision]:
        """Check a StepOutput's number. A gap means lost tokens: the worker is given up."""
        expected = record.last_seq + 1
        if seq == expected:
            record.last_seq = seq
            return []
        return self.give_up(record, LostReason.WORKER_LOST, f"message {seq} came where {expected} was due")

    def on_exit(self, incarnation: int) -> list[Decision]:
        """The process of an incarnation ended."""
        record = self.get(incarnation)
        return [] if record is None else self.give_up(record, LostReason.WORKER_LOST, "its process ended")

    def on_leaving(self, record: WorkerRecord, reason: str) -> list[Decision]:
        """The worker is shutting down."""
        return self.give_up(record, LostReason.DRAINING, reason or "the worker is shutting down")

    def on_unreachable(self, record: WorkerRecord) -> list[Decision]:
        """The connection is gone, with everything under way on it. The worker may register again under the same epoch,
        because other gateways still use it."""
        return [self._remove(record, LostReason.WORKER_LOST, "its connection is closed")]

    def on_tick(self, now_s: float) -> list[Decision]:
        """Look for silence and for steps that do not advance."""
        was_frozen = self._was_frozen(now_s)
        self._last_tick_s = now_s
        decisions: list[Decision] = []
        for record in self:
            if was_frozen:
                # This process was frozen, not the workers: heartbeats may be waiting in our own queue.
                record.last_heard_s = record.last_progress_s = now_s
            decisions += self._check(record, now_s)
        return decisions

    def give_up(self, record: WorkerRecord, reason: LostReason, detail: str) -> list[Decision]:
        """Forget an incarnation for good; its epoch is never accepted again."""
        self._given_up[record.epoch] = None if reason is LostReason.DRAINING else record.peer
        while len(self._given_up) > MAX_REMEMBERED:
            self._given_up.popitem(last=False)
        return [self._remove(record, reason, detail)]

    def opened(self, record: WorkerRecord, now_s: float) -> None:
        """An output was sent to the worker. The stall clock starts with the first one."""
        if record.in_flight == 0:
            record.last_progress_s = now_s
        record.in_flight += 1

    # ------------------------------------------------------------ parts

    def _refusal(self, register: Register) -> tuple[str, str] | None:
        if not hmac.compare_digest(register.token.encode(), self._limits.registration_token.encode()):
            return "token", "the registration token is wrong"
        if register.epoch in self._given_up:
            return "given_up", GIVEN_UP
        problem = _problem(register)
        if problem is not None:
            return "invalid", problem
        known = self._by_id.get(register.worker_id)
        if known is not None and known.epoch != register.epoch and known.is_watched:
            return "duplicate_id", f"worker id {register.worker_id!r} is in use by the running process {known.pid}"
        holder = self._by_epoch.get(register.epoch)
        if holder is not None and holder.worker_id != register.worker_id:
            return "invalid", "this epoch belongs to another worker"
        if known is None and len(self._by_id) >= MAX_WORKERS:
            return "too_many", f"{MAX_WORKERS} workers are registered"
        return self._card_conflict(register)

    def _card_conflict(self, register: Register) -> tuple[str, str] | None:
        for other in self:
            if other.worker_id != register.worker_id and other.card.name == register.card.name:
                fields = _differences(other.card, register.card)
                if fields:
                    return "card", f"model {register.card.name!r} is served here with another {', '.join(fields)}"
        return None

    def _replace(self, register: Register) -> list[Decision]:
        ended: list[Decision] = []
        known = self._by_id.get(register.worker_id)
        if known is not None and known.epoch == register.epoch:
            # The same epoch over a new connection: what was under way on the old one is lost, the worker is not.
            ended.append(self._remove(known, LostReason.WORKER_LOST, "its connection broke and was made anew"))
        elif known is not None:
            ended += self.give_up(known, LostReason.WORKER_LOST, "it was restarted")
        return ended

    def _admit(self, peer: Peer, register: Register, now_s: float) -> list[Decision]:
        is_ready = register.card.tokenizer_digest in self._bundles
        state = WorkerState.READY if is_ready else WorkerState.REGISTERED
        former = self._by_peer.get(peer)
        ended = [] if former is None else self.give_up(former, LostReason.WORKER_LOST, "its connection was reused")
        record = WorkerRecord.of(register, incarnation=self._next_incarnation, peer=peer, state=state, now_s=now_s)
        self._next_incarnation += 1
        self._by_incarnation[record.incarnation] = record
        self._by_id[record.worker_id] = self._by_epoch[record.epoch] = self._by_peer[peer] = record
        decisions: list[Decision] = [
            *ended,
            Accept(peer=peer, epoch=record.epoch),
            Watch(incarnation=record.incarnation, pid=register.pid, pid_namespace=register.pid_namespace),
        ]
        ready: list[Decision] = [Announce(incarnation=record.incarnation, card=record.card)] if is_ready else []
        return [*decisions, *ready, *self._ask(record)]

    def _ask(self, record: WorkerRecord) -> list[Decision]:
        if record.state is not WorkerState.REGISTERED:
            return []
        return [AskTokenizer(peer=record.peer, epoch=record.epoch, digest=record.card.tokenizer_digest)]

    def _remember_bundle(self, bundle: TokenizerBundle) -> None:
        in_use = {record.card.tokenizer_digest for record in self}
        for digest in [digest for digest in self._bundles if digest not in in_use]:
            if len(self._bundles) >= MAX_BUNDLES:
                del self._bundles[digest]
        self._bundles[bundle.digest] = bundle.files

    def _check(self, record: WorkerRecord, now_s: float) -> list[Decision]:
        silent_s = now_s - record.last_heard_s
        if silent_s > self._limits.heartbeat_timeout_s:
            reason = LostReason.WORKER_STALLED if record.is_watched else LostReason.WORKER_LOST
            return self.give_up(record, reason, f"silent for {silent_s:.1f} s")
        still_s = now_s - record.last_progress_s
        if still_s > self._limits.stall_timeout_s and (record.has_work or record.has_our_work):
            return self.give_up(record, LostReason.WORKER_STALLED, f"no step for {still_s:.1f} s with work waiting")
        return []

    def _was_frozen(self, now_s: float) -> bool:
        return self._last_tick_s is not None and now_s - self._last_tick_s > self._limits.heartbeat_timeout_s / 2

    def _remove(self, record: WorkerRecord, reason: LostReason, detail: str) -> Lose:
        del self._by_incarnation[record.incarnation]
        for table, key in ((self._by_id, record.worker_id), (self._by_epoch, record.epoch)):
            if table.get(key) is record:
                del table[key]
        if self._by_peer.get(record.peer) is record:
            del self._by_peer[record.peer]
        return Lose(incarnation=record.incarnation, worker_id=record.worker_id, reason=reason, detail=detail)


def _problem(register: Register) -> str | None:
    """What is wrong with a registration, or None."""
    capacity, card = register.capacity, register.card
    if not 0 < len(register.worker_id) <= MAX_NAME_LEN or not 0 < len(card.name) <= MAX_NAME_LEN:
        return f"worker id and model name need 1 to {MAX_NAME_LEN} characters"
    if not 16 <= len(register.epoch) <= 64:
        return "an epoch has 16 to 64 characters"
    counts = (
        *(capacity.num_blocks, capacity.block_size, capacity.max_num_seqs, capacity.max_batch_tokens),
        *(card.vocab_size, card.max_model_len, card.tensor_parallel_size),
    )
    if min(counts) < 1 or max(counts) > 2**31 - 1 or not 0 <= capacity.max_waiting < 2**31:
        return "capacities and limits must be positive int32"
    return None


def _differences(card: ModelCard, other: ModelCard) -> list[str]:
    names = card.__struct_fields__
    return [name for name in names if getattr(card, name) != getattr(other, name)]
