"""Whole services on the oracle, with faults inside where a row asks for them."""

from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from pathlib import Path

import pytest

from tests.support.fault_bench import FaultBench
from tests.support.service import free_port, serve
from worker.oracle_model import OracleModel

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
    """`async with bench("--workers=2", nan_token_id=77) as faults:` serves, warmed up, with those faults inside."""

    @asynccontextmanager
    async def started(*arguments: str, **injected: object) -> AsyncIterator[FaultBench]:
        metrics_port = free_port()
        settings = (*ORACLE, f"--metrics-port={metrics_port}", *arguments)
        with serve(tmp_path, *settings, injected=injected, injector=INJECTED) as service:
            faults = FaultBench(service=service, model=OracleModel(), metrics_port=metrics_port)
            await faults.begin()
            yield faults

    return started
