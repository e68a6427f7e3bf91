"""The load of a soak: requests of all kinds and lengths with shared prefixes, cancels at random moments, and a canary
whose answer must not change.

Must not know: the device, the runner.
"""

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from bench.in_process import InProcess
from octavo.wire.messages import WireFinishReason

KINDS: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0.0},
    "seeded": {"temperature": 0.8},
    "filtered": {"temperature": 0.7, "top_k": 20, "top_p": 0.8},
    "min_p": {"temperature": 1.0, "min_p": 0.05},
    "penalties": {"temperature": 0.7, "repetition_penalty": 1.1, "presence_penalty": 0.5, "frequency_penalty": 0.2},
    "logprobs": {"temperature": 0.6, "num_logprobs": 5},
    "min_tokens": {"temperature": 0.9, "min_tokens": 8, "stop_token_ids": (11, 12, 13), "ignore_eos": False},
}
NUM_SHARED = 16
CANCELLED_EACH = 0.2  # share of the requests, at any point of their life
CANARY_OUTPUT = 48


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadSizes:
    """concurrency: requests open at once. Lengths: maximum numbers of tokens."""

    concurrency: int
    longest_prompt: int
    longest_output: int
    vocab_size: int


@dataclass(kw_only=True)
class Load:
    """Keeps an engine busy. ended: counts by reason. asked: counts by kind. num_mistakes: answers with a wrong
    length."""

    engine: InProcess
    sizes: LoadSizes
    rng: np.random.Generator
    open: dict[int, tuple[str, int]] = field(default_factory=dict)  # (kind, maximum output length) by handle
    doomed: dict[int, int] = field(default_factory=dict)  # tokens after which a request is cancelled
    asked: Counter[str] = field(default_factory=Counter)
    ended: Counter[str] = field(default_factory=Counter)
    num_mistakes: int = 0

    def __post_init__(self) -> None:
        self._shared = [self._ids(self.sizes.longest_prompt // 2) for _ in range(NUM_SHARED)]

    def fill_up(self) -> None:
        """Send requests until as many are open as there should be."""
        while len(self.open) < self.sizes.concurrency:
            kind = str(self.rng.choice(list(KINDS)))
            shared = self._shared[self.rng.integers(NUM_SHARED)][: self.rng.integers(0, self.sizes.longest_prompt // 2)]
            prompt = np.concatenate([shared, self._ids(int(self.rng.integers(1, self.sizes.longest_prompt // 2)))])
            num_output = int(self.rng.integers(1, self.sizes.longest_output + 1))
            sampling = {"ignore_eos": True, "seed": int(self.rng.integers(2**63)), **KINDS[kind]}
            handle = self.engine.ask(prompt, max_tokens=num_output, **sampling)
            self.open[handle] = (kind, num_output)
            self.asked[kind] += 1
            if self.rng.random() < CANCELLED_EACH:
                self.doomed[handle] = int(self.rng.integers(0, num_output))

    def cancel_some(self) -> None:
        """Cancel requests that are due: before their first token, or in the middle."""
        tokens = self.engine.mail.tokens
        for handle, after in list(self.doomed.items()):
            if len(tokens.get(handle, ())) >= after and self.rng.random() < 0.3:
                self.engine.cancel(handle)
                del self.doomed[handle]

    def take_ended(self) -> None:
        """Count requests that have ended, and forget them."""
        mail = self.engine.mail
        for handle in [handle for handle in mail.finished if handle in self.open]:
            finished, (_, num_output) = mail.finished.pop(handle), self.open.pop(handle)
            tokens, logprobs = mail.tokens.pop(handle, []), mail.logprobs.pop(handle, [])
            self.doomed.pop(handle, None)
            self.ended[finished.error or finished.reason.name] += 1
            is_short = finished.reason is WireFinishReason.LENGTH and len(tokens) != num_output
            self.num_mistakes += is_short or len(tokens) != finished.completion_tokens
            self.num_mistakes += bool(logprobs) and len(logprobs) != len(tokens)

    def _ids(self, length: int) -> np.ndarray:
        return self.rng.integers(0, self.sizes.vocab_size, length).astype(np.int32)


@dataclass(frozen=True, slots=True, kw_only=True)
class FirstDifference:
    """Where a canary's answer first differed from the first answer, and how far apart the two best choices were, in
    nats."""

    at_s: float
    index: int
    gap: float


@dataclass(kw_only=True)
class Canary:
    """One greedy prompt, sent over and over. first: its first answer. partings: where later answers differed."""

    engine: InProcess
    prompt_ids_T: np.ndarray
    clock: Callable[[], float]
    first: tuple[int, ...] = ()
    num_answers: int = 0
    num_failed: int = 0
    partings: list[FirstDifference] = field(default_factory=list)
    handle: int | None = None

    def ask(self) -> None:
        """Send the prompt again, if the last one has been answered."""
        if self.handle is None:
            self.handle = self.engine.ask(
                self.prompt_ids_T, max_tokens=CANARY_OUTPUT, ignore_eos=True, temperature=0.0, seed=0, num_logprobs=2
            )

    def take(self) -> None:
        """Take the answer, if it is complete."""
        mail = self.engine.mail
        if self.handle is None or self.handle not in mail.finished:
            return
        finished = mail.finished.pop(self.handle)
        tokens, logprobs = tuple(mail.tokens.pop(self.handle, [])), mail.logprobs.pop(self.handle, [])
        self.handle = None
        self.num_answers += 1
        if finished.error:
            self.num_failed += 1
            return
        self.first = self.first or tokens
        if tokens != self.first:
            index = next(i for i, (one, other) in enumerate(zip(tokens, self.first, strict=True)) if one != other)
            best, second = logprobs[index].top_logprobs[:2]
            self.partings.append(FirstDifference(at_s=self.clock(), index=index, gap=best - second))
