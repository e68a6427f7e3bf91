"""The first line of `octavo chat`, and what stands before a question."""

import io

import grpc
import pytest
from rich.console import Console

from octavo.cli.client.chat import _ask, _model_line
from octavo.cli.main import main
from octavo.cli.settings.groups import ClientSettings
from octavo.v1 import model_pb2
from tests.support.gateway.scripted_server import Script, running


def test_the_embedded_model_is_called_what_it_is() -> None:
    models = [
        model_pb2.ModelInfo(name="folio-chat", dtype="float32", max_model_len=2048),
        model_pb2.ModelInfo(name="Qwen2.5-7B-Instruct", dtype="bfloat16", max_model_len=32768),
    ]
    assert _model_line(models, ClientSettings()) == "folio-chat, a small demo model (float32, 2,048 tokens)"
    chosen = ClientSettings(model_name="Qwen2.5-7B-Instruct")
    assert _model_line(models, chosen) == "Qwen2.5-7B-Instruct (bfloat16, 32,768 tokens)"


@pytest.mark.parametrize(
    ("environment", "is_terminal", "prompt"),
    [
        ({"TERM": "xterm"}, True, "\001\033[1;36m\002› \001\033[0m\002"),
        ({"TERM": "xterm", "NO_COLOR": "1"}, True, "› "),
        ({"TERM": "dumb"}, True, "› "),
        ({"TERM": "xterm"}, False, "› "),  # into a file
    ],
)
def test_a_question_is_asked_for_in_colour_where_the_terminal_shows_some(
    environment: dict[str, str], is_terminal: bool, prompt: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[str] = []

    def answer(prompt: str) -> str:
        asked.append(prompt)
        return " Who? "

    monkeypatch.setattr("builtins.input", answer)
    monkeypatch.setattr("sys.stdin.isatty", lambda: True)
    assert _ask(Console(force_terminal=is_terminal, _environ=environment)) == "Who?"
    assert asked == [prompt]


def test_a_question_that_is_no_text_does_not_end_the_conversation(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO("h\udce9\nhi\n"))
    with running(script := Script()) as target:
        assert main(["chat", "--port", target.rpartition(":")[2]]) == 1  # one of them failed
    out, err = capsys.readouterr()
    assert out.endswith("Hello, wörld\n")
    assert "messages: content: is not UTF-8 text, from its character 2 on" in err
    assert [[turn.content for turn in request.chat.messages] for request in script.requests] == [["hi"]]


def test_a_question_of_a_pipe_that_fails_shows_in_the_exit_code_and_the_others_are_asked(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO("one\ntwo\n"))
    refusal = (grpc.StatusCode.INVALID_ARGUMENT, "not so", ())
    with running(script := Script(failures=[refusal])) as target:
        assert main(["chat", "--port", target.rpartition(":")[2]]) == 1
    out, err = capsys.readouterr()
    assert out.endswith("Hello, wörld\n")
    assert "not so" not in out
    assert "not so" in err
    assert len(script.requests) == 2
    monkeypatch.setattr("sys.stdin", io.StringIO("one\n"))
    with running(Script()) as target:
        assert main(["chat", "--port", target.rpartition(":")[2]]) == 0
