"""Grammars of requests: waits until they are compiled, fills the masks of every step, and counts both for /metrics.

The engine's thread owns the manager; compiled grammars come from other threads through one queue. A request whose
grammar takes longer than it may to compile fails alone. Must not know: how a grammar is written, sockets, the model.

Legend: N rows of the step that have a grammar · W words of 32 tokens
"""

import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from llguidance import LLExecutor
from prometheus_client import CollectorRegistry, Counter, Histogram
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from octavo.grammar.errors import GrammarRefused, Refusal
from octavo.wire.messages import Grammar, Run
from octavo.worker.config import GrammarConfig
from octavo.worker.grammar.compiler import GrammarCache, GrammarCompiler, Outcome
from octavo.worker.grammar.matcher import GrammarMatcher
from octavo.worker.grammar.vocabulary import Vocabulary, load_vocabulary
from octavo.worker.loading.loaded import Loaded
from octavo.worker.loading.model_card import Described
from octavo.worker.scheduler.plan import GatewayIndex, StepMasks
from octavo.worker.scheduler.request import Matcher, Request, failure, token_ids_of
from octavo.worker.scheduler.results import ConstrainedRow
from octavo.worker.scheduler.scheduler import Scheduler

_MIN_PARALLEL = 4
_EVERYTHING = np.int32(-1)
COMPILE_BUCKETS_S = (0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0)
MASK_BUCKETS_S = (0.00005, 0.0001, 0.0002, 0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2)


class GrammarObserver(Protocol):
    """Called in the engine's thread, except on_compiled."""

    def on_masks(self, *, seconds: float, num_rows: int) -> None:
        """The masks of one step were filled."""

    def on_refused(self, refusal: Refusal) -> None:
        """A request's grammar could not be compiled."""


class GrammarMetrics:
    """Implements `GrammarObserver` with the metrics of a worker."""

    def __init__(self, registry: CollectorRegistry, cache: GrammarCache) -> None:
        self._compile_s = Histogram(
            "octavo_grammar_compile_seconds", "Compiling one grammar", buckets=COMPILE_BUCKETS_S, registry=registry
        )
        self._mask_s = Histogram(
            "octavo_grammar_mask_seconds", "Filling the masks of one step", buckets=MASK_BUCKETS_S, registry=registry
        )
        self._masks = Counter("octavo_grammar_masks", "Masks filled, one per token", registry=registry)
        self._refused = Counter(
            "octavo_grammar_failures", "Grammars that could not be compiled", ["reason"], registry=registry
        )
        for refusal in Refusal:
            self._refused.labels(refusal.value)
        registry.register(CacheCollector(cache))

    def on_compiled(self, seconds: float) -> None:
        """From a compiling thread."""
        self._compile_s.observe(seconds)

    def on_masks(self, *, seconds: float, num_rows: int) -> None:
        """The masks of one step were filled."""
        self._mask_s.observe(seconds)
        self._masks.inc(num_rows)

    def on_refused(self, refusal: Refusal) -> None:
        """A request's grammar could not be compiled."""
        self._refused.labels(refusal.value).inc()


class CacheCollector(Collector):
    """Reads the cache at a scrape."""

    def __init__(self, cache: GrammarCache) -> None:
        self._cache = cache

    def collect(self) -> Iterator[Metric]:
        """Size, hits and misses."""
        cache = self._cache
        yield GaugeMetricFamily("octavo_grammar_cache_entries", "Compiled grammars kept", value=len(cache))
        yield GaugeMetricFamily("octavo_grammar_cache_bytes", "What they take, estimated", value=cache.num_bytes)
        yield CounterMetricFamily("octavo_grammar_cache_hits", "Grammars found compiled", value=cache.num_hits)
        yield CounterMetricFamily(
            "octavo_grammar_cache_misses", "Grammars that had to be compiled", value=cache.num_misses
        )


class MaskFiller:
    """Fills the masks of one step, with several threads if it has several rows.

    A token that would end an output too soon (min_tokens, ignore_eos) is left out if the grammar allows another one;
    otherwise the grammar is complete, and the output ends.
    """

    def __init__(self) -> None:
        self._executor: LLExecutor | None = None

    def fill(self, rows: list[ConstrainedRow], vocabulary: Vocabulary) -> tuple[StepMasks, list[tuple[Request, str]]]:
        """The masks, and the requests whose grammar failed, with the reason. Rows of those allow everything, since
        their tokens are dropped."""
        bits_NW = np.full((len(rows), vocabulary.num_words), _EVERYTHING, np.int32)
        matchers = [(row.request.matcher, n) for n, row in enumerate(rows) if row.request is not None]
        self._compute([(matcher, n) for matcher, n in matchers if matcher is not None], bits_NW)
        broken: list[tuple[Request, str]] = []
        for n, row in enumerate(rows):
            if row.request is None or row.request.matcher is None:
                continue
            if row.request.matcher.error:
                broken.append((row.request, row.request.matcher.error))
                bits_NW[n] = _EVERYTHING
            elif row.early:
                _leave_out(bits_NW[n], vocabulary.bits(row.early))
        return StepMasks(index_N=np.array([row.position for row in rows], np.int64), bits_NW=bits_NW), broken

    def _compute(self, matchers: list[tuple[Matcher, int]], bits_NW: np.ndarray) -> None:
        pairs = [(matcher.matcher, n) for matcher, n in matchers if isinstance(matcher, GrammarMatcher)]
        if len(pairs) < max(_MIN_PARALLEL, len(matchers)):
            for matcher, n in matchers:
                matcher.fill(bits_NW[n])
            return
        if self._executor is None:
            self._executor = LLExecutor()
        num_bytes = bits_NW.shape[1] * bits_NW.itemsize
        self._executor.unsafe_compute_mask_ptr(pairs, bits_NW.ctypes.data, num_bytes, len(bits_NW))


def _leave_out(bits_W: np.ndarray, early_W: np.ndarray) -> None:
    others_W = bits_W & ~early_W
    if others_W.any():
        bits_W[:] = others_W


@dataclass(slots=True, eq=False)
class _Compiling:
    """A request that waits for its grammar. outcome: written once, by another thread."""

    gateway: GatewayIndex
    run: Run
    grammar: Grammar
    until_s: float
    outcome: Outcome | None = None
    is_answered: bool = False


class GrammarManager:
    """Holds requests until their grammars are compiled, and makes the masks of every step.

    wake: wakes an engine that waits; called from other threads.
    """

    def __init__(
        self,
        compiler: GrammarCompiler,
        *,
        timeout_s: float,
        observer: GrammarObserver,
        wake: Callable[[], None] = lambda: None,
    ) -> None:
        self._compiler = compiler
        self._timeout_s = timeout_s
        self._observer = observer
        self._wake = wake
        self._filler = MaskFiller()
        self.waiting: deque[_Compiling] = deque()  # in the order of their timeouts
        self._ready: deque[_Compiling] = deque()

    def submit(self, gateway: GatewayIndex, run: Run, now_s: float) -> None:
        """A request that the scheduler holds until its grammar is compiled."""
        grammar = run.sampling.grammar
        assert grammar is not None
        waiting = _Compiling(gateway, run, grammar, now_s + self._timeout_s)
        self.waiting.append(waiting)
        self._compiler.submit(grammar, lambda outcome: self._take(waiting, outcome))

    def deliver(self, scheduler: Scheduler, now_s: float) -> None:
        """Hand over compiled grammars, and end requests whose grammars took too long."""
        while self._ready:
            self._answer(self._ready.popleft(), scheduler, now_s)
        while self.waiting and (self.waiting[0].is_answered or self.waiting[0].until_s <= now_s):
            waiting = self.waiting.popleft()
            if not waiting.is_answered:
                late = GrammarRefused(Refusal.TIMEOUT, f"took longer than {self._timeout_s:g} s to compile")
                waiting.outcome = late if waiting.outcome is None else waiting.outcome
                self._answer(waiting, scheduler, now_s)

    def masks(self, scheduler: Scheduler, now_s: float) -> StepMasks:
        """Masks for the newest step, once all tokens before it are known. A request whose grammar fails here ends."""
        started_s = time.perf_counter()
        masks, broken = self._filler.fill(scheduler.constraints.rows(), self._compiler.vocabulary)
        for request, detail in broken:
            scheduler.constraints.broken(request, detail, now_s=now_s)
        self._observer.on_masks(seconds=time.perf_counter() - started_s, num_rows=len(masks.index_N))
        return masks

    def close(self) -> None:
        """Accept no more work. Idempotent."""
        self._compiler.close()

    def _take(self, waiting: _Compiling, outcome: Outcome) -> None:
        """Called in a thread of the compiler."""
        waiting.outcome = outcome
        self._ready.append(waiting)
        self._wake()

    def _answer(self, waiting: _Compiling, scheduler: Scheduler, now_s: float) -> None:
        if waiting.is_answered:
            return
        waiting.is_answered = True
        outcome = waiting.outcome
        assert outcome is not None
        if isinstance(outcome, GrammarRefused):
            self._observer.on_refused(outcome.refusal)
            self._fail(waiting, str(outcome), scheduler, now_s)
            return
        num_resumed = waiting.run.num_resumed_tokens
        if num_resumed and not outcome.replay(token_ids_of(waiting.run)[-num_resumed:].tolist()):
            self._fail(waiting, "the output so far does not match it", scheduler, now_s)
            return
        scheduler.constraints.ready(waiting.gateway, waiting.run, outcome, now_s=now_s)

    def _fail(self, waiting: _Compiling, detail: str, scheduler: Scheduler, now_s: float) -> None:
        ending = failure("CONSTRAINT", f"constraint: {detail}")
        scheduler.constraints.failed(waiting.gateway, waiting.run, ending, now_s=now_s)


class EarlyVocabulary:
    """Reads the vocabulary while the model is still loading: it holds Python's lock for half a second, which costs
    nothing while the start waits for kernels."""

    def __init__(self) -> None:
        self._known: tuple[dict[str, bytes], Vocabulary] | None = None

    def read(self, described: Described) -> None:
        """Read now, in this thread. Errors are raised by `of`."""
        with suppress(Exception):
            self._known = described.files, _read(described.files, described.vocab_size, described.eos_token_ids)

    def of(self, loaded: Loaded) -> Vocabulary:
        """The vocabulary read early, or else read now. Raises GrammarRefused."""
        files, card = loaded.tokenizer_files, loaded.card
        if self._known is not None and self._known[0] is files:
            return self._known[1]
        return _read(files, card.vocab_size, card.eos_token_ids)


def _read(files: dict[str, bytes], vocab_size: int, eos_token_ids: tuple[int, ...]) -> Vocabulary:
    return load_vocabulary(files, vocab_size=vocab_size, eos_token_ids=eos_token_ids)


def make_grammar_manager(
    config: GrammarConfig,
    loaded: Loaded,
    registry: CollectorRegistry,
    *,
    wake: Callable[[], None],
    early: EarlyVocabulary,
) -> GrammarManager:
    """From a worker's settings and the tokenizer that it loaded. Usable at once; unless it was read early, the
    vocabulary is read in the background."""
    cache = GrammarCache(max_entries=config.cache_entries, max_bytes=config.cache_bytes)
    metrics = GrammarMetrics(registry, cache)
    compiler = GrammarCompiler(
        lambda: early.of(loaded),
        limits=config.limits,
        cache=cache,
        num_threads=config.num_threads,
        on_compiled=metrics.on_compiled,
    )
    compiler.warm_up()
    return GrammarManager(compiler, timeout_s=config.timeout_s, observer=metrics, wake=wake)
