"""A gateway in this process, with a fake pool behind it and a real gRPC channel in front."""

import asyncio
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import grpc
import pytest
import structlog
from tokenizers import Tokenizer

from octavo.gateway.app import Gateway
from octavo.gateway.config import GatewayConfig, RequestLimits
from octavo.gateway.observability.tracing import Tracing
from octavo.gateway.text.model_text import ModelText
from octavo.gateway.text.process_pool import InProcessRenderer, Renderer
from octavo.gateway.workers.config import WorkerPoolConfig
from octavo.v1 import admin_pb2_grpc, inference_pb2_grpc, load_pb2_grpc, model_pb2_grpc
from tests.support.gateway.fake_pool import FakePool
from tests.support.gateway.tokenizers_tiny import tiny_files


@pytest.fixture(autouse=True)
def _quiet_logs() -> Iterator[None]:
    with structlog.testing.capture_logs():
        yield


@pytest.fixture(scope="session")
def tiny_text() -> ModelText:
    """The text side of the small tokenizer."""
    return ModelText(tiny_files(), num_ids=600)


@pytest.fixture(scope="session")
def qwen_files(shared: Path) -> dict[str, bytes]:
    """The real Qwen2.5 tokenizer."""
    folder = shared / "data" / "tokenizer"
    return {name: (folder / name).read_bytes() for name in ("tokenizer.json", "tokenizer_config.json")}


@pytest.fixture(scope="session")
def qwen_text(qwen_files: dict[str, bytes]) -> ModelText:
    """The text side of the real Qwen2.5."""
    return ModelText(qwen_files, num_ids=151_665)


@pytest.fixture(scope="session")
def qwen_tokenizer(qwen_files: dict[str, bytes]) -> Tokenizer:
    """The library's own object, to compare with."""
    return Tokenizer.from_buffer(qwen_files["tokenizer.json"])


@dataclass(eq=False)
class Served:
    """A running gateway and stubs of a channel to it."""

    gateway: Gateway
    pool: FakePool
    channel: grpc.aio.Channel
    inference: inference_pb2_grpc.InferenceServiceStub
    models: model_pb2_grpc.ModelServiceStub
    admin_channel: grpc.aio.Channel | None
    admin: admin_pb2_grpc.AdminServiceStub | None
    load: load_pb2_grpc.LoadServiceStub

    async def until(self, condition: Callable[[], object], *, max_turns: int = 100_000) -> None:
        """Wait for something to become true on the server's side; the limits are for what never does. max_turns: of
        2 ms each, for what has to come at once: in turns, since a pause of the machine is one turn."""
        async with asyncio.timeout(60.0):
            for _ in range(max_turns):
                if condition():
                    return
                await asyncio.sleep(0.002)
        raise TimeoutError(f"not true after {max_turns} turns")


Serve = Callable[..., Any]


@pytest.fixture
def serve(tmp_path: Path) -> Serve:
    """`async with serve(pool, **changes of GatewayConfig) as served`; the small tokenizer, or the one in `files`, is
    loaded for each model."""

    @asynccontextmanager
    async def serving(
        pool: FakePool | None = None,
        *,
        files: dict[str, bytes] | None = None,
        renderer: Renderer | None = None,
        tracing: Tracing | None = None,
        **changes: Any,
    ) -> AsyncIterator[Served]:
        pool = pool or FakePool()
        config = GatewayConfig(
            workers=WorkerPoolConfig(endpoints=()),
            listen_address=f"unix:{tmp_path}/grpc.sock",
            metrics_address=None,
            limits=RequestLimits(constraint_timeout_s=30.0),  # the machine may pause
        )
        changed = replace(config, **changes)
        gateway = Gateway(changed, pool=pool, renderer=renderer or InProcessRenderer(), tracing=tracing)  # type: ignore[arg-type]
        for card in pool.cards().values():
            gateway.models.on_model(card, files or tiny_files())
        await gateway.models.close()
        await gateway.start()
        channel = grpc.aio.insecure_channel(gateway.listeners.address, options=[("grpc.enable_retries", 0)])
        admin = grpc.aio.insecure_channel(gateway.listeners.admin_address) if gateway.listeners.admin_address else None
        try:
            yield Served(
                gateway=gateway,
                pool=pool,
                channel=channel,
                inference=inference_pb2_grpc.InferenceServiceStub(channel),
                models=model_pb2_grpc.ModelServiceStub(channel),
                admin_channel=admin,
                admin=admin_pb2_grpc.AdminServiceStub(admin) if admin else None,
                load=load_pb2_grpc.LoadServiceStub(channel),
            )
        finally:
            await channel.close()
            if admin:
                await admin.close()
            await gateway.stop()

    return serving


@pytest.fixture
def vllm_stub() -> Callable[[Any], Any]:
    """vllm_stub(channel); skips where the stubs are not installed."""
    return pytest.importorskip("smg_grpc_proto").vllm_engine_pb2_grpc.VllmEngineStub  # type: ignore[no-any-return]
