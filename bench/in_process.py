"""An engine in one thread of this process: scheduler, block manager and engine around any runner, and a mailbox
instead of gateways.

Must not know: devices, what is measured.
"""

import time
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from octavo.blockmgr.config import BlockManagerConfig
from octavo.blockmgr.ids import PrefixCache
from octavo.blockmgr.manager import BlockManager
from octavo.wire.messages import Cancel, Finished, Run, SamplingParams, StepOutput, TokenLogprobs
from octavo.worker.config import SchedulerConfig
from octavo.worker.engine.engine import Engine, EngineConfig
from octavo.worker.engine.interfaces import InboxMessage, OutboxMessage
from octavo.worker.loading.warmup import WarmConfig
from octavo.worker.runners.interface import Runner
from octavo.worker.scheduler.plan import GatewayIndex
from octavo.worker.scheduler.scheduler import Scheduler

GATEWAY = GatewayIndex(0)


class Mailbox:
    """Both ports of a `worker.engine.engine.Engine`. Subclasses say what to do with a step's output."""

    def __init__(self) -> None:
        self.coming: list[tuple[GatewayIndex, InboxMessage]] = []

    def drain(self) -> list[tuple[GatewayIndex, InboxMessage]]:
        """Take all messages."""
        coming, self.coming = self.coming, []
        return coming

    def wait(self, timeout_s: float) -> None:
        """Returns at once: nothing arrives by itself."""

    def put(self, gateway: GatewayIndex, message: OutboxMessage) -> None:
        """Take a step's output; there are no other messages, since no gateway asks for any."""
        if isinstance(message, StepOutput):
            self.take(message)

    def put_all(self, message: OutboxMessage) -> None:
        """Drop events of the prefix cache: nobody listens."""

    def take(self, output: StepOutput) -> None:
        """Take the output of a step."""
        raise NotImplementedError


def tokens_of(output: StepOutput) -> Iterator[tuple[int, int]]:
    """(handle, token) pairs, unpacked as a gateway does."""
    handles, tokens = np.frombuffer(output.handles, np.int64), np.frombuffer(output.tokens, np.int32)
    return zip(handles.tolist(), tokens.tolist(), strict=True)


@dataclass(frozen=True, slots=True, kw_only=True)
class Assembly:
    """Parts that belong together."""

    blocks: BlockManager
    scheduler: Scheduler
    engine: Engine


def assemble(
    runner: Runner,
    sizes: WarmConfig,
    mail: Mailbox,
    *,
    max_batch_tokens: int,
    prefix_cache: PrefixCache,
    eos_token_ids: tuple[int, ...] = (),
    max_waiting: int = 1024,
    num_host_blocks: int = 0,
    max_copies_in: int = 64,
    copy_s_per_block: float | None = None,
) -> Assembly:
    """Make the parts around a runner. sizes: the runner's limits. num_host_blocks, max_copies_in, copy_s_per_block: of
    its second tier. Raises ValueError if they do not fit one another."""
    blocks = BlockManager(
        BlockManagerConfig(
            num_blocks=sizes.num_blocks,
            block_size=sizes.block_size,
            max_slots=sizes.max_slots,
            max_blocks_per_slot=blocks_of(sizes.max_model_len, sizes.block_size),
            fingerprint=b"bench",
            prefix_cache=prefix_cache,
            num_host_blocks=num_host_blocks,
            max_copies_in=max_copies_in,
        )
    )
    config = SchedulerConfig(
        max_model_len=sizes.max_model_len,
        vocab_size=sizes.vocab_size,
        eos_token_ids=eos_token_ids,
        max_num_seqs=sizes.max_slots,
        max_waiting=max_waiting,
        max_batch_tokens=max_batch_tokens,
        max_in_flight=runner.max_in_flight,
        copy_s_per_block=copy_s_per_block,
    )
    scheduler = Scheduler(config, blocks)
    engine = Engine(
        config=EngineConfig(epoch="bench", audit_every_steps=0),
        scheduler=scheduler,
        blocks=blocks,
        runner=runner,
        inbox=mail,
        outbox=mail,
        clock=time.perf_counter,
    )
    return Assembly(blocks=blocks, scheduler=scheduler, engine=engine)


def blocks_of(max_model_len: int, block_size: int) -> int:
    """Blocks of the longest request plus one token, since a step that runs ahead samples one that is not used."""
    return -(-(max_model_len + 1) // block_size)


def run_of(handle: int, prompt_ids_T: np.ndarray, **sampling: Any) -> Run:
    """A request as a gateway sends it."""
    return Run(
        handle=handle,
        request_id=f"bench-{handle}",
        prompt_ids=prompt_ids_T.astype(np.int32).tobytes(),
        sampling=SamplingParams(**sampling),
    )


class KeptMail(Mailbox):
    """tokens, logprobs, finished: by handle, kept until they are taken."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens: dict[int, list[int]] = defaultdict(list)
        self.logprobs: dict[int, list[TokenLogprobs]] = defaultdict(list)
        self.finished: dict[int, Finished] = {}
        self.num_tokens = 0

    def take(self, output: StepOutput) -> None:
        """Keep everything."""
        for handle, token in tokens_of(output):
            self.tokens[handle].append(token)
            self.num_tokens += 1
        for handle, logprobs in output.logprobs.items():
            self.logprobs[handle].extend(logprobs)
        for finished in output.finished:
            self.finished[finished.handle] = finished


class InProcess:
    """An engine over one runner. Handles count from 1. tier: arguments of `assemble` for a second tier."""

    def __init__(
        self,
        runner: Runner,
        sizes: WarmConfig,
        *,
        max_batch_tokens: int,
        prefix_cache: PrefixCache = PrefixCache.ON,
        mail: KeptMail | None = None,
        **tier: Any,
    ) -> None:
        self.mail, self.num_asked = mail or KeptMail(), 0
        budget = max(max_batch_tokens, sizes.max_slots)  # the least that a scheduler accepts
        parts = assemble(runner, sizes, self.mail, max_batch_tokens=budget, prefix_cache=prefix_cache, **tier)
        self.blocks, self.scheduler, self.engine = parts.blocks, parts.scheduler, parts.engine

    def ask(self, prompt_ids_T: np.ndarray, **sampling: Any) -> int:
        """Put one request into the inbox; returns its handle. Greedy unless told otherwise."""
        self.num_asked += 1
        sampling = {"temperature": 0.0, "seed": self.num_asked, **sampling}
        self.mail.coming.append((GATEWAY, run_of(self.num_asked, prompt_ids_T, **sampling)))
        return self.num_asked

    def cancel(self, handle: int) -> None:
        """Cancel an output."""
        self.mail.coming.append((GATEWAY, Cancel(handles=(handle,))))

    def step(self) -> None:
        """Run one step of the engine."""
        self.engine.step()

    def outputs(self, asks: list[tuple[np.ndarray, dict[str, Any]]]) -> list[list[int]]:
        """The tokens of requests that are sent all at once. Raises RuntimeError if one ends with an error."""
        handles = [self.ask(prompt_ids_T, **sampling) for prompt_ids_T, sampling in asks]
        while not all(handle in self.mail.finished for handle in handles):
            self.step()
        ended = [self.mail.finished.pop(handle) for handle in handles]
        if bad := [each for each in ended if each.error]:
            raise RuntimeError(f"{len(bad)} requests failed, the first with {bad[0].error}")
        return [self.mail.tokens.pop(handle) for handle in handles]
