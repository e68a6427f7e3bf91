"""tritonclient, as callers of KServe and Triton use it, against `octavo serve`."""

from pathlib import Path

from tests.support.services.interop import run_inside
from tests.support.services.service import Service


def test_tritonclient_gets_what_it_asks_for(triton_python: Path, service: Service) -> None:
    run_inside(triton_python, "triton_client", timeout_s=280, KSERVE_TARGET=service.target)
    service.wait_until_idle()
    assert [(list(audit.violations), audit.num_active_blocks) for audit in service.audit()] == [([], 0)]
