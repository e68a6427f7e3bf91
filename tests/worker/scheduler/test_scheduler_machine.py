"""Any order of events: scheduler, block manager and oracle together against the slow reference, which knows no blocks.

Checked after every rule: the audit of the blocks, each request in exactly one place, limits of running and waiting;
in every plan (World.check_plan): the budget, and that no block is written that a step in flight still uses; at the
end: every output is what the reference says, every block is free or cached.
"""

import numpy as np
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from octavo.blockmgr.ids import PrefixCache
from octavo.worker.runners.interface import RunnerError, RunnerOutOfMemory
from octavo.worker.runners.oracle.faults import OracleFaults
from octavo.worker.runners.oracle.model import OracleModel
from octavo.worker.scheduler.plan import GatewayIndex, RequestKey
from octavo.worker.scheduler.request import Phase
from tests.support.worker.scheduling import Stream, World, WorldConfig

MAX_ADDED = 12
NAN_TOKEN = 6  # no prompt of other requests has it


class SchedulerMachine(RuleBasedStateMachine):
    """Requests over two gateways, from an alphabet so small that prefixes are shared all the time."""

    @initialize(
        num_blocks=st.integers(2, 12),
        block_size=st.sampled_from([1, 2, 3]),
        max_num_seqs=st.integers(1, 4),
        spare_budget=st.integers(0, 6),
        max_chunk_tokens=st.sampled_from([None, 1, 3]),
        max_in_flight=st.sampled_from([1, 2]),
        aging_s=st.sampled_from([2.0, 10.0, 1000.0]),
        cache=st.sampled_from([PrefixCache.ON, PrefixCache.ON, PrefixCache.OFF]),
        eos_every=st.sampled_from([None, 6]),
        nan_output_index=st.integers(0, 3),
        num_host_blocks=st.sampled_from([0, 1, 4, 8, 30]),
        max_copies_in=st.sampled_from([1, 2, 64]),
        copy_s_per_block=st.sampled_from([None, None, 0.01, 10.0]),
    )
    def start(
        self,
        num_blocks: int,
        block_size: int,
        max_num_seqs: int,
        spare_budget: int,
        max_chunk_tokens: int | None,
        max_in_flight: int,
        aging_s: float,
        cache: PrefixCache,
        eos_every: int | None,
        nan_output_index: int,
        num_host_blocks: int,
        max_copies_in: int,
        copy_s_per_block: float | None,
    ) -> None:
        self.num_added = 0
        self.errors: tuple[dict[int, RunnerError], dict[int, RunnerError]] = ({}, {})
        self.world = World(
            WorldConfig(
                num_blocks=num_blocks,
                block_size=block_size,
                max_num_seqs=max_num_seqs,
                max_batch_tokens=max_num_seqs + spare_budget,
                max_chunk_tokens=max_chunk_tokens,
                max_model_len=24,
                max_waiting=6,
                max_in_flight=max_in_flight,
                aging_s=aging_s,
                num_host_blocks=num_host_blocks,
                max_copies_in=max_copies_in,
                copy_s_per_block=copy_s_per_block,
                prefix_cache=cache,
                model=OracleModel(vocab_size=7, eos_token_ids=(2,), eos_every=eos_every),
                faults=OracleFaults(
                    nan_token_id=NAN_TOKEN,
                    nan_output_index=nan_output_index,
                    launch_errors=self.errors[0],
                    collect_errors=self.errors[1],
                ),
            )
        )

    # ------------------------------------------------------------ events

    @precondition(lambda self: self.num_added < MAX_ADDED)
    @rule(
        prompt=st.lists(st.integers(0, 1), min_size=1, max_size=10),
        max_tokens=st.integers(1, 12),
        min_tokens=st.sampled_from([0, 0, 3]),
        stops=st.sampled_from([(), (), (3,), (4, 5)]),
        priority=st.sampled_from([0, 0, 0, 1, -1]),
        salt=st.sampled_from(["", "", "other"]),
        gateway=st.sampled_from([0, 0, 1]),
        timeout_s=st.sampled_from([None, None, None, 3.0, 9.0]),
        seed=st.integers(0, 1),
        num_outputs=st.sampled_from([1, 1, 1, 2, 3, 5]),
        num_prompt_logprobs=st.sampled_from([None, None, 0, 2]),
        tenant=st.sampled_from(["", "", "a", "bcd"]),
    )
    def add(
        self,
        prompt: list[int],
        max_tokens: int,
        min_tokens: int,
        stops: tuple[int, ...],
        priority: int,
        salt: str,
        gateway: int,
        timeout_s: float | None,
        seed: int,
        num_outputs: int,
        num_prompt_logprobs: int | None,
        tenant: str,
    ) -> None:
        self.num_added += 1
        self.world.add(
            self.num_added,
            prompt,
            gateway=gateway,
            priority=priority,
            salt=salt,
            timeout_s=timeout_s,
            max_tokens=max_tokens,
            min_tokens=min_tokens,
            stop_token_ids=stops,
            seed=seed,
            num_outputs=num_outputs,
            num_prompt_logprobs=num_prompt_logprobs,
            tenant=tenant,
        )

    @rule(index=st.integers(0, MAX_ADDED - 1))
    def cancel(self, index: int) -> None:
        keys = list(self.world.asked)
        if index < len(keys):
            self.world.cancel(keys[index].handle, keys[index].gateway)

    @rule(index=st.integers(0, MAX_ADDED - 1))
    def caller_stalls(self, index: int) -> None:
        """At any moment, also twice, and whether anything was sent or not."""
        keys = list(self.world.asked)
        if index < len(keys):
            self.world.pause(keys[index].handle, keys[index].gateway)

    @rule(index=st.integers(0, MAX_ADDED - 1))
    def caller_reads_on(self, index: int) -> None:
        keys = list(self.world.asked)
        if index < len(keys):
            self.world.resume(keys[index].handle, keys[index].gateway)

    @rule()
    def others_come_to_their_end(self) -> None:
        """A paused request holds up no other, and gets nothing."""
        stalled = {which: len(stream.tokens) for which, stream in self._paused().items()}
        while self.world.plans:
            self.world.collect()
            stalled = {which: len(stream.tokens) for which, stream in self._paused().items()}
        self.world.run(max_steps=600)
        assert {which: len(stream.tokens) for which, stream in self._paused().items()} == {
            which: num_tokens for which, num_tokens in stalled.items() if which in self._paused()
        }

    def _paused(self) -> dict[RequestKey, Stream]:
        table = self.world.scheduler.requests
        return {request.key: self.world.streams[request.key] for request in table if request.is_paused}

    @rule()
    def launch(self) -> None:
        self.world.launch()

    @precondition(lambda self: self.world.plans)
    @rule()
    def collect(self) -> None:
        self.world.collect()

    @rule(count=st.integers(1, 6))
    def steps(self, count: int) -> None:
        for _ in range(count):
            self.world.step()

    @rule(index=st.integers(0, 3))
    def preempt(self, index: int) -> None:
        """At any moment, also with steps in flight: nothing but time may be lost."""
        running = self.world.scheduler.requests.running
        if index < len(running):
            self.world.scheduler.requests.preempt(running[index], self.world.now_s)

    @precondition(lambda self: self.num_added < MAX_ADDED)
    @rule(prompt=st.lists(st.integers(0, 1), min_size=1, max_size=6))
    def add_one_that_turns_nan(self, prompt: list[int]) -> None:
        self.num_added += 1
        self.world.add(self.num_added, [*prompt, NAN_TOKEN], max_tokens=8)

    @rule(error=st.sampled_from([RunnerError("broken"), RunnerOutOfMemory("short")]), where=st.sampled_from([0, 1]))
    def break_the_next_step(self, error: RunnerError, where: int) -> None:
        num_planned = len(self.world.trace)
        self.errors[where][num_planned + 1] = error

    @rule()
    def gateway_lost(self) -> None:
        gateway = GatewayIndex(1)
        self.world.scheduler.drop_gateway(gateway, now_s=self.world.now_s)
        for which in [which for which in self.world.asked if which.gateway == gateway]:
            del self.world.asked[which], self.world.streams[which]

    @rule()
    def flush_cache(self) -> None:
        self.world.blocks.flush_prefix_cache()

    # ------------------------------------------------------------ invariants

    @invariant()
    def blocks_balance(self) -> None:
        if hasattr(self, "world"):
            assert self.world.blocks.audit().violations == ()

    @invariant()
    def everyone_is_in_one_place(self) -> None:
        if not hasattr(self, "world"):
            return
        scheduler = self.world.scheduler
        requests = list(scheduler.requests)
        running = [request for request in requests if request.is_running]
        waiting = [request for request in requests if request.phase is Phase.WAITING]
        following = [request for request in requests if request.phase is Phase.FOLLOWING]
        paused = [request for request in requests if request.phase is Phase.PAUSED]
        parked = [request for request in requests if request.phase is Phase.PARKED]
        assert len(running) + len(waiting) + len(following) + len(paused) + len(parked) == len(requests)
        assert scheduler.num_paused == len(paused) + len(parked)
        assert {id(request) for request in paused} == {id(each) for each in scheduler.requests.paused.values()}
        assert {id(request) for request in parked} == {id(each) for each in scheduler.requests.parked.values()}
        assert all(request.leader is None and not request.followers for request in [*paused, *parked])
        assert all((request.resumes_as is not None) == (request.phase is Phase.PAUSED) for request in requests)
        assert (len(running), len(waiting)) == (scheduler.num_running, len(scheduler.requests.waiting))
        assert scheduler.num_waiting == len(waiting) + len(following)
        led = [follower for request in requests for follower in request.followers]
        assert {id(request) for request in led} == {id(request) for request in following}
        assert all(follower.leader is request for request in requests for follower in request.followers)
        in_slots = {id(request) for request in scheduler.requests.running}
        assert {id(request) for request in [*running, *paused]} == in_slots
        assert all(request.slot is None for request in [*waiting, *following, *parked])
        assert len(running) + len(paused) <= self.world.config.max_num_seqs
        prefilling = [request for request in running if request.phase is Phase.PREFILLING]
        assert {id(request) for request in prefilling} == {id(request) for request in scheduler.requests.prefilling}
        loading = [request for request in running if request.phase is Phase.LOADING]
        assert {id(request) for request in loading} == {id(each) for each in scheduler.requests.loading.values()}
        swapped = {request.block_owner for request in [*waiting, *parked]}
        assert self.world.blocks.host.swapped.keys() <= swapped

    @invariant()
    def rows_agree_with_requests(self) -> None:
        if not hasattr(self, "world"):
            return
        rows = self.world.scheduler.requests.slots
        for request in self.world.scheduler.requests.running:
            slot = request.held_slot
            assert rows.num_computed_S[slot] <= rows.num_scheduled_S[slot] < rows.limit_S[slot]
            assert rows.num_known_S[slot] <= rows.limit_S[slot]
            assert rows.num_scheduled_S[slot] <= self.world.blocks.capacity(slot)
            known = rows.known_tokens(slot)[: request.num_prompt_tokens]
            assert np.array_equal(known, request.prompt_ids_T)

    def teardown(self) -> None:
        if not hasattr(self, "world"):
            return
        self.world.run()
        self.world.resume_all()
        self.world.run()
        self.world.check_complete()
        self.world.check_quiet()
        for which, stream in self.world.streams.items():
            self.check_prompt_logprobs(which, stream)
            if stream.finished and stream.finished.error == "NUMERICAL":
                assert NAN_TOKEN in self.world.asked[which].prompt_ids_T

    def check_prompt_logprobs(self, which: RequestKey, stream: Stream) -> None:
        """One for each token of the prompt after the first, once, whatever happened on the way."""
        asked = self.world.asked[which]
        if asked.sampling.num_prompt_logprobs is None:
            assert stream.prompt_logprobs == []
        elif stream.tokens:
            tops = [each.top_ids[:1] for each in stream.prompt_logprobs]
            wanted = asked.prompt_ids_T[1:].tolist()
            assert tops == [(token,) if asked.sampling.num_prompt_logprobs else () for token in wanted]


SchedulerMachine.TestCase.settings = settings(max_examples=120, stateful_step_count=40)
TestAnyOrderOfEvents = SchedulerMachine.TestCase
