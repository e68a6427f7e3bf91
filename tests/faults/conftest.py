"""Whole services on the oracle, with faults inside where a row asks for them."""

import asyncio
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from contextlib import AbstractAsyncContextManager, ExitStack, asynccontextmanager, suppress
from pathlib import Path

import pytest

from octavo.worker.runners.oracle.model import OracleModel
from tests.support.faults.bench import FaultBench
from tests.support.services.service import Service, free_port, serve

INJECTED = Path(__file__).parent / "injected"
ORACLE = (
    "--model=oracle", "--runner=oracle", "--oracle-step-delay-s=0.005", "--num-blocks=4096", "--max-num-seqs=64",
    "--max-model-len=4096",
)  # fmt: skip


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """What takes minutes runs only where it is asked for by its mark."""
    if "long" not in config.option.markexpr:
        long = [item for item in items if item.get_closest_marker("long")]
        config.hook.pytest_deselected(items=long)
        items[:] = [item for item in items if not item.get_closest_marker("long")]


@pytest.fixture
def bench(tmp_path: Path) -> Callable[..., AbstractAsyncContextManager[FaultBench]]:
    """`async with bench("--workers=2", nan_token_id=77) as faults:` serves, warmed up, with those faults inside;
    descriptors: `ulimit -n` of its processes."""

    @asynccontextmanager
    async def started(*arguments: str, descriptors: int | None = None, **injected: object) -> AsyncIterator[FaultBench]:
        metrics_port = free_port()
        settings = (*ORACLE, f"--metrics-port={metrics_port}", *arguments)
        with serve(tmp_path, *settings, injected=injected, injector=INJECTED, descriptors=descriptors) as service:
            faults = FaultBench(service=service, model=OracleModel(), metrics_port=metrics_port)
            await faults.begin()
            yield faults

    return started


class Standing:
    """A service of one worker that many tests use: started for the first of them, and anew after one that failed."""

    def __init__(self, new_folder: Callable[[], Path], injected: Mapping[str, object]) -> None:
        self._new_folder, self._injected = new_folder, injected
        self._open = ExitStack()
        self._running: tuple[Service, int] | None = None

    def running(self) -> tuple[Service, int]:
        """It, and the port of its gateway's metrics."""
        if self._running is None:
            port = free_port()
            settings = (*ORACLE, "--workers=1", f"--metrics-port={port}")
            started = serve(self._new_folder(), *settings, injected=self._injected, injector=INJECTED)
            self._running = self._open.enter_context(started), port
        return self._running

    def abandon(self) -> None:
        """By force: nobody knows what state it is in."""
        self._running = None
        failure = AssertionError("a test failed")
        with suppress(AssertionError):
            self._open.__exit__(type(failure), failure, None)

    def stop(self) -> None:
        """As a user does, which has to end well."""
        self._open.close()


@pytest.fixture(scope="module")
def standing_service(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Standing]:
    """Of this module's tests, with the faults of its STANDING inside, if it has one."""
    injected = getattr(request.module, "STANDING", {})
    standing = Standing(lambda: tmp_path_factory.mktemp("standing"), injected)
    yield standing
    standing.stop()


@pytest.fixture
def standing(standing_service: Standing) -> Callable[[], AbstractAsyncContextManager[FaultBench]]:
    """`async with standing() as faults:` the same as `bench("--workers=1")`, on a service that has served other tests:
    for rows that measure no memory, which the service keeps and uses again."""

    @asynccontextmanager
    async def entered() -> AsyncIterator[FaultBench]:
        try:
            service, metrics_port = await asyncio.to_thread(standing_service.running)
            faults = FaultBench(service=service, model=OracleModel(), metrics_port=metrics_port)
            faults.num_rpcs = await faults.num_ended()
            await faults.begin()
            yield faults
        except BaseException:
            await asyncio.to_thread(standing_service.abandon)
            raise

    return entered
