"""An engine with lists for its links: messages that a test puts in, messages that the engine sends."""

from collections.abc import Callable

import numpy as np

from octavo.blockmgr.manager import BlockManager
from octavo.wire.messages import Finished, Run, SamplingParams, StepOutput
from octavo.worker.engine.engine import Engine, EngineConfig
from octavo.worker.engine.interfaces import InboxMessage, OutboxMessage, StepReport
from octavo.worker.scheduler.plan import GatewayIndex
from octavo.worker.scheduler.scheduler import Scheduler
from tests.support.worker.scheduling import WorldConfig


class ListInbox:
    """Messages that the test puts in; counts waits."""

    def __init__(self) -> None:
        self.messages: list[tuple[GatewayIndex, InboxMessage]] = []
        self.waits: list[float] = []
        self.on_wait: Callable[[], None] = lambda: None

    def put(self, message: InboxMessage, gateway: int = 0) -> None:
        self.messages.append((GatewayIndex(gateway), message))

    def drain(self) -> list[tuple[GatewayIndex, InboxMessage]]:
        messages, self.messages = self.messages, []
        return messages

    def wait(self, timeout_s: float) -> None:
        self.waits.append(timeout_s)
        self.on_wait()


class ListOutbox:
    """Keeps all messages that were sent."""

    def __init__(self) -> None:
        self.sent: list[tuple[int, OutboxMessage]] = []
        self.sent_to_all: list[OutboxMessage] = []

    def put(self, gateway: GatewayIndex, message: OutboxMessage) -> None:
        self.sent.append((gateway, message))

    def put_all(self, message: OutboxMessage) -> None:
        self.sent_to_all.append(message)

    def steps_for(self, gateway: int) -> list[StepOutput]:
        return [message for to, message in self.sent if to == gateway and isinstance(message, StepOutput)]

    def tokens_of(self, handle: int, gateway: int = 0) -> list[int]:
        tokens: list[int] = []
        for output in self.steps_for(gateway):
            handles = np.frombuffer(output.handles, "<i8")
            tokens += np.frombuffer(output.tokens, "<i4")[handles == handle].tolist()
        return tokens

    def finished(self, gateway: int = 0) -> dict[int, Finished]:
        return {end.handle: end for output in self.steps_for(gateway) for end in output.finished}


class Watcher:
    """Keeps everything that was observed."""

    def __init__(self) -> None:
        self.reports: list[StepReport] = []
        self.ends: list[Finished] = []

    def on_step(self, report: StepReport) -> None:
        self.reports.append(report)

    def on_finished(self, finished: Finished) -> None:
        self.ends.append(finished)


class Rig:
    """An engine with everything around it."""

    def __init__(self, config: WorldConfig, *, audit_every_steps: int = 1) -> None:
        self.now_s = 0.0
        self.blocks = BlockManager(config.blocks())
        self.scheduler = Scheduler(config.scheduler(), self.blocks)
        self.runner = config.runner()
        self.inbox, self.outbox, self.watcher = ListInbox(), ListOutbox(), Watcher()
        self.engine = Engine(
            config=EngineConfig(epoch="e1", audit_every_steps=audit_every_steps, idle_wait_s=0.25),
            scheduler=self.scheduler,
            blocks=self.blocks,
            runner=self.runner,
            inbox=self.inbox,
            outbox=self.outbox,
            clock=self.tick,
            observer=self.watcher,
        )

    def tick(self) -> float:
        self.now_s += 0.001
        return self.now_s

    def steps(self, count: int = 100) -> None:
        for _ in range(count):
            self.engine.step()


def run_message(handle: int, prompt: list[int], **sampling: int) -> Run:
    return Run(
        handle=handle,
        request_id=f"r{handle}",
        prompt_ids=np.asarray(prompt, "<i4").tobytes(),
        sampling=SamplingParams(**{"seed": handle, "max_tokens": 4, **sampling}),  # type: ignore[arg-type]
    )
