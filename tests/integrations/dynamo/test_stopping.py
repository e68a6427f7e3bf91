"""A backend that stops, on stand-ins for Dynamo's modules: what still runs has ended when `cleanup` returns."""

import argparse
import asyncio
import importlib
import sys
from collections.abc import AsyncIterator, Iterator
from types import ModuleType
from typing import Any
from unittest.mock import MagicMock

import pytest

MODULES = (
    "dynamo", "dynamo._core", "dynamo.common", "dynamo.common.backend", "dynamo.common.backend.health_check",
    "dynamo.common.backend.publisher", "dynamo.common.configuration", "dynamo.common.configuration.groups",
    "dynamo.common.configuration.groups.runtime_args", "dynamo.common.constants", "dynamo.common.utils",
    "dynamo.common.utils.runtime", "dynamo.common.utils.token_ids", "dynamo.llm", "dynamo.llm.exceptions",
)  # fmt: skip


class EngineShutdown(Exception):
    """By which Dynamo's frontend goes to another backend."""


@pytest.fixture
def engine(monkeypatch: pytest.MonkeyPatch) -> Iterator[ModuleType]:
    """The module, imported anew."""
    for name in MODULES:
        monkeypatch.setitem(sys.modules, name, MagicMock())
    sys.modules["dynamo.common.backend"].LLMEngine = object  # type: ignore[attr-defined]
    sys.modules["dynamo.llm"].exceptions.EngineShutdown = EngineShutdown  # type: ignore[attr-defined]
    before = sys.modules.pop("octavo_dynamo.engine", None)
    yield importlib.import_module("octavo_dynamo.engine")
    del sys.modules["octavo_dynamo.engine"]
    if before is not None:
        sys.modules["octavo_dynamo.engine"] = before


class Call:
    """A stream that gives one response, and is slow to see that it was cancelled."""

    def __init__(self) -> None:
        self.has_begun = asyncio.Event()
        self._is_cancelled = asyncio.Event()

    async def __aiter__(self) -> AsyncIterator[object]:
        yield object()
        self.has_begun.set()
        await self._is_cancelled.wait()
        for _ in range(20):
            await asyncio.sleep(0)
        raise asyncio.CancelledError

    def cancel(self) -> None:
        self._is_cancelled.set()

    def cancelled(self) -> bool:
        return self._is_cancelled.is_set()


async def test_streams_are_sent_elsewhere_before_cleanup_returns(
    engine: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(engine, "PASS_ON_S", 0.0)
    monkeypatch.setattr(engine, "generate_request", MagicMock())
    monkeypatch.setattr(engine, "Chunks", lambda **_: MagicMock(of=lambda _: [{"token_ids": [1]}], usage=None))
    backend, call = engine.OctavoEngine(argparse.Namespace(drain_grace=0)), Call()
    backend._service, backend._limits = MagicMock(generate=lambda _: call), MagicMock(ends=())
    backend._service.close = _nothing

    async def read() -> list[Any]:
        return [chunk async for chunk in backend.generate({}, MagicMock(is_stopped=lambda: False))]

    reading = asyncio.create_task(read())
    await call.has_begun.wait()
    await backend.cleanup()
    assert reading.done()
    assert isinstance(reading.exception(), EngineShutdown)


async def _nothing() -> None:
    """There is no channel to close."""
