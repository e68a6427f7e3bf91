"""Puts the desk for grammars together from a worker's settings and the tokenizer that it loaded."""

from collections.abc import Callable

from prometheus_client import CollectorRegistry

from worker.config import GrammarConfig
from worker.grammar_cache import GrammarCache
from worker.grammar_compiler import GrammarCompiler
from worker.grammar_desk import GrammarDesk
from worker.grammar_metrics import GrammarMetrics
from worker.grammar_vocabulary import load_vocabulary
from worker.loaded import Loaded


def make_grammars(
    config: GrammarConfig, loaded: Loaded, registry: CollectorRegistry, *, wake: Callable[[], None]
) -> GrammarDesk:
    """Ready at once; the vocabulary is read in the background."""
    cache = GrammarCache(max_entries=config.cache_entries, max_bytes=config.cache_bytes)
    metrics = GrammarMetrics(registry, cache)
    compiler = GrammarCompiler(
        lambda: load_vocabulary(
            loaded.tokenizer_files, vocab_size=loaded.card.vocab_size, eos_token_ids=loaded.card.eos_token_ids
        ),
        limits=config.limits,
        cache=cache,
        num_threads=config.num_threads,
        on_compiled=metrics.on_compiled,
    )
    compiler.warm_up()
    return GrammarDesk(compiler, timeout_s=config.timeout_s, observer=metrics, wake=wake)
