"""`octavo verify --address`: a running service against transformers, over gRPC, as a user calls it."""

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from octavo.cli.errors import CliError
from octavo.cli.main import main
from octavo.cli.settings.addresses import split_address
from tests.support.model.checkpoints import write_tiny_checkpoint
from tests.support.services.service import Service, environment, serve


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_checkpoint(tmp_path_factory.mktemp("served") / "tiny", torch_dtype="bfloat16")


@pytest.fixture(scope="module")
def service(folder: Path) -> Iterator[Service]:
    with serve(folder.parent, f"--model=tiny={folder}", "--device=cpu", "--num-blocks=200") as service:
        yield service


def verify(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "octavo.cli.main", "verify", *arguments, "--prompts", "3", "--max-new-tokens", "6"]
    variables = environment() | {"COLUMNS": "80"}
    return subprocess.run(command, env=variables, capture_output=True, text=True, timeout=300, check=False)


@pytest.mark.alone
def test_a_service_is_verified_over_grpc(service: Service, folder: Path, tmp_path: Path) -> None:
    done = verify(str(folder), "--address", service.target)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "as served: tiny, bfloat16" in done.stdout
    assert "a request: together" in done.stdout
    assert "all 7 comparisons are within their limits" in done.stdout
    assert "…" not in done.stdout
    other = write_tiny_checkpoint(tmp_path, seed=1, torch_dtype="bfloat16")
    done = verify(str(other), "--address", service.target)
    assert done.returncode == 1
    assert "of 7 comparisons are beyond their limit" in done.stdout


@pytest.mark.alone
def test_a_model_that_is_not_served_is_told_with_those_that_are(
    service: Service, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["verify", str(folder), "--address", service.target, "--model-name", "absent"]) == 2
    assert "the service serves tiny" in capsys.readouterr().err


def test_where_no_service_answers_the_flag_is_named_that_there_is(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["verify", str(folder), "--address", "127.0.0.1:9"]) == 1
    told = capsys.readouterr().err.splitlines()
    assert (told[0], told[-1]) == (
        "error: no service answers",
        "  → start one with `octavo serve`, or give its --address",
    )


@pytest.mark.parametrize(
    "address",
    ["", "localhost", "localhost:", ":50051", "h:0", "h:65536", "h:x", "h:٣", f"h:{5000 * '9'}", "http://h:1", "a b:1"],
)
def test_an_address_that_is_none_is_refused(address: str) -> None:
    with pytest.raises(CliError, match="is not HOST:PORT"):
        split_address(address)


def test_addresses_have_a_host_and_a_port() -> None:
    assert split_address("127.0.0.1:50051") == ("127.0.0.1", 50051)
    assert split_address("[::1]:7") == ("::1", 7)
