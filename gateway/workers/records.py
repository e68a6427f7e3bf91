"""What the gateway remembers of one incarnation of a worker."""

from dataclasses import dataclass

from gateway.workers.decisions import Peer
from gateway.workers.views import WorkerState, WorkerView
from wire.messages import Capacity, Heartbeat, ModelCard, Register


@dataclass(slots=True, kw_only=True)
class WorkerRecord:
    """Mutable; owned by the registry. Times are this process's monotonic seconds, given by the caller."""

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
    is_watched: bool = False  # its process is watched: silence is then a stall, not a death

    @classmethod
    def of(
        cls, register: Register, *, incarnation: int, peer: Peer, state: WorkerState, now_s: float
    ) -> "WorkerRecord":
        """A fresh record."""
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
        """Note that it lives, and whether its steps advance while there is something to do."""
        self.last_heard_s = now_s
        self.num_paused = beat.num_paused
        is_idle = not beat.has_work and not self.owes_us
        if is_idle or beat.num_steps != self.num_steps:
            self.last_progress_s = now_s
        self.num_steps = beat.num_steps
        self.has_work = beat.has_work
        self.num_running = beat.num_running
        self.num_waiting = beat.num_waiting
        self.num_free_blocks = beat.num_free_blocks
        self.num_cached_blocks = beat.num_cached_blocks
        if beat.is_draining and self.state is WorkerState.READY:
            self.state = WorkerState.DRAINING

    def take_step(self, now_s: float) -> None:
        """Note that a step's output arrived."""
        self.last_heard_s = now_s
        self.last_progress_s = now_s

    @property
    def owes_us(self) -> bool:
        """It has requests of ours, and not because all that it has are paused."""
        return self.in_flight > self.num_paused

    @property
    def num_requests(self) -> int:
        """Requests it has: ours for sure, or what it last said of everybody's."""
        return max(self.in_flight, self.num_running + self.num_waiting + self.num_paused)

    @property
    def load(self) -> float:
        """Requests over the number that run at once; above 1 some of them queue."""
        return self.num_requests / self.capacity.max_num_seqs

    @property
    def max_requests(self) -> int:
        """Running and queued requests that it takes."""
        return self.capacity.max_num_seqs + self.capacity.max_waiting

    def view(self, now_s: float) -> WorkerView:
        """A frozen snapshot."""
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
        )
