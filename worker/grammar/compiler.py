"""Compiles grammars in its own threads, so that the engine is not blocked, and caches them for later requests.

llguidance releases the interpreter while it works, and its fuel bounds time and memory of one compile. How long a
request may wait is not known here: `worker.grammar.manager` ends the wait. Must not know: requests, steps.
"""

import time
from collections import OrderedDict
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from threading import Lock

import numpy as np
from llguidance import LLMatcher

from octavo.grammar.check import refused
from octavo.grammar.errors import GrammarRefused
from octavo.grammar.limits import GrammarLimits
from octavo.grammar.source import to_llguidance
from octavo.wire.messages import Grammar
from octavo.worker.grammar.matcher import GrammarMatcher
from octavo.worker.grammar.vocabulary import Vocabulary

Outcome = GrammarMatcher | GrammarRefused
OnOutcome = Callable[[Outcome], None]
LoadVocabulary = Callable[[], Vocabulary]

# Measured with llguidance 1.9: 190 kB for a schema of 30 properties in 900 bytes.
_BYTES_OF_ONE = 64 * 1024
_BYTES_PER_SOURCE_BYTE = 128


def estimated_bytes(grammar: Grammar) -> int:
    """Approximate size of the compiled grammar."""
    return _BYTES_OF_ONE + _BYTES_PER_SOURCE_BYTE * len(grammar.source)


class GrammarCache:
    """Compiled grammars: matchers at their beginning, to be forked. The least recently used goes first; bounded by
    count and by estimated bytes. Any thread may use it."""

    def __init__(self, *, max_entries: int, max_bytes: int) -> None:
        self._max_entries = max_entries
        self._max_bytes = max_bytes
        self._entries: OrderedDict[Grammar, GrammarMatcher] = OrderedDict()
        self._lock = Lock()
        self.num_bytes = 0
        self.num_hits = 0
        self.num_misses = 0

    def __len__(self) -> int:
        return len(self._entries)

    def get(self, grammar: Grammar) -> GrammarMatcher | None:
        """A fork of the cached matcher, or None."""
        with self._lock:
            matcher = self._entries.get(grammar)
            if matcher is None:
                self.num_misses += 1
                return None
            self.num_hits += 1
            self._entries.move_to_end(grammar)
            return matcher.fork()

    def put(self, grammar: Grammar, matcher: GrammarMatcher) -> None:
        """Keep the matcher, unless it is larger than the whole cache may be."""
        size = estimated_bytes(grammar)
        with self._lock:
            if grammar in self._entries or size > self._max_bytes or not self._max_entries:
                return
            self._entries[grammar] = matcher
            self.num_bytes += size
            while len(self._entries) > self._max_entries or self.num_bytes > self._max_bytes:
                oldest, _ = self._entries.popitem(last=False)
                self.num_bytes -= estimated_bytes(oldest)


class GrammarCompiler:
    """One per worker. load_vocabulary: called once, in one of its threads. on_compiled(seconds): called in them."""

    def __init__(
        self,
        load_vocabulary: LoadVocabulary,
        *,
        limits: GrammarLimits,
        cache: GrammarCache,
        num_threads: int = 2,
        on_compiled: Callable[[float], None] = lambda seconds: None,
    ) -> None:
        self.cache = cache
        self._load_vocabulary = load_vocabulary
        self._limits = limits
        self._on_compiled = on_compiled
        self._threads = ThreadPoolExecutor(num_threads, thread_name_prefix="grammar")
        self._lock = Lock()
        self._vocabulary: Vocabulary | GrammarRefused | None = None

    def warm_up(self) -> None:
        """Read the vocabulary now, in a thread, rather than for the first grammar."""
        self._threads.submit(self._known_vocabulary)

    def submit(self, grammar: Grammar, on_outcome: OnOutcome) -> None:
        """Compile in a thread. on_outcome: called there, once, with a matcher for this request alone or the refusal."""
        self._threads.submit(partial(self._work, grammar, on_outcome))

    def close(self) -> None:
        """Take no more work; running compiles end by themselves. Idempotent."""
        self._threads.shutdown(wait=False, cancel_futures=True)

    @property
    def vocabulary(self) -> Vocabulary:
        """Set once a matcher was made from it."""
        assert isinstance(self._vocabulary, Vocabulary)
        return self._vocabulary

    def _work(self, grammar: Grammar, on_outcome: OnOutcome) -> None:
        try:
            on_outcome(self.cache.get(grammar) or self._compile(grammar))
        except GrammarRefused as refusal:
            on_outcome(refusal)
        except BaseException as error:  # a defect here, or a panic of the library: of this request alone
            on_outcome(refused(f"{type(error).__name__}: {error}"))

    def _compile(self, grammar: Grammar) -> GrammarMatcher:
        vocabulary = self._known_vocabulary()
        started_s = time.monotonic()
        source = to_llguidance(grammar, self._limits, vocabulary.call_tags)
        matcher = LLMatcher(vocabulary.tokenizer, source, log_level=0, limits=self._limits.for_parser())
        # The first mask here: it builds most of the lexer, and finds grammars that nothing matches.
        is_good = not matcher.is_error() and GrammarMatcher(matcher).fill(np.empty(vocabulary.num_words, np.int32))
        self._on_compiled(time.monotonic() - started_s)
        if not is_good:
            raise refused(matcher.get_error())
        compiled = GrammarMatcher(matcher)
        self.cache.put(grammar, compiled)
        return compiled.fork()

    def _known_vocabulary(self) -> Vocabulary:
        with self._lock:
            if self._vocabulary is None:
                try:
                    self._vocabulary = self._load_vocabulary()
                except GrammarRefused as refusal:
                    self._vocabulary = refusal
        if isinstance(self._vocabulary, GrammarRefused):
            raise self._vocabulary
        return self._vocabulary
