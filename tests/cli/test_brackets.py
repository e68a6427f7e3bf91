"""Names, paths and addresses in square brackets reach a terminal as they are: an IPv6 address before its port has some,
and rich would take them for a style."""

import io
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace

import pytest
from rich.console import Console, RenderableType

from octavo.cli.client.receipt import receipt_table
from octavo.cli.main import main
from octavo.cli.progress import Bars
from octavo.cli.serve.summary import ModelSummary, ServiceSummary, boxed
from octavo.cli.tools.doctor import findings_table
from octavo.cli.tools.doctor_checks import Finding, Verdict
from octavo.cli.tools.ps import ProcessState, ServiceState, _show
from octavo.cli.tools.verify import served_table
from octavo.v1 import inference_pb2, model_pb2
from tests.support.model.checkpoints import write_tiny_checkpoint

ADDRESS = "[fd00::5]:50051"
NAME = "qwen[awq]"
FINISHED = inference_pb2.Finished(stop=inference_pb2.StopMatch(text="[/end]"))
SUMMARY = ServiceSummary(
    address=ADDRESS,
    admin_address=None,
    metrics=[("gateway-0", ADDRESS)],
    models=[
        ModelSummary(
            name=NAME, device="cpu", dtype="float32", num_workers=1, num_blocks=8, block_size=16, max_model_len=64
        )
    ]
    * 2,
    ready_after_s=1.0,
)
FINDING = Finding(name=NAME, verdict=Verdict.BAD, detail=ADDRESS, advice="pip install 'octavo[ray]'")


@pytest.mark.parametrize(
    ("shown", "words"),
    [
        (boxed(SUMMARY), [f"gRPC  {ADDRESS}", f"http://{ADDRESS}/metrics", f"{NAME}  (cpu", "chat --host [fd00::5] "]),
        (findings_table([FINDING]), [f"{NAME} {ADDRESS}", "pip install 'octavo[ray]'"]),
        (receipt_table(FINISHED), ["at '[/end]'"]),
        (served_table(NAME, []), [f"as served: {NAME}"]),
    ],
)
def test_a_table_has_them(shown: RenderableType, words: list[str]) -> None:
    text = io.StringIO()
    Console(file=text, width=120).print(shown)
    assert [each for each in words if each not in text.getvalue()] == []


def test_a_bar_has_them() -> None:
    text = io.StringIO()
    bars = Bars(Console(file=text, width=120, force_terminal=True, color_system=None), {"m": NAME})
    bars.close()
    assert NAME in text.getvalue()


@pytest.fixture
def terminal(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Callable[[], str]:
    """What a terminal of 160 columns has been given."""
    monkeypatch.setenv("COLUMNS", "160")
    monkeypatch.setenv("NO_COLOR", "1")
    monkeypatch.setenv("TERM", "xterm")
    return lambda: capsys.readouterr().out


def test_ps_has_them(terminal: Callable[[], str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.stdout.isatty", lambda: True)
    process = ProcessState(name="worker-0", role="worker", state="ready", model=NAME)
    _show([ServiceState(address=ADDRESS, state="ready", processes=(process,))], as_json=False)
    shown = terminal()
    assert ADDRESS in shown
    assert NAME in shown


def test_models_has_them(terminal: Callable[[], str], monkeypatch: pytest.MonkeyPatch) -> None:
    client = SimpleNamespace(models=lambda: [model_pb2.ModelInfo(name=NAME)])
    monkeypatch.setattr("octavo.cli.client.calls.connect", lambda settings: nullcontext(client))
    assert main(["models"]) == 0
    assert NAME in terminal()


def test_config_show_has_them(terminal: Callable[[], str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.stdout.isatty", lambda: True)
    assert main(["config", "show", "--model", NAME]) == 0
    assert NAME in terminal()


def test_commands_that_name_a_folder_have_them(terminal: Callable[[], str], tmp_path: Path) -> None:
    folder = write_tiny_checkpoint(tmp_path / NAME)
    assert main(["sizing", str(folder), "--context", "64", "--memory", "1"]) == 0
    assert NAME in terminal()
