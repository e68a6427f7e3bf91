"""Every example of the client runs against a service."""

import ast
import re
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc
import pytest
from google.protobuf import json_format
from google.protobuf.descriptor_pool import DescriptorPool
from google.protobuf.message_factory import GetMessageClass
from grpc_reflection.v1alpha.proto_reflection_descriptor_database import ProtoReflectionDescriptorDatabase

from examples.client import cancellation, chat, embeddings, streaming, structured_output, tools
from octavo import Client
from tests.support.model.checkpoints import write_tiny_checkpoint
from tests.support.services.service import REPOSITORY, Service, serve

SCRIPT = REPOSITORY / "examples" / "client" / "grpcurl.sh"


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Service]:
    """A random model that never comes to an end by itself. Partial answers have a second of way, not 50 ms: on a busy
    machine they may be long under way."""
    folder = write_tiny_checkpoint(tmp_path_factory.mktemp("model"), max_position_embeddings=4096)
    arguments = ("--num-blocks=512", "--max-model-len=4096", "--dtype=float32", "--num-threads=1")
    margin = {"injector": REPOSITORY / "tests/faults/injected", "injected": {"partial_margin_s": 1.0}}
    with serve(tmp_path_factory.mktemp("service"), f"--model={folder}", *arguments, **margin) as running:
        yield running


def run(example: Any, service: Service, capsys: pytest.CaptureFixture[str], *arguments: str) -> list[str]:
    """Its output, and nothing left behind."""
    assert example.main(["--target", service.target, *arguments]) == 0
    service.wait_until_idle()
    return capsys.readouterr().out.splitlines()


def test_streaming(service: Service, capsys: pytest.CaptureFixture[str]) -> None:
    lines = run(streaming, service, capsys, "the quick brown fox", "--max-tokens", "20")
    assert re.match(r"\d+ tokens, first after [\d.]+ ms, then every [\d.]+ ms \(p99 [\d.]+ ms\)", lines[-1])


def test_chat(service: Service, capsys: pytest.CaptureFixture[str]) -> None:
    lines = run(chat, service, capsys, "hello", "and again", "--max-tokens", "10")
    assert [line for line in lines if line.startswith("> ")] == ["> hello", "> and again"]
    assert not lines[-1].endswith("tokens, 0 of them cached]")


def test_tools_that_nobody_calls(service: Service, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(tools, service, capsys, "hello", "--max-tokens", "10")


def test_structured_output(service: Service, capsys: pytest.CaptureFixture[str]) -> None:
    person, answer, number, refused = run(structured_output, service, capsys)
    assert {*ast.literal_eval(person)} == {"name", "born", "trade"}
    assert answer in ("yes", "no")
    assert re.fullmatch(r"0[0-9]{2}-[0-9]{4}", number)
    assert refused == "refused: generate.constraint.json_schema: contains: is not supported"


def test_embeddings(service: Service, capsys: pytest.CaptureFixture[str]) -> None:
    lines = run(embeddings, service, capsys, "fox", "dog")
    assert [line.split()[index] for index, line in enumerate(lines)] == ["1.000", "1.000"]
    assert lines[0].split()[1] == lines[1].split()[0]


class PatientClient(Client):
    """Deadlines are four times as far away as the example says."""

    def complete(self, *positional: Any, timeout_s: float, **named: Any) -> Any:
        return super().complete(*positional, timeout_s=4 * timeout_s, **named)


def test_cancellation(service: Service, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cancellation, "Client", PatientClient)
    lines = run(cancellation, service, capsys)
    assert lines[:3] == ["left after piece 5", "the task was cancelled: True", "cancelled by id: ABORTED"]
    assert re.fullmatch(r"out of time: DEADLINE; with a partial answer: [1-9]\d* tokens", lines[3])


def calls_of_script() -> list[tuple[str, str]]:
    """Method and JSON of each call of the script."""
    return re.findall(r"-d '(.*)' \"\$target\" (\S+)", "".join(SCRIPT.read_text().splitlines(keepends=True)))


@pytest.mark.parametrize(("body", "method"), [pytest.param(*call, id=call[1]) for call in calls_of_script()])
def test_grpcurls_calls_as_reflection_has_them(service: Service, body: str, method: str) -> None:
    """What grpcurl does, with another library: the contract from the server, the request from JSON."""
    with grpc.insecure_channel(service.target) as channel:
        pool = DescriptorPool(ProtoReflectionDescriptorDatabase(channel))
        name, _, rpc = method.partition("/")
        found = pool.FindServiceByName(name).FindMethodByName(rpc)
        request = json_format.Parse(body, GetMessageClass(found.input_type)(), descriptor_pool=pool)
        kind = channel.unary_stream if found.server_streaming else channel.unary_unary
        call = kind(
            f"/{method}",
            request_serializer=lambda message: message.SerializeToString(),
            response_deserializer=GetMessageClass(found.output_type).FromString,
        )
        answer = call(request, timeout=120)
        assert json_format.MessageToJson(list(answer)[-1] if found.server_streaming else answer)


def test_grpcurl_itself_where_it_is_installed(service: Service) -> None:
    if shutil.which("grpcurl") is None:
        pytest.skip("grpcurl is not installed; its calls are made with Python above")
    done = subprocess.run([SCRIPT, service.target], capture_output=True, text=True, timeout=200, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    assert "FINISH_REASON_LENGTH" in done.stdout


def test_every_example_is_tried_here() -> None:
    names = {path.stem for path in Path(streaming.__file__).parent.glob("*.py")} - {"__init__"}
    assert names <= {"streaming", "chat", "tools", "embeddings", "cancellation", "structured_output"}


@pytest.mark.parametrize("choice", ["required", "temperature"])
def test_tools_that_must_be_called(service: Service, capsys: pytest.CaptureFixture[str], choice: str) -> None:
    lines = run(tools, service, capsys, "hello", "--tool-choice", choice, "--max-tokens", "200")
    assert any(re.fullmatch(r'temperature = \{"city": "(Oslo|Rome)", "celsius": -?\d+\}', line) for line in lines)
