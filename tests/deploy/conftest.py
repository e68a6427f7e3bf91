"""The metrics that gateway and worker really export, read from their own registries."""

from collections.abc import Iterable

import pytest
from prometheus_client import CollectorRegistry
from prometheus_client.metrics_core import Metric

from octavo.gateway.observability.meters import GatewayMeters
from octavo.gateway.observability.metrics import GatewayCollector, registry_of
from octavo.gateway.requests.admission import ConnectionsInUse
from octavo.gateway.rpc.connections import ConnectionLimiter, ConnectionLimits
from octavo.gateway.workers.stats import PoolStats
from octavo.wire.messages import Capacity, ModelCard
from octavo.worker.engine.interfaces import EngineStats, LinkStats
from octavo.worker.grammar.compiler import GrammarCache
from octavo.worker.grammar.manager import GrammarMetrics
from octavo.worker.metrics import CacheInfo, InfoCollector, SnapshotCollector, StepMetrics

SUFFIXES = {
    "counter": ("_total", "_created"),
    "histogram": ("_bucket", "_sum", "_count", "_created"),
    "info": ("_info",),
    "gauge": ("",),
}
CARD = ModelCard(
    name="m", fingerprint="f", architecture="Qwen2ForCausalLM", dtype="float32", max_model_len=8, vocab_size=4,
    eos_token_ids=(0,), default_sampling={}, tokenizer_digest="d",
)  # fmt: skip
CAPACITY = Capacity(num_blocks=8, block_size=16, max_num_seqs=1, max_waiting=1, max_batch_tokens=8)


def series_names(families: Iterable[Metric]) -> set[str]:
    """Names of the series that these families can have, also of those without a sample yet."""
    return {family.name + suffix for family in families for suffix in SUFFIXES.get(family.type, ("",))}


@pytest.fixture(scope="session")
def gateway_series() -> set[str]:
    """What a gateway exports."""
    connections = ConnectionLimiter(ConnectionLimits(total=1, per_peer=1), ConnectionsInUse())
    collector = GatewayCollector(GatewayMeters(), PoolStats(), connections=connections)
    return series_names(registry_of(collector).collect())


@pytest.fixture(scope="session")
def worker_series() -> set[str]:
    """What a worker exports."""
    registry = CollectorRegistry()
    StepMetrics(registry)
    GrammarMetrics(registry, GrammarCache(max_entries=1, max_bytes=1))
    registry.register(SnapshotCollector(EngineStats, LinkStats(), tuple))
    registry.register(InfoCollector(CARD, CAPACITY, version="0", cache=CacheInfo()))
    return series_names(registry.collect())
