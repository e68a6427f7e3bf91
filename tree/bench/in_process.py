"""Scheduler, block manager, engine and a runner in one thread of this process, with a gateway that keeps what it gets:
for comparisons and soaks, on any runner."""

import time
from collections import defaultdict
from typing import Any

import numpy as np

from bench.mailbox import GATEWAY, Mailbox, tokens_of
from blockmgr.config import BlockManagerConfig
from blockmgr.ids import PrefixCache
from blockmgr.manager import BlockManager
from wire.messages import Cancel, Finished, Run, Sampling, StepOutput, TokenLogprobs
from worker.config import SchedulerConfig
from worker.engine import Engine, EngineConfig
from worker.runner import Runner
from worker.runner_warmup import WarmConfig
from worker.scheduler import Scheduler


class KeptMail(Mailbox):
    """tokens, logprobs, finished: by handle, until somebody takes them."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens: dict[int, list[int]] = defaultdict(list)
        self.logprobs: dict[int, list[TokenLogprobs]] = defaultdict(list)
        self.finished: dict[int, Finished] = {}
        self.num_tokens = 0

    def take(self, output: StepOutput) -> None:
        """Keep all of it."""
        for handle, token in tokens_of(output):
            self.tokens[handle].append(token)
            self.num_tokens += 1
        for handle, logprobs in output.logprobs.items():
            self.logprobs[handle].extend(logprobs)
        for finished in output.finished:
            self.finished[finished.handle] = finished


class InProcess:
    """An engine over one runner. Handles count from 1."""

    def __init__(
        self,
        runner: Runner,
        sizes: WarmConfig,
        *,
        max_batch_tokens: int,
        prefix_cache: PrefixCache = PrefixCache.ON,
        num_blocks: int | None = None,
        eos_token_ids: tuple[int, ...] = (),
        max_waiting: int = 1024,
    ) -> None:
        self.mail, self.num_asked = KeptMail(), 0
        self.blocks = BlockManager(
            BlockManagerConfig(
                num_blocks=num_blocks or sizes.num_blocks,
                block_size=sizes.block_size,
                max_slots=sizes.max_slots,
                max_blocks_per_slot=-(-(sizes.max_model_len + 1) // sizes.block_size),
                fingerprint=b"bench",
                prefix_cache=prefix_cache,
            )
        )
        config = SchedulerConfig(
            max_model_len=sizes.max_model_len,
            vocab_size=sizes.vocab_size,
            eos_token_ids=eos_token_ids,
            max_num_seqs=sizes.max_slots,
            max_waiting=max_waiting,
            max_batch_tokens=max(max_batch_tokens, sizes.max_slots),
            max_in_flight=runner.max_in_flight,
        )
        self.scheduler = Scheduler(config, self.blocks)
        self.engine = Engine(
            config=EngineConfig(epoch="bench", audit_every_steps=0),
            scheduler=self.scheduler,
            blocks=self.blocks,
            runner=runner,
            inbox=self.mail,
            outbox=self.mail,
            clock=time.perf_counter,
        )

    def ask(self, prompt_ids_T: np.ndarray, **sampling: Any) -> int:
        """Put one request into the inbox; its handle."""
        self.num_asked += 1
        run = Run(
            handle=self.num_asked,
            request_id=f"bench-{self.num_asked}",
            prompt_ids=prompt_ids_T.astype(np.int32).tobytes(),
            sampling=Sampling(**{"temperature": 0.0, "seed": self.num_asked, **sampling}),
        )
        self.mail.coming.append((GATEWAY, run))
        return self.num_asked

    def cancel(self, handle: int) -> None:
        """Give an output up."""
        self.mail.coming.append((GATEWAY, Cancel(handles=(handle,))))

    def step(self) -> None:
        """One step of the engine."""
        self.engine.step()

    def outputs(self, asks: list[tuple[np.ndarray, dict[str, Any]]]) -> list[list[int]]:
        """Tokens of requests that are asked all at once. Raises RuntimeError where one ends with an error."""
        handles = [self.ask(prompt_ids_T, **sampling) for prompt_ids_T, sampling in asks]
        while not all(handle in self.mail.finished for handle in handles):
            self.step()
        ended = [self.mail.finished.pop(handle) for handle in handles]
        if bad := [each for each in ended if each.error]:
            raise RuntimeError(f"{len(bad)} requests failed, the first with {bad[0].error}")
        return [self.mail.tokens.pop(handle) for handle in handles]
