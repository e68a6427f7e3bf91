"""A scheduler with its block manager and the oracle runner, driven by hand: for tests of the worker."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from octavo.blockmgr.config import BlockManagerConfig
from octavo.blockmgr.ids import PrefixCache
from octavo.blockmgr.manager import BlockManager
from octavo.wire.messages import Finished, Pooling, Run, SamplingParams, TokenLogprobs, WireFinishReason
from octavo.worker.config import SchedulerConfig
from octavo.worker.runners.interface import RunnerError, RunnerOutOfMemory
from octavo.worker.runners.oracle.faults import OracleFaults
from octavo.worker.runners.oracle.model import OracleModel, oracle_embedding, oracle_tokens
from octavo.worker.runners.oracle.runner import OracleRunner
from octavo.worker.scheduler.plan import GatewayIndex, RequestKey, StepOutputs, StepPlan
from octavo.worker.scheduler.request import Phase, Request, sampling_of
from octavo.worker.scheduler.scheduler import Scheduler
from tests.support.worker.plan_checks import BlocksInFlight, Seen, seen

GATEWAY = GatewayIndex(0)


def key(handle: int, gateway: int = 0) -> RequestKey:
    """A request's key, for short."""
    return RequestKey(GatewayIndex(gateway), handle)


@dataclass(frozen=True, slots=True, kw_only=True)
class WorldConfig:
    """A small worker."""

    num_blocks: int = 16
    num_host_blocks: int = 0
    max_copies_in: int = 64
    copy_s_per_block: float | None = None
    block_size: int = 2
    max_num_seqs: int = 4
    max_batch_tokens: int = 8
    max_chunk_tokens: int | None = None
    max_chunks: int | None = None
    max_model_len: int = 64
    max_waiting: int = 100
    max_in_flight: int = 1
    aging_s: float = 1000.0
    prefix_cache: PrefixCache = PrefixCache.ON
    model: OracleModel = field(default_factory=lambda: OracleModel(vocab_size=50, eos_token_ids=(2,)))
    faults: OracleFaults = field(default_factory=OracleFaults)

    def scheduler(self) -> SchedulerConfig:
        """The scheduler's part of this configuration."""
        return SchedulerConfig(
            max_model_len=self.max_model_len,
            vocab_size=self.model.vocab_size,
            eos_token_ids=self.model.eos_token_ids,
            max_num_seqs=self.max_num_seqs,
            max_waiting=self.max_waiting,
            max_batch_tokens=self.max_batch_tokens,
            max_chunk_tokens=self.max_chunk_tokens,
            max_chunks=self.max_chunks,
            max_in_flight=self.max_in_flight,
            aging_s=self.aging_s,
            copy_s_per_block=self.copy_s_per_block,
        )

    def blocks(self) -> BlockManagerConfig:
        """The block manager's part of this configuration."""
        return BlockManagerConfig(
            num_blocks=self.num_blocks,
            block_size=self.block_size,
            max_slots=self.max_num_seqs,
            max_blocks_per_slot=-(-self.max_model_len // self.block_size),
            fingerprint=b"test",
            prefix_cache=self.prefix_cache,
            secret=b"fixed",
            num_host_blocks=self.num_host_blocks,
            max_copies_in=self.max_copies_in,
        )

    def runner(self) -> OracleRunner:
        """An oracle runner for this configuration."""
        return OracleRunner(
            self.model,
            num_blocks=self.num_blocks,
            block_size=self.block_size,
            max_slots=self.max_num_seqs,
            max_blocks_per_slot=-(-self.max_model_len // self.block_size),
            max_in_flight=self.max_in_flight,
            num_host_blocks=self.num_host_blocks,
            faults=self.faults,
        )


@dataclass(slots=True)
class Stream:
    """What one output has produced so far."""

    tokens: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    prompt_logprobs: list[TokenLogprobs] = field(default_factory=list)
    num_started: int = 0
    embedding: list[float] | None = None
    finished: Finished | None = None


class Asked(NamedTuple):
    """What was requested of one output of a Run."""

    prompt_ids_T: np.ndarray
    sampling: SamplingParams
    pooling: Pooling | None


class World:
    """Adds requests and runs steps; ``streams`` collects the outputs and refuses any after the end."""

    def __init__(self, config: WorldConfig, *, make_scheduler: Callable[..., Scheduler] = Scheduler) -> None:
        self.config = config
        self.blocks = BlockManager(config.blocks())
        self.scheduler = make_scheduler(config.scheduler(), self.blocks)
        self.runner = config.runner()
        self.now_s = 0.0
        self.plans: list[StepPlan] = []  # launched but not collected
        self.in_flight = BlocksInFlight()
        self.trace: list[Seen] = []
        self.asked: dict[RequestKey, Asked] = {}
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
        pooling: Pooling | None = None,
        num_outputs: int = 1,
        tenant: str = "",
        traceparent: str = "",
        **sampling: object,
    ) -> RequestKey:
        """Add a request; the seed is its handle unless given. Further outputs have handles higher by 1000, 2000, …"""
        run = Run(
            handle=handle,
            request_id=f"r{gateway}-{handle}",
            prompt_ids=np.asarray(prompt, "<i4").tobytes(),
            sampling=SamplingParams(
                **{"temperature": 0.0, "seed": handle, "max_tokens": 1 if pooling else 4, **sampling}
            ),  # type: ignore[arg-type]
            priority=priority,
            cache_salt=salt,
            timeout_s=timeout_s,
            pooling=pooling,
            fork_handles=tuple(handle + 1000 * index for index in range(1, num_outputs)),
            tenant=tenant,
            weight=1 + len(tenant),
            traceparent=traceparent,
        )
        prompt_ids_T = np.asarray(prompt, np.int32)
        for index, each in enumerate((handle, *run.fork_handles)):
            self.asked.setdefault(key(each, gateway), Asked(prompt_ids_T, sampling_of(run, index), pooling))
            self.streams.setdefault(key(each, gateway), Stream())
        self.scheduler.add(GatewayIndex(gateway), run, now_s=self.now_s)
        return key(handle, gateway)

    def cancel(self, handle: int, gateway: int = 0) -> None:
        """Cancel an output."""
        self.scheduler.cancel(key(handle, gateway), now_s=self.now_s)

    def pause(self, handle: int, gateway: int = 0) -> None:
        """Pause an output, as if its caller did not read."""
        self.scheduler.pause(key(handle, gateway), now_s=self.now_s)

    def resume(self, handle: int, gateway: int = 0) -> None:
        """Resume an output, as if its caller read on."""
        self.scheduler.resume(key(handle, gateway), now_s=self.now_s)

    def resume_all(self) -> None:
        """Resume all outputs."""
        for which in self.asked:
            self.scheduler.resume(which, now_s=self.now_s)

    # ------------------------------------------------------------ steps

    def launch(self) -> StepPlan | None:
        """Plan and launch one step, if there is one."""
        plan = self.scheduler.plan(now_s=self.now_s)
        if plan is None:
            return None
        self._check(plan)
        try:
            self.runner.launch(plan)
        except RunnerError as error:
            while self.plans:
                self.collect()
            self.in_flight.forget(plan.step)
            self._fail(plan, error)
            return plan
        self.plans.append(plan)
        return plan

    def collect(self) -> StepOutputs:
        """Collect and apply the result of the oldest step."""
        plan = self.plans.pop(0)
        self.in_flight.forget(plan.step)
        try:
            result = self.runner.collect()
        except RunnerError as error:
            return self._fail(plan, error)
        outputs = self.take(self.scheduler.apply(result, now_s=self.now_s))
        self.scheduler.finish_result()
        self._poison_free_blocks()
        return outputs

    def _poison_free_blocks(self) -> None:
        """From now on, reading a block that no request holds gives wrong tokens."""
        if isinstance(self.runner, OracleRunner):
            awaited = {*self.blocks.host.outs.values()}  # still to be copied out
            awaited |= {block for plan in self.plans for block in plan.copies_out_C2[:, 0].tolist()}
            blank = self.blocks._pool.blank_blocks()
            self.runner.poison(blank[~np.isin(blank, list(awaited))])

    def step_seen(self) -> Seen | None:
        """Plan, launch and collect one step; its plan by handles."""
        plan = self.launch()
        seen = self.seen(plan)
        if plan is not None:
            self.collect()
        self.now_s += 1.0
        return seen

    def step(self) -> StepPlan | None:
        """As the engine does: launch as many steps as may be in flight, collect one. Returns the first plan
        launched."""
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
        """Step until only paused outputs are left; the number of steps. Raises AssertionError if there are too many."""
        for num_steps in range(max_steps):
            if not self.scheduler.has_work:
                self.take(self.scheduler.flush())
                return num_steps
            self.step()
        raise AssertionError(f"not done after {max_steps} steps: {list(self.scheduler.requests)}")

    def take(self, outputs: StepOutputs) -> StepOutputs:
        """File outputs by stream."""
        for gateway, output in outputs.items():
            for handle in output.started:
                self._open(gateway, handle).num_started += 1
            for handle, token in zip(output.handles_N.tolist(), output.tokens_N.tolist(), strict=True):
                self._open(gateway, handle).tokens.append(token)
            for handle, logprobs in output.logprobs.items():
                self._open(gateway, handle).logprobs.extend(logprobs)
            for handle, logprobs in output.prompt_logprobs.items():
                self._open(gateway, handle).prompt_logprobs.extend(logprobs)
            for handle, embedding_D in output.embeddings.items():
                self._open(gateway, handle).embedding = embedding_D.tolist()
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
        """The whole output according to the slow reference."""
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
        """The plan by handles; call it right after planning."""
        return None if plan is None else seen(plan, self._by_slot())

    def _check(self, plan: StepPlan) -> None:
        assert plan.num_tokens <= self.config.max_batch_tokens
        self.in_flight.check(plan, self.blocks, self._by_slot())
        by_slot = self._by_slot()
        for slot in [*plan.decode_slots_S.tolist(), *(chunk.slot for chunk in plan.prefill)]:
            phase = by_slot[slot].phase
            assert by_slot[slot].is_running, f"{phase} is in step {plan.step}"
            assert phase is not Phase.LOADING, f"slot {slot} is in step {plan.step} before its blocks are back"
        self.trace.append(seen(plan, by_slot))

    def _by_slot(self) -> dict[int, Request]:
        return {int(request.held_slot): request for request in self.scheduler.requests.running}

    def check_complete(self) -> None:
        """Check that every accepted output equals the reference's or, if it was cut short, is a prefix of it."""
        for which, stream in self.streams.items():
            assert stream.finished is not None, f"{which} never ended"
            assert stream.finished.error != "INTERNAL", stream.finished
            if pooling := self.asked[which].pooling:
                self._check_embedding(stream, self.asked[which].prompt_ids_T.tolist(), pooling)
                continue
            expected = self.expected(which) if stream.finished.error != "INVALID_FIELD" else []
            whole = stream.finished.reason in (WireFinishReason.STOP, WireFinishReason.LENGTH)
            assert stream.tokens == (expected if whole else expected[: len(stream.tokens)]), which
            assert stream.finished.completion_tokens == len(stream.tokens)

    def _check_embedding(self, stream: Stream, prompt: list[int], pooling: Pooling) -> None:
        finished = stream.finished
        assert finished is not None
        assert (stream.tokens, finished.completion_tokens) == ([], 0)
        is_whole = finished.reason is WireFinishReason.LENGTH
        expected = np.float32(oracle_embedding(prompt, pooling)).tolist() if is_whole else None
        assert stream.embedding == expected

    def check_quiet(self) -> None:
        """Check that nothing is left behind."""
        assert self.blocks.audit().violations == ()
        scheduler = self.scheduler
        assert (self.blocks.num_active, scheduler.num_running, scheduler.num_waiting) == (0, 0, 0)
        assert (scheduler.num_paused, scheduler.is_empty) == (0, True)
        assert self.blocks.num_free + self.blocks.num_cached == self.config.num_blocks
        assert self.blocks.host.pool.num_available == self.config.num_host_blocks
        counters = self.scheduler.counters
        assert counters.num_accepted == counters.num_ended.total()
