"""docs/security.md is true: the tests that it names exist, its scopes are those in force, the pins are new enough."""

import ast
import re
from importlib.metadata import version
from pathlib import Path

import zmq

from octavo.gateway.auth.authenticator import Scope

FLOORS = {
    "grpcio": (1, 83, 1),  # GHSA-hf3w-6hpw-qp67; CVE-2023-33953, CVE-2023-44487, CVE-2024-7246 before it
    "protobuf": (6, 31, 1),  # CVE-2025-4565, CVE-2026-0994
    "torch": (2, 6),  # CVE-2025-32434, though nothing here calls torch.load
}
LIBZMQ = (4, 3, 3)  # CVE-2020-15166, CVE-2019-13132, CVE-2019-6250


def numbers(text: str) -> tuple[int, ...]:
    return tuple(int(part) for part in re.findall(r"\d+", text.split("+")[0])[:3])


def names_in(path: Path) -> set[str]:
    functions = (ast.FunctionDef, ast.AsyncFunctionDef)
    return {node.name for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, functions)}


def test_every_test_that_is_named_is_there(repository: Path) -> None:
    page = (repository / "docs/security.md").read_text()
    named = re.findall(r"`(tests/[\w/]+\.py)::(\w+)`", page)
    assert len(named) >= 30
    assert [(path, name) for path, name in named if name not in names_in(repository / path)] == []


def test_every_line_of_the_checklist_has_a_test(repository: Path) -> None:
    checklist = (repository / "docs/security.md").read_text().partition("## The checklist")[2]
    rows = [line for line in checklist.splitlines() if line.startswith("| ") and "---" not in line][1:]
    assert [row for row in rows if "`tests/" not in row] == []


def test_the_scopes_of_the_page_are_those_in_force(repository: Path) -> None:
    page = (repository / "docs/security.md").read_text()
    assert re.findall(r"^\| `(\w+)` \|", page, re.MULTILINE) == list(Scope)


def test_nothing_is_older_than_what_mended_a_known_hole() -> None:
    assert {name: version(name) for name, floor in FLOORS.items() if numbers(version(name)) < floor} == {}
    assert numbers(zmq.zmq_version()) >= LIBZMQ
