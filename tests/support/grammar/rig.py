"""A worker's engine with grammars, with lists for its links: requests in, texts out."""

import time
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import msgspec
import numpy as np

from octavo.blockmgr.config import BlockManagerConfig
from octavo.blockmgr.ids import PrefixCache
from octavo.blockmgr.manager import BlockManager
from octavo.grammar.errors import Refusal
from octavo.grammar.limits import GrammarLimits
from octavo.wire.messages import Cancel, Finished, Grammar, GrammarKind, Pause, Resume, Run, SamplingParams, StepOutput
from octavo.worker.config import SchedulerConfig
from octavo.worker.engine.engine import Engine, EngineConfig
from octavo.worker.engine.interfaces import InboxMessage, OutboxMessage
from octavo.worker.grammar.compiler import GrammarCache, GrammarCompiler, LoadVocabulary
from octavo.worker.grammar.manager import GrammarManager
from octavo.worker.runners.interface import Runner
from octavo.worker.scheduler.plan import GatewayIndex
from octavo.worker.scheduler.scheduler import Scheduler

GATEWAY = GatewayIndex(0)


@dataclass(eq=False)
class Counting:
    """Implements `worker.grammar.manager.GrammarObserver`."""

    mask_s: list[float] = field(default_factory=list)
    refusals: list[Refusal] = field(default_factory=list)

    def on_masks(self, *, seconds: float, num_rows: int) -> None:
        self.mask_s.append(seconds)

    def on_refused(self, refusal: Refusal) -> None:
        self.refusals.append(refusal)


@dataclass(eq=False)
class Output:
    """What came for one handle."""

    token_ids: list[int] = field(default_factory=list)
    finished: Finished | None = None


class GrammarRig:
    """The real engine, scheduler and block manager around a runner; the test's thread is the engine's."""

    def __init__(
        self,
        runner: Runner,
        load_vocabulary: LoadVocabulary,
        scheduler: SchedulerConfig,
        *,
        num_blocks: int,
        block_size: int = 16,
        limits: GrammarLimits | None = None,
        timeout_s: float = 10.0,
        clock: Any = time.monotonic,
    ) -> None:
        self.blocks = BlockManager(
            BlockManagerConfig(
                num_blocks=num_blocks,
                block_size=block_size,
                max_slots=scheduler.max_num_seqs,
                max_blocks_per_slot=-(-scheduler.max_model_len // block_size),
                fingerprint=b"rig",
                prefix_cache=PrefixCache.ON,
            )
        )
        self.scheduler = Scheduler(scheduler, self.blocks)
        self.cache = GrammarCache(max_entries=512, max_bytes=1 << 28)
        self.compiler = GrammarCompiler(load_vocabulary, limits=limits or GrammarLimits(), cache=self.cache)
        self.observed = Counting()
        self.outputs: dict[int, Output] = {}
        self._inbox: list[tuple[GatewayIndex, InboxMessage]] = []
        self.engine = Engine(
            config=EngineConfig(epoch="e", audit_every_steps=50),
            scheduler=self.scheduler,
            blocks=self.blocks,
            runner=runner,
            inbox=self,
            outbox=self,
            clock=clock,
            grammars=GrammarManager(self.compiler, timeout_s=timeout_s, observer=self.observed),
        )

    def ask(self, handle: int, prompt: Iterable[int], grammar: Grammar | None = None, **sampling: Any) -> None:
        """Send one request; keywords that are fields of Run go there, the others into the sampling parameters."""
        of_run = ("fork_handles", "num_resumed_tokens", "timeout_s", "pooling")
        run = {name: sampling.pop(name) for name in of_run if name in sampling}
        params = msgspec.structs.replace(SamplingParams(max_tokens=256, grammar=grammar), **sampling)
        prompt_ids = np.array(list(prompt), "<i4").tobytes()
        for each in (handle, *run.get("fork_handles", ())):
            self.outputs[each] = Output()
        message = Run(handle=handle, request_id=f"r{handle}", prompt_ids=prompt_ids, sampling=params, **run)
        self._inbox.append((GATEWAY, message))

    def cancel(self, *handles: int) -> None:
        """Cancel these at the next step."""
        self._inbox.append((GATEWAY, Cancel(handles=handles)))

    def pause(self, *handles: int) -> None:
        """Pause these, as if their callers did not read."""
        self._inbox.append((GATEWAY, Pause(handles=handles)))

    def resume(self, *handles: int) -> None:
        """Resume these, as if their callers read on."""
        self._inbox.append((GATEWAY, Resume(handles=handles)))

    def step(self) -> None:
        """One turn of the loop."""
        num_steps = self.engine.num_steps
        self.engine.step()
        if self.engine.num_steps == num_steps:
            time.sleep(0.001)  # lets grammars be compiled

    def run(self, timeout_s: float = 120.0) -> dict[int, Output]:
        """Step until every request has ended, and check that the audit is clean; the outputs by handle."""
        until_s = time.monotonic() + timeout_s
        while not all(output.finished for output in self.outputs.values()):
            assert time.monotonic() < until_s, "requests hang"
            self.step()
        while self.scheduler.has_work:
            self.step()
        assert self.blocks.audit().violations == ()
        assert self.blocks.num_active == 0
        return self.outputs

    def close(self) -> None:
        """End the compiler's threads."""
        self.compiler.close()

    # ------------------------------------------------------------ inbox and outbox

    def drain(self) -> list[tuple[GatewayIndex, InboxMessage]]:
        messages, self._inbox = self._inbox, []
        return messages

    def wait(self, timeout_s: float) -> None:
        time.sleep(0.001)

    def put(self, gateway: GatewayIndex, message: OutboxMessage) -> None:
        if not isinstance(message, StepOutput):
            return
        handles = np.frombuffer(message.handles, "<i8").tolist()
        for handle, token in zip(handles, np.frombuffer(message.tokens, "<i4").tolist(), strict=True):
            self.outputs[handle].token_ids.append(token)
        for finished in message.finished:
            assert self.outputs[finished.handle].finished is None, "an output ended twice"
            self.outputs[finished.handle].finished = finished

    def put_all(self, message: OutboxMessage) -> None:
        pass


def json_schema(text: str) -> Grammar:
    """The grammar of this schema."""
    return Grammar(kind=GrammarKind.JSON_SCHEMA, source=text)
