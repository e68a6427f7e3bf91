"""docs/decisions/0021 is true: its files and lines, and what it says of libraries that the tests have."""

import concurrent.futures
import inspect
import os
import re
import signal
import time
from concurrent.futures.process import BrokenProcessPool
from pathlib import Path
from typing import Any

import grpc
import pytest
import typer
from llguidance import LLMatcher
from prometheus_client import exposition
from typer.testing import CliRunner

from tests.support.grammar.models import oracle_speaker

PAGE = Path(__file__).resolve().parents[2] / "docs/decisions/0021-hand-written-parts.md"
ROUNDED = 0.25  # lines come and go


def rows() -> dict[str, list[str]]:
    """What -> its other cells."""
    lines = [line for line in PAGE.read_text().splitlines() if line.startswith("| ")][1:]
    cells = [[cell.strip() for cell in line.strip("|").split(" | ")] for line in lines]
    return {row[0]: row[1:] for row in cells}


ROWS = rows()


def test_the_table_has_its_rows() -> None:
    assert len(ROWS) >= 16


@pytest.mark.parametrize("what", ROWS)
def test_a_row_names_files_that_have_as_many_lines(what: str, repository: Path) -> None:
    named = re.findall(r"`([\w/.]+)`", ROWS[what][0])
    places = [repository / each for each in named]
    files = [file for place in places for file in (place.rglob("*.py") if place.is_dir() else [place])]
    told = int(ROWS[what][1].replace(",", ""))
    assert files
    assert sum(len(file.read_text().splitlines()) for file in files) == pytest.approx(told, rel=ROUNDED)


@pytest.mark.parametrize(
    ("schema", "complaint"),
    [
        ({"if": {"required": ["a"]}, "then": {"required": ["b"]}, "type": "object"}, "if"),
        ({"oneOf": [{"type": "integer"}, {"type": "number"}]}, "oneOf"),
        ({"type": "array", "uniqueItems": True, "items": {"enum": [1, 2]}}, "uniqueItems"),
        ({"type": "object", "dependentRequired": {"a": ["b"]}}, "dependentRequired"),
    ],
)
def test_llguidance_refuses_what_ours_writes_anew(schema: dict[str, Any], complaint: str) -> None:
    matcher = LLMatcher(oracle_speaker(259).vocabulary().tokenizer, LLMatcher.grammar_from_json_schema(schema))
    assert complaint in matcher.get_error()


@pytest.mark.parametrize(
    ("schema", "text"),
    [
        ({"type": "integer", "minimum": 9007199254740993}, "9007199254740992"),
        (
            {"properties": {"a": {"type": "string"}}, "additionalProperties": {"type": "integer"}, "type": "object"},
            r'{"a":"x","\u0061":1}',
        ),
    ],
)
def test_llguidance_alone_takes_what_does_not_validate(schema: dict[str, Any], text: str) -> None:
    tokenizer = oracle_speaker(259).vocabulary().tokenizer
    matcher = LLMatcher(tokenizer, LLMatcher.grammar_from_json_schema(schema))
    ids = tokenizer.tokenize_bytes(text.encode())
    assert matcher.try_consume_tokens(ids) == len(ids)
    assert matcher.is_accepting()


def test_one_killed_process_ends_every_call_of_a_process_pool() -> None:
    with concurrent.futures.ProcessPoolExecutor(2) as pool:
        pids = {pool.submit(os.getpid).result()}
        calls = [pool.submit(time.sleep, 60), pool.submit(time.sleep, 60)]
        pids |= set(pool._processes)
        os.kill(min(pids), signal.SIGKILL)
        for call in calls:
            with pytest.raises(BrokenProcessPool):
                call.result(timeout=60)


def test_the_server_of_prometheus_client_starts_a_thread_for_each_connection_without_bounds() -> None:
    source = inspect.getsource(exposition.ThreadingWSGIServer)
    assert "ThreadingMixIn" in source
    assert not re.search(r"max|limit|bound", source)


def test_a_server_of_grpc_neither_lists_connections_nor_closes_one() -> None:
    assert [name for name in dir(grpc.aio.Server) if re.search("conn|close|peer", name)] == []


def test_the_tables_of_typer_cut_long_names(monkeypatch: pytest.MonkeyPatch) -> None:
    def command(file: str = typer.Option("", envvar="OCTAVO_GATEWAY_PUBLIC_KEY_FILE", help="A key.")) -> None:
        """A command."""

    app = typer.Typer(rich_markup_mode="rich")
    app.command()(command)
    said = CliRunner().invoke(app, ["--help"], env={"COLUMNS": "60", "TERMINAL_WIDTH": "60"}).output
    assert "OCTAVO_GATEWAY_PUBL" in said
    assert "OCTAVO_GATEWAY_PUBLIC_KEY_FILE" not in said
