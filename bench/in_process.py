"""An engine in one thread of this process, with a gateway that keeps what it gets: for comparisons and soaks, on any
runner.

Must not know: devices, what is measured.
"""

from collections import defaultdict
from typing import Any

import numpy as np

from bench.assembly import assemble, run_of
from bench.mailbox import GATEWAY, Mailbox, tokens_of
from octavo.blockmgr.ids import PrefixCache
from octavo.wire.messages import Cancel, Finished, StepOutput, TokenLogprobs
from octavo.worker.loading.warmup import WarmConfig
from octavo.worker.runners.interface import Runner


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
    ) -> None:
        self.mail, self.num_asked = KeptMail(), 0
        budget = max(max_batch_tokens, sizes.max_slots)  # the least that a scheduler takes
        parts = assemble(runner, sizes, self.mail, max_batch_tokens=budget, prefix_cache=prefix_cache)
        self.blocks, self.scheduler, self.engine = parts.blocks, parts.scheduler, parts.engine

    def ask(self, prompt_ids_T: np.ndarray, **sampling: Any) -> int:
        """Put one request into the inbox; its handle. Greedy where nothing else is said."""
        self.num_asked += 1
        sampling = {"temperature": 0.0, "seed": self.num_asked, **sampling}
        self.mail.coming.append((GATEWAY, run_of(self.num_asked, prompt_ids_T, **sampling)))
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
