"""A gateway without workers, for benches of the gateway alone: a stand-in takes its requests and supplies the tokens.

Must not know: what is asked, what is measured.
"""

import logging
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager

import structlog

from octavo.gateway.app import Gateway
from octavo.gateway.config import ConnectionConfig, GatewayConfig, RequestLimits
from octavo.gateway.workers.config import WorkerPoolConfig
from octavo.wire.messages import Capacity, ModelCard
from tests.support.gateway.fake_pool import FakePool, FakeRun, worker_view

CAPACITY = Capacity(num_blocks=1 << 22, block_size=16, max_num_seqs=1 << 14, max_waiting=4096, max_batch_tokens=8192)


@asynccontextmanager
async def lone_gateway(
    address: str,
    card: ModelCard,
    files: Mapping[str, bytes],
    limits: RequestLimits,
    *,
    on_run: Callable[[FakeRun], None] | None = None,
    connection: ConnectionConfig = ConnectionConfig(),  # noqa: B008  (frozen)
) -> AsyncIterator[tuple[Gateway, FakePool]]:
    """A gateway that listens until the block ends. files: of the tokenizer. on_run: called with each request as it
    comes."""
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(logging.WARNING))
    pool = FakePool(views=[worker_view(card=card, capacity=CAPACITY)], on_run=on_run)
    config = GatewayConfig(
        workers=WorkerPoolConfig(endpoints=()),
        listen_address=address,
        metrics_address=None,
        limits=limits,
        connection=connection,
    )
    gateway = Gateway(config, pool=pool)  # type: ignore[arg-type]
    gateway.models.on_model(card, files)
    await gateway.models.close()
    await gateway.start()
    try:
        yield gateway, pool
    finally:
        await gateway.stop()
