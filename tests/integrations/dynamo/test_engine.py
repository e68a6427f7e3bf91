"""The backend itself, with stand-ins for what it imports of Dynamo."""

import argparse
import asyncio
import importlib
import sys
from types import ModuleType
from typing import Any
from unittest.mock import MagicMock

import pytest

from octavo_dynamo.service import Load

OF_DYNAMO = (
    *("dynamo", "dynamo._core", "dynamo.common", "dynamo.common.backend", "dynamo.common.backend.health_check"),
    *("dynamo.common.backend.publisher", "dynamo.common.configuration", "dynamo.common.configuration.groups"),
    *("dynamo.common.configuration.groups.runtime_args", "dynamo.common.constants", "dynamo.common.utils"),
    *("dynamo.common.utils.runtime", "dynamo.common.utils.token_ids", "dynamo.llm", "dynamo.llm.exceptions"),
)
A_LOAD = Load(used_blocks=0, total_blocks=8)


class Discovery:
    """Where backends are listed; the first change of each kind fails."""

    def __init__(self) -> None:
        self.is_listed = True
        self._has_failed = {True: False, False: False}

    async def register_endpoint_instance(self) -> None:
        self._change(True)

    async def unregister_endpoint_instance(self) -> None:
        self._change(False)

    def _change(self, is_listed: bool) -> None:
        if not self._has_failed[is_listed]:
            self._has_failed[is_listed] = True
            raise ConnectionError("etcd is away")
        self.is_listed = is_listed


@pytest.fixture
def engine(monkeypatch: pytest.MonkeyPatch) -> Any:
    for name in OF_DYNAMO:
        monkeypatch.setitem(sys.modules, name, MagicMock())
    backend = ModuleType("dynamo.common.backend")
    backend.__dict__.update(LLMEngine=object, EngineConfig=MagicMock(), LlmRegistration=MagicMock())
    backend.__dict__.update(WorkerConfig=MagicMock())
    monkeypatch.setitem(sys.modules, "dynamo.common.backend", backend)
    monkeypatch.delitem(sys.modules, "octavo_dynamo.engine", raising=False)
    made = importlib.import_module("octavo_dynamo.engine").OctavoEngine(argparse.Namespace())
    monkeypatch.delitem(sys.modules, "octavo_dynamo.engine")
    return made


async def test_a_list_that_cannot_be_changed_is_changed_later(engine: Any) -> None:
    """Else a backend whose service came back would never be asked again."""
    discovery = Discovery()
    listing = asyncio.create_task(engine._keep_listed(discovery))

    async def tell(load: Load | None, *, until: bool) -> None:
        async with asyncio.timeout(60):
            while discovery.is_listed is not until:
                engine._take_load(load)
                await asyncio.sleep(0)

    await tell(None, until=False)
    await tell(A_LOAD, until=True)
    listing.cancel()
    await asyncio.gather(listing, return_exceptions=True)
