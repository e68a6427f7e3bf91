"""Which service `octavo scale` changes: the one that is named, never another."""

from pathlib import Path

import grpc
import pytest

from octavo.cli.main import main
from octavo.cli.serve.record import ServiceRecord
from octavo.cli.tools import scale as scale_module


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[str]:
    """Targets that were dialled; two services run here, and nobody answers for them."""
    monkeypatch.chdir(tmp_path)
    for name in ("OCTAVO_HOST", "OCTAVO_PORT", "OCTAVO_ADMIN_PORT"):
        monkeypatch.delenv(name, raising=False)
    targets: list[str] = []

    def open_channel(target: str, *_: object) -> grpc.Channel:
        targets.append(target)
        return grpc.insecure_channel(f"unix:{tmp_path}/nobody")

    records = [
        ServiceRecord(pid=1, started_s=0.0, address=f"127.0.0.1:{port}", run_dir=f"/run/{port}", processes=())
        for port in (50051, 50061)
    ]
    monkeypatch.setattr(scale_module, "running_services", lambda: records)
    monkeypatch.setattr(scale_module, "open_channel", open_channel)
    return targets


@pytest.mark.parametrize("flags", [("--port", "50061"), ("--host", "0.0.0.0", "--port", "50061")])
def test_of_several_services_the_one_at_the_address_is_meant(asked: list[str], flags: tuple[str, ...]) -> None:
    assert main(["scale", "2", *flags]) == 1
    assert len(asked) == 1
    assert asked[0].startswith("unix:/run/50061/")


@pytest.mark.parametrize("flags", [("--port", "1"), ("--host", "10.0.0.5")])
def test_no_other_service_than_the_named_one_is_changed(
    asked: list[str], flags: tuple[str, ...], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["scale", "2", *flags]) == 1
    assert asked == []
    what, numbers, _ = capsys.readouterr().err.strip().splitlines()
    assert what == "error: no such service runs here"
    assert numbers.endswith("there run here: 127.0.0.1:50051, 127.0.0.1:50061")


def test_without_an_address_two_services_are_one_too_many(asked: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["scale", "2"]) == 1
    assert asked == []
    assert "which service is meant?" in capsys.readouterr().err


def test_one_service_needs_no_address(asked: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    only = ServiceRecord(pid=1, started_s=0.0, address="127.0.0.1:7", run_dir="/run/7", processes=())
    monkeypatch.setattr(scale_module, "running_services", lambda: [only])
    assert main(["scale", "2"]) == 1
    assert len(asked) == 1


@pytest.mark.parametrize("number", ["0", "65", "two", "\u0661", 5000 * "1"], ids=lambda number: number[:8])
def test_a_number_that_there_cannot_be_is_refused_in_a_line(
    number: str, asked: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["scale", "m", number]) == 2
    assert "is not a number from 1 to 64" in capsys.readouterr().err.splitlines()[1][:100]
    assert asked == []
