"""OpenAI's HTTP interface as `octavo serve --openai` has it, driven by the `openai` client."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.services.interop import leave_a_stream, run_inside
from tests.support.services.service import Service, free_port, serve


@pytest.fixture(scope="module")
def fronted(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Service, str]]:
    """A service of two gateways, and the base URL of its front."""
    port = free_port()
    arguments = ("--num-blocks=512", "--gateways=2", f"--openai={port}")
    with serve(tmp_path_factory.mktemp("fronted"), *arguments) as running:
        running.wait_until_supervised()
        yield running, f"http://127.0.0.1:{port}/v1"


@pytest.mark.parametrize("driver", ["openai_client", "openai_front"])
def test_the_openai_client_drives_our_own_front(driver: str, smg_python: Path, fronted: tuple[Service, str]) -> None:
    service, url = fronted
    run_inside(smg_python, driver, timeout_s=240, OPENAI_BASE_URL=url)
    service.wait_until_idle()
    assert [list(audit.violations) for audit in service.audit()] == [[]]


def test_an_openai_caller_that_leaves_frees_its_blocks(smg_python: Path, fronted: tuple[Service, str]) -> None:
    service, url = fronted
    leave_a_stream(smg_python, service, OPENAI_BASE_URL=url)
