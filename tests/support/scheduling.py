"""A scheduler with its block manager and the oracle runner, driven by hand: for tests of the worker."""

from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np

from blockmgr.config import BlockManagerConfig
from blockmgr.ids import PrefixCache
from blockmgr.manager import BlockManager
from wire.messages import Finished, Sampling, TokenLogprobs, WireFinishReason
from worker.config import SchedulerConfig
from worker.oracle_model import OracleModel, oracle_tokens
from worker.oracle_runner import OracleFaults, OracleRunner
from worker.outputs import StepOutputs
from worker.plan import StepPlan
from worker.ports import GatewayIndex
from worker.request import AddRequest, Request, RequestKey
from worker.runner import RunnerError, RunnerOutOfMemory
from worker.scheduler import Scheduler

GATEWAY = GatewayIndex(0)


def key(handle: int, gateway: int = 0) -> RequestKey:
    """Short for a key."""
    return RequestKey(GatewayIndex(gateway), handle)


@dataclass(frozen=True, slots=True, kw_only=True)
class WorldConfig:
    """A small worker."""

    num_blocks: int = 16
    block_size: int = 2
    max_num_seqs: int = 4
    max_batch_tokens: int = 8
    max_chunk_tokens: int | None = None
    max_model_len: int = 64
    max_waiting: int = 100
    max_in_flight: int = 1
    aging_s: float = 1000.0
    prefix_cache: PrefixCache = PrefixCache.ON
    model: OracleModel = field(default_factory=lambda: OracleModel(vocab_size=50, eos_token_ids=(2,)))
    faults: OracleFaults = field(default_factory=OracleFaults)

    def scheduler(self) -> SchedulerConfig:
        """Its part for the scheduler."""
        return SchedulerConfig(
            max_model_len=self.max_model_len,
            vocab_size=self.model.vocab_size,
            eos_token_ids=self.model.eos_token_ids,
            max_num_seqs=self.max_num_seqs,
            max_waiting=self.max_waiting,
            max_batch_tokens=self.max_batch_tokens,
            max_chunk_tokens=self.max_chunk_tokens,
            max_in_flight=self.max_in_flight,
            aging_s=self.aging_s,
        )

    def blocks(self) -> BlockManagerConfig:
        """Its part for the block manager."""
        return BlockManagerConfig(
            num_blocks=self.num_blocks,
            block_size=self.block_size,
            max_slots=self.max_num_seqs,
            max_blocks_per_slot=-(-self.max_model_len // self.block_size),
            fingerprint=b"test",
            prefix_cache=self.prefix_cache,
            secret=b"fixed",
        )

    def runner(self) -> OracleRunner:
        """Its oracle."""
        return OracleRunner(
            self.model,
            num_blocks=self.num_blocks,
            block_size=self.block_size,
            max_slots=self.max_num_seqs,
            max_blocks_per_slot=-(-self.max_model_len // self.block_size),
            max_in_flight=self.max_in_flight,
            faults=self.faults,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Seen:
    """A plan as a person would tell it, by handle: chunks (handle, start, num_tokens), decodes (handle, position).
    ``samples``: those whose chunk is the last one."""

    joins: tuple[int, ...] = ()
    prefill: tuple[tuple[int, int, int], ...] = ()
    samples: tuple[int, ...] = ()
    decode: tuple[tuple[int, int], ...] = ()


@dataclass(frozen=True, slots=True)
class Touched:
    """Blocks that a step in flight reads or writes, with who does."""

    owners_by_block: dict[int, set[int]]


@dataclass(slots=True)
class Stream:
    """What one output has given so far."""

    tokens: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    num_started: int = 0
    finished: Finished | None = None


class World:
    """Adds requests and makes steps; ``streams`` collects the outputs and refuses any after the end."""

    def __init__(self, config: WorldConfig, *, make_scheduler: Callable[..., Scheduler] = Scheduler) -> None:
        self.config = config
        self.blocks = BlockManager(config.blocks())
        self.scheduler = make_scheduler(config.scheduler(), self.blocks)
        self.runner = config.runner()
        self.now_s = 0.0
        self.plans: list[StepPlan] = []  # launched, not collected
        self.touched: dict[int, Touched] = {}  # by step in flight
        self.trace: list[Seen] = []
        self.asked: dict[RequestKey, AddRequest] = {}
        self.streams: dict[RequestKey, Stream] = {}

    # ------------------------------------------------------------ events

    def add(
        self,
        handle: int,
        prompt: list[int],
        *,
        gateway: int = 0,
        priority: int = 0,
        salt: str = "",
        timeout_s: float | None = None,
        **sampling: object,
    ) -> RequestKey:
        """Ask for one output; the seed is its handle unless given."""
        asked = AddRequest(
            key=key(handle, gateway),
            request_id=f"r{gateway}-{handle}",
            prompt_ids_T=np.asarray(prompt, np.int32),
            sampling=Sampling(**{"temperature": 0.0, "seed": handle, "max_tokens": 4, **sampling}),  # type: ignore[arg-type]
            priority=priority,
            cache_salt=salt,
            timeout_s=timeout_s,
        )
        self.asked.setdefault(asked.key, asked)
        self.streams.setdefault(asked.key, Stream())
        self.scheduler.add(asked, now_s=self.now_s)
        return asked.key

    def cancel(self, handle: int, gateway: int = 0) -> None:
        """Give an output up."""
        self.scheduler.cancel(key(handle, gateway), now_s=self.now_s)

    # ------------------------------------------------------------ steps

    def launch(self) -> StepPlan | None:
        """Plan and launch one step, if there is one."""
        plan = self.scheduler.plan(now_s=self.now_s)
        if plan is None:
            return None
        self.check_plan(plan)
        try:
            self.runner.launch(plan)
        except RunnerError as error:
            while self.plans:
                self.collect()
            self.touched.pop(plan.step)
            self._fail(plan, error)
            return plan
        self.plans.append(plan)
        return plan

    def collect(self) -> StepOutputs:
        """The result of the oldest step."""
        plan = self.plans.pop(0)
        self.touched.pop(plan.step)
        try:
            result = self.runner.collect()
        except RunnerError as error:
            return self._fail(plan, error)
        outputs = self.take(self.scheduler.apply(result, now_s=self.now_s))
        self._poison_free_blocks()
        return outputs

    def _poison_free_blocks(self) -> None:
        """Whoever still reads a block that is nobody's gets other tokens from now on."""
        self.runner.poison(self.blocks._pool.blank_blocks())

    def step_seen(self) -> Seen | None:
        """Plan, launch and collect one step; what it was."""
        plan = self.launch()
        seen = self.seen(plan)
        if plan is not None:
            self.collect()
        self.now_s += 1.0
        return seen

    def step(self) -> StepPlan | None:
        """As the engine does: launch as many as may be in flight, collect one. The first plan launched."""
        first = None
        while len(self.plans) < self.config.max_in_flight:
            plan = self.launch()
            if plan is None:
                break
            first = first or plan
        if self.plans:
            self.collect()
        else:
            self.take(self.scheduler.flush())
        self.now_s += 1.0
        return first

    def run(self, max_steps: int = 2000) -> int:
        """Until nothing is left; how many steps. AssertionError where it takes too many."""
        for num_steps in range(max_steps):
            if not self.scheduler.has_work:
                self.take(self.scheduler.flush())
                return num_steps
            self.step()
        raise AssertionError(f"not done after {max_steps} steps: {list(self.scheduler.roster)}")

    def take(self, outputs: StepOutputs) -> StepOutputs:
        """File outputs by stream."""
        for gateway, output in outputs.items():
            for handle in output.started:
                self._open(gateway, handle).num_started += 1
            for handle, token in zip(output.handles_N.tolist(), output.tokens_N.tolist(), strict=True):
                self._open(gateway, handle).tokens.append(token)
            for handle, logprobs in output.logprobs.items():
                self._open(gateway, handle).logprobs.extend(logprobs)
            for finished in output.finished:
                self._open(gateway, finished.handle).finished = finished
        return outputs

    def _open(self, gateway: GatewayIndex, handle: int) -> Stream:
        stream = self.streams[RequestKey(gateway, handle)]
        assert stream.finished is None, f"news of {handle} after {stream.finished}"
        return stream

    def _fail(self, plan: StepPlan, error: RunnerError) -> StepOutputs:
        act = self.scheduler.fail_out_of_memory if isinstance(error, RunnerOutOfMemory) else self.scheduler.fail
        return self.take(act(plan.step, str(error), now_s=self.now_s))

    # ------------------------------------------------------------ expectations

    def expected(self, which: RequestKey) -> list[int]:
        """The whole output as the slow twin has it."""
        asked = self.asked[which]
        pool_tokens = self.config.num_blocks * self.config.block_size
        return oracle_tokens(
            asked.prompt_ids_T.tolist(),
            asked.sampling,
            model=self.config.model,
            max_total_tokens=min(self.config.max_model_len, pool_tokens + 1),
        )

    def reasons(self) -> dict[int, str]:
        """How each output ended, by handle: the reason, or the error."""
        return {
            which.handle: stream.finished.error or stream.finished.reason.name
            for which, stream in self.streams.items()
            if stream.finished
        }

    def seen(self, plan: StepPlan | None) -> Seen | None:
        """The plan by handles; to be asked right after planning."""
        if plan is None:
            return None
        handles = {slot: request.asked.key.handle for slot, request in self._by_slot().items()}
        return Seen(
            joins=tuple(handles[join.slot] for join in plan.joins),
            prefill=tuple((handles[chunk.slot], chunk.start, chunk.num_tokens) for chunk in plan.prefill),
            samples=tuple(handles[chunk.slot] for chunk in plan.prefill if chunk.is_last),
            decode=tuple(
                (handles[slot], position)
                for slot, position in zip(plan.decode_slots_S.tolist(), plan.decode_positions_S.tolist(), strict=True)
            ),
        )

    def check_plan(self, plan: StepPlan) -> None:
        """The budget holds, everybody in the plan runs and is in it once, and nobody writes to a block that another
        one's step in flight still uses."""
        rows = [*plan.decode_slots_S.tolist(), *(int(chunk.slot) for chunk in plan.prefill)]
        assert 0 < plan.num_tokens <= self.config.max_batch_tokens
        assert len(set(rows)) == len(rows) <= self.config.max_num_seqs
        by_slot, touched = self._by_slot(), Touched({})
        for slot, start, end in self._ranges(plan):
            owner, size = by_slot[slot].order, self.config.block_size
            for column in range(-(-end // size)):
                block = int(self.blocks.table_SM[slot, column])
                assert block >= 0
                if (column + 1) * size > start:
                    self._check_writable(block, owner)
                touched.owners_by_block.setdefault(block, set()).add(owner)
        self.touched[plan.step] = touched
        seen = self.seen(plan)
        assert seen is not None
        self.trace.append(seen)

    def _check_writable(self, block: int, owner: int) -> None:
        for step, touched in self.touched.items():
            others = touched.owners_by_block.get(block, set()) - {owner}
            assert not others, f"block {block} is written for {owner}, step {step} in flight uses it for {others}"

    def _ranges(self, plan: StepPlan) -> list[tuple[int, int, int]]:
        positions = zip(plan.decode_slots_S.tolist(), plan.decode_positions_S.tolist(), strict=True)
        decodes = [(slot, position, position + 1) for slot, position in positions]
        return decodes + [(int(chunk.slot), chunk.start, chunk.start + chunk.num_tokens) for chunk in plan.prefill]

    def _by_slot(self) -> dict[int, Request]:
        return {int(request.slot): request for request in self.scheduler.roster.running if request.slot is not None}

    def check_complete(self) -> None:
        """Every accepted output that was not cut short is what the twin says; the others are a beginning of it."""
        for which, stream in self.streams.items():
            assert stream.finished is not None, f"{which} never ended"
            expected = self.expected(which) if stream.finished.error != "INVALID_FIELD" else []
            whole = stream.finished.reason in (WireFinishReason.STOP, WireFinishReason.LENGTH)
            assert stream.tokens == (expected if whole else expected[: len(stream.tokens)]), which
            assert stream.finished.completion_tokens == len(stream.tokens)

    def check_quiet(self) -> None:
        """Nothing is left behind."""
        assert self.blocks.audit().violations == ()
        assert (self.blocks.num_active, self.scheduler.num_running, self.scheduler.num_waiting) == (0, 0, 0)
        assert self.blocks.num_free + self.blocks.num_cached == self.config.num_blocks
        counters = self.scheduler.counters
        assert counters.num_accepted == counters.num_ended.total()
