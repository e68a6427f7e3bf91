"""`octavo embed` against a scripted server."""

import io
import json

import pytest

from octavo.cli.client import calls
from octavo.cli.main import main
from tests.support.gateway.scripted_server import Script, running


def test_each_text_becomes_a_line(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(calls, "EMBED_BATCH", 2)
    with running(script := Script()) as target:
        port = target.rpartition(":")[2]
        assert main(["embed", "--port", port, "--pooling", "mean", "--raw", "a", "b", "ü"]) == 0
    lines = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [line["text"] for line in lines] == ["a", "b", "ü"]
    assert [line["values"] for line in lines] == [[0, 0.5], [1, 0.5], [0, 0.5]]
    assert [line["usage"]["cached_tokens"] for line in lines] == [0, 0, 0]
    assert [len(request.inputs) for request in script.embed_requests] == [2, 1]
    assert all(request.HasField("normalize") and not request.normalize for request in script.embed_requests)


def test_lines_of_stdin_are_texts(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO("one\n\r\ntwo \r\n", newline="\n"))
    with running(Script()) as target:
        assert main(["embed", "--port", target.rpartition(":")[2]]) == 0
    assert [json.loads(line)["text"] for line in capsys.readouterr().out.splitlines()] == ["one", "two "]


def test_nothing_to_embed_is_a_mistake(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO(""))
    assert main(["embed"]) == 2
    assert "no texts" in capsys.readouterr().err


def test_a_wrong_pooling_is_told_without_words_of_the_library(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["embed", "--port", "1", "--pooling", "max", "a"]) == 2
    assert "Invalid value for '--pooling': 'max' is not one of 'last_token', 'mean'." in capsys.readouterr().err


def test_a_text_that_is_not_utf8_is_a_mistake(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["embed", "--port", "1", "caf\udce9"]) == 2
    assert "inputs: is not UTF-8 text, from its character 4 on" in capsys.readouterr().err
