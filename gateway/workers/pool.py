"""All workers of one gateway: choose one, send it a request, pause, resume or cancel an output; take what workers send.

Owns the sockets, the registry and the live outputs. All on one event loop, no locks. Must not know gRPC or text.
"""

import asyncio
import secrets
import time
from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np
import structlog

from octavo.gateway.workers.config import WorkerPoolConfig
from octavo.gateway.workers.decisions import Decision, Peer
from octavo.gateway.workers.errors import NoWorker, WorkerBusy, WorkerGone
from octavo.gateway.workers.events import BlockSubscription
from octavo.gateway.workers.executor import Executor, OnModel
from octavo.gateway.workers.link import OnFrame, RouterLink
from octavo.gateway.workers.migration import Migration
from octavo.gateway.workers.outputs import Output, Outputs, new_output, num_prompt_tokens
from octavo.gateway.workers.prefix_index import PrefixIndexes
from octavo.gateway.workers.queries import Queries, WorkerDetails, details_of
from octavo.gateway.workers.registry import Registry, RegistryLimits, WorkerRecord
from octavo.gateway.workers.router import candidates_of, choose
from octavo.gateway.workers.stats import PoolStats
from octavo.gateway.workers.views import LostReason, OutputSink, WorkerState, WorkerView
from octavo.gateway.workers.watch import ProcessWatch
from octavo.wire.bundle import BundleError
from octavo.wire.codec import ProtocolError, decode_to_gateway
from octavo.wire.messages import (
    AdminQuery,
    AdminReply,
    Drain,
    Heartbeat,
    KvEvents,
    Leaving,
    ModelCard,
    Pause,
    Register,
    Resume,
    Run,
    StepOutput,
    ToGateway,
    TokenizerBundle,
)
from octavo.wire.run_dir import RunDirError

log = structlog.get_logger(__name__)


class WorkerPool:
    """One per gateway process; every method on its event loop."""

    def __init__(
        self,
        config: WorkerPoolConfig,
        *,
        on_model: OnModel | None = None,
        make_link: Callable[[WorkerPoolConfig, OnFrame, PoolStats], RouterLink] = RouterLink,
        make_watch: Callable[[Callable[[int], None]], ProcessWatch] = ProcessWatch,
    ) -> None:
        """on_model(card, tokenizer files by name): called on the loop when a model becomes ready, perhaps again.
        make_link, make_watch: replaced in simulations, which have no sockets and processes."""
        self.stats = PoolStats()
        self.gateway_id = secrets.token_hex(16)  # new at each start: workers drop what the former process had asked for
        self._config = config
        limits = RegistryLimits(
            heartbeat_timeout_s=config.heartbeat_timeout_s,
            stall_timeout_s=config.stall_timeout_s,
            registration_token=config.registration_token,
        )
        self._registry = Registry(limits)
        self._outputs = Outputs(self.stats)
        self._prefixes = PrefixIndexes(max_nodes=config.max_prefix_nodes, stats=self.stats)
        self._queries = Queries()
        self._migration = Migration(
            self._registry,
            self._outputs,
            self.stats,
            send=self._send_again,
            check=lambda incarnation: self._executor.watch.check(incarnation),
            drains=lambda record: self._executor.drains(record),
            max_moves=config.max_migrations,
            timeout_s=config.migration_timeout_s,
        )
        self._outputs.on_turned_away, self._outputs.on_passed = self._migration.turned_away, self._passed
        self._link = make_link(config, self._take_frame, self.stats)
        self._executor = Executor(
            gateway_id=self.gateway_id,
            registry=self._registry,
            link=self._link,
            outputs=self._outputs,
            prefixes=self._prefixes,
            queries=self._queries,
            stats=self.stats,
            watch=make_watch(self._process_ended),
            on_model=on_model,
            on_lost=self._migration.lost,
        )
        self._outbox = self._executor.outbox
        self._executor.on_change.append(self._migration.soon)
        self._ticker: asyncio.Task[None] | None = None
        self._turn = 0

    def on_change(self, callback: Callable[[], None]) -> None:
        """Call back (on the loop) whenever the set of ready models or workers has changed."""
        self._executor.on_change.append(callback)

    @property
    def bound_endpoints(self) -> tuple[str, ...]:
        """Addresses that workers dial, with the ports that were chosen."""
        return self._link.bound

    async def start(self) -> None:
        """Bind. Raises wire.run_dir.RunDirError, wire.endpoints.EndpointError, wire.keys.KeyFileError, OSError."""
        self._link.open()
        self._ticker = asyncio.create_task(self._tick_forever(), name="worker-pool-ticker")

    def take_leave(self) -> None:
        """Tell every worker that this gateway ends. Well before `close`: what comes with a connection's end is lost."""
        self._executor.take_leave()

    async def close(self) -> None:
        """End every open output (on_lost DRAINING) and close the sockets. Idempotent."""
        ticker, self._ticker = self._ticker, None
        if ticker is not None:
            ticker.cancel()
            await asyncio.gather(ticker, return_exceptions=True)
        self._migration.close()
        self._executor.close()
        self._link.close()

    # ------------------------------------------------------------ what is there

    def cards(self) -> dict[str, ModelCard]:
        """Models with at least one ready worker, by name."""
        return {record.card.name: record.card for record in self._registry if record.state is WorkerState.READY}

    def workers(self) -> tuple[WorkerView, ...]:
        """Every registered worker."""
        now_s = time.monotonic()
        return tuple(record.view(now_s) for record in self._registry)

    @property
    def num_outputs(self) -> int:
        """Open outputs."""
        return len(self._outputs)

    @property
    def index_bytes(self) -> int:
        """Approximate size of the prefix indexes."""
        return self._prefixes.num_bytes

    def choose(self, model: str, prompt_ids: np.ndarray, salt: str) -> WorkerView:
        """The cheapest worker (`workers.router`); while an output is on probation at a worker, another one if possible.
        prompt_ids: int32 [T]. Raises NoWorker."""
        ready = [r for r in self._registry if r.state is WorkerState.READY and r.card.name == model]
        if not ready:
            raise NoWorker(model)
        ready = [record for record in ready if record.incarnation not in self._migration.on_probation] or ready
        match = self._prefixes.match(ready, prompt_ids, salt)
        candidates = candidates_of(ready, match, self._outputs.waiting_tokens)
        self._turn += 1
        best, reason = choose(candidates, turn=self._turn, num_tokens=len(prompt_ids), num_branches=match.num_branches)
        self.stats.routed[reason.value] += 1
        record = next(each for each in ready if each.incarnation == best.incarnation)
        return record.view(time.monotonic(), cached_tokens=best.cached_tokens)

    # ------------------------------------------------------------ requests

    def draw_handles(self, num_outputs: int) -> list[int]:
        """Unused handles for a request's `Run`. A handle that is never sent costs nothing."""
        return self._outputs.draw_handles(num_outputs)

    def submit(self, worker: WorkerView, run: Run, sinks: Sequence[OutputSink]) -> None:
        """Send a request with the handles drawn for it, one per sink. Raises WorkerBusy, WorkerGone,
        wire.codec.MessageTooLarge; then nothing was sent and the sinks are not used."""
        record = self._registry.find(worker.worker_id)
        if record is None or record.epoch != worker.epoch:
            raise WorkerGone(worker.worker_id)
        if record.in_flight + len(sinks) > record.max_requests:
            raise WorkerBusy(worker.worker_id, f"it has {record.in_flight} requests of this gateway")
        now_s = time.monotonic()
        outputs = [new_output(run, index, record, sink, now_s) for index, sink in enumerate(sinks)]
        if self._migration.accused and self._migration.is_accused(outputs[0]):
            for output in outputs:
                self._outputs.add(output)
                self._migration.hold(output)
            return
        self._outbox.send(record, run)
        for output in outputs:
            self._outputs.add(output)
            self._registry.opened(record, now_s)
        self._outputs.await_first_token(outputs[0], num_prompt_tokens(run) - worker.cached_tokens)

    # Cancels and pauses go with the output wherever it moves, and wait where no worker has it. Handles that are unknown
    # or have ended are ignored.

    def cancel(self, handle: int) -> None:
        """Ask the worker to end an output: no more tokens; on_finished(CANCELLED) or on_lost follows."""
        output = self._outputs.get(handle)
        if output is None or output.is_cancelled:
            return
        output.is_cancelled = True
        if self._migration.is_waiting(output):
            self._migration.forget(output)
            self._outputs.lose(output, LostReason.WORKER_LOST, "cancelled while no worker had it")
        else:
            self._outbox.cancel(output.incarnation, output.handle)

    def pause(self, handle: int) -> None:
        """Ask for no more steps of an output until `resume`; tokens of steps in flight still come."""
        output = self._outputs.get(handle)
        if output is not None and not output.is_paused:
            output.is_paused = True
            self.stats.pauses += 1
            # An output on probation must give a token before others may be tried: it is not paused until then.
            if not output.is_on_probation:
                self._tell_pace(output)

    def resume(self, handle: int) -> None:
        """Continue a paused output; does nothing if it is not paused."""
        output = self._outputs.get(handle)
        if output is not None and output.is_paused:
            output.is_paused = False
            self._tell_pace(output)

    def _tell_pace(self, output: Output) -> None:
        if not self._migration.is_waiting(output) and not output.is_cancelled:
            self._outbox.pace(output.incarnation, output.handle, Pause if output.is_paused else Resume)

    def drain(self, worker_id: str, *, grace_s: float) -> None:
        """Ask a worker to finish and leave. Raises WorkerGone, WorkerBusy."""
        record = self._registry.find(worker_id)
        if record is None:
            raise WorkerGone(worker_id, "not registered")
        self._outbox.send(record, Drain(grace_s=grace_s))
        self._executor.drains(record)

    async def query(
        self, *, audit: bool, flush: bool, timeout_s: float, model: str | None = None
    ) -> list[tuple[str, AdminReply]]:
        """Ask every worker (of a model) for its blocks. Returns answers that come in time, in order of worker ids."""
        records = [record for record in self._registry if model is None or record.card.name == model]
        question = AdminQuery(query_id=0, audit=audit, flush_prefix_cache=flush)
        answers = await self._queries.ask(records, self._outbox.try_send, question, timeout_s=timeout_s)
        return [(record.worker_id, reply) for record, reply in answers]

    async def query_details(self, *, max_cells: int, max_outputs: int, timeout_s: float) -> list[WorkerDetails]:
        """Ask every worker for a map of its blocks and for our outputs. Returns the answers that come in time, in order
        of worker ids. Outputs are named by the handles first drawn for them, even after a move."""
        question = AdminQuery(query_id=0, max_cells=max_cells, max_outputs=max_outputs)
        answers = await self._queries.ask(self._registry, self._outbox.try_send, question, timeout_s=timeout_s)
        found = []
        for record, reply in answers:
            details = details_of(record, reply, max_cells=max_cells, max_outputs=max_outputs)
            found.append(replace(details, held=self._outputs.by_name(record.incarnation, details.held)))
        return found

    def follow_blocks(self, model: str, salt: str) -> BlockSubscription:
        """Subscribe to the blocks of this salt that a model's workers have cached, and to every change. Raises
        FeedFull. The caller must call `leave` on it at the end."""
        return self._prefixes.follow(model, salt)

    def end_feeds(self) -> None:
        """End every subscription with FeedEnded."""
        self._prefixes.end_feeds()

    # ------------------------------------------------------------ messages from workers

    def _take_frame(self, peer: Peer, frame: bytes) -> None:
        """One frame from any peer. No frame may end the gateway."""
        try:
            decisions, ended = self._take(peer, frame, time.monotonic())
            for output in ended:
                self._output_ended(output)
            if decisions:
                self._executor.carry_out(decisions)
        except Exception:
            self.stats.protocol_errors["internal"] += 1
            log.exception("message_failed")

    def _take(self, peer: Peer, frame: bytes, now_s: float) -> tuple[list[Decision], list[Output]]:
        """Handle a frame. Returns the decisions it leads to and the outputs that ended. A peer's mistakes are
        counted."""
        try:
            message = decode_to_gateway(frame)
        except ProtocolError:
            self.stats.undecodable_frames += 1
            return [], []
        if isinstance(message, StepOutput):
            return self._take_step(peer, message, now_s)
        return self._take_rare(peer, message, now_s), []

    def _take_step(self, peer: Peer, message: StepOutput, now_s: float) -> tuple[list[Decision], list[Output]]:
        record = self._registry.sender(peer, message.epoch)
        if record is None:
            self.stats.stale_messages += 1
            return [], []
        if gap := self._registry.on_sequence(record, message.seq):
            self.stats.sequence_gaps += 1
            return gap, []
        record.take_step(now_s)
        return [], self._outputs.take(record.incarnation, message)

    def _take_rare(self, peer: Peer, message: ToGateway, now_s: float) -> list[Decision]:
        match message:
            case Heartbeat():
                return self._take_heartbeat(message, now_s)
            case Register():
                return self._take_register(peer, message, now_s)
            case TokenizerBundle():
                return self._take_bundle(peer, message)
        assert not isinstance(message, StepOutput)
        record = self._registry.sender(peer, message.epoch)
        if record is None:
            self.stats.stale_messages += 1
            return []
        match message:
            case KvEvents():
                self.stats.kv_events += len(message.events)
                self._prefixes.apply(record, message)
            case AdminReply():
                if not self._queries.take(record.incarnation, message):
                    self.stats.late_outputs += 1
            case Leaving():
                return self._registry.on_leaving(record, message.reason)
        return []

    def _take_heartbeat(self, message: Heartbeat, now_s: float) -> list[Decision]:
        if (record := self._registry.on_heartbeat(message, now_s)) is None:
            self.stats.stale_messages += 1
            return self._registry.on_stale_heartbeat(message.epoch)
        if message.is_draining:
            self._executor.drains(record)
        return []

    def _take_register(self, peer: Peer, message: Register, now_s: float) -> list[Decision]:
        known = self._registry.find(message.worker_id)
        if known is not None and known.epoch != message.epoch:
            # A restarted worker may register before the end of its former process is noticed.
            self._executor.watch.check(known.incarnation)
        return self._registry.on_register(peer, message, now_s)

    def _take_bundle(self, peer: Peer, message: TokenizerBundle) -> list[Decision]:
        try:
            return self._registry.on_bundle(peer, message)
        except BundleError:
            self.stats.protocol_errors["bundle"] += 1
            return []

    # ------------------------------------------------------------ what happens to workers and outputs

    def _process_ended(self, incarnation: int) -> None:
        # First take what it sent before its end, so that no complete output is thrown away. The queue may also hold
        # the registration of its restarted process, which must not be refused as a duplicate.
        record = self._registry.get(incarnation)
        if record is not None:
            record.is_watched = False
        self._link.drain_all()
        self._executor.carry_out(self._registry.on_exit(incarnation))

    def _passed(self, output: Output) -> None:
        """An output is no longer on probation: send the pause that waited for that."""
        self._migration.passed(output)
        if output.is_paused:
            self._tell_pace(output)

    def _send_again(self, record: WorkerRecord, run: Run, output: Output) -> None:
        """Send to another worker, followed by a pause if the output is paused."""
        self._outbox.send(record, run)
        if output.is_paused and not output.is_on_probation:
            self._outbox.pace(record.incarnation, output.handle, Pause)

    def _output_ended(self, output: Output) -> None:
        record = self._registry.get(output.incarnation)
        if record is not None:
            record.in_flight -= 1
            if output.is_faulted:
                self._outbox.cancel(output.incarnation, output.handle)

    async def _tick_forever(self) -> None:
        while True:
            await asyncio.sleep(self._config.tick_s)
            try:
                self._tick()
            except Exception:
                log.exception("tick_failed")

    def _tick(self) -> None:
        self._link.drain_all()
        self._executor.carry_out(self._registry.on_tick(time.monotonic()))
        self._outbox.flush()
        self._migration.soon()
        try:
            self.stats.rebinds += self._link.restore()
        except (RunDirError, OSError) as error:
            log.error("ipc_socket_lost", error=str(error))
