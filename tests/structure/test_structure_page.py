"""docs/structure.md against a real Generate, traced from gRPC to its last token."""

import ast
import json
import os
import re
import subprocess
import sys
import threading
from dataclasses import dataclass
from pathlib import Path
from types import FrameType, SimpleNamespace
from typing import cast

import pytest

from tests.structure.trace import CLOCK, ROOT, Calls

# What a newcomer reads to follow one request. These bounds go down, never up.
MAX_FILES = 50
MAX_WRAPS = 4
MAX_FUNCTIONS = 514

_HOP = re.compile(r"^\| \d+ \| `(?P<file>[\w/]+\.py)` \| `(?P<function>\w+)` \|", re.MULTILINE)


_KEEPER = re.compile(r"`(?P<file>[\w/]+\.py)` `(?P<function>\w+)`")


@dataclass(frozen=True, slots=True)
class Hop:
    """A row of a list on the page."""

    file: str
    function: str


@pytest.fixture(scope="module")
def traced(repository: Path) -> dict[str, list[Hop]]:
    """Calls in their order: "until_delta", and "all" until the request has ended; "heartbeats", which come at any time.
    "wraps": classes instead."""
    done = subprocess.run(
        [sys.executable, "-m", "tests.structure.trace"],
        cwd=repository,
        env={**os.environ, "PYTHONPATH": f"{repository}{os.pathsep}{repository / 'proto'}", "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    calls = [Hop(file, function.rpartition(".")[2]) for file, function, _ in found["calls"]]
    wraps = [Hop(*each) for each in found["wraps"]]
    heartbeats = [Hop("worker/transport/heartbeat.py", "heartbeat_of")] * found["num_heartbeats"]
    return {"all": calls, "until_delta": calls[: found["num_until_delta"]], "wraps": wraps, "heartbeats": heartbeats}


def hops_of(repository: Path, heading: str) -> list[Hop]:
    """The rows of a section's list."""
    return [Hop(**row.groupdict()) for row in _HOP.finditer(section_of(repository, heading))]


def section_of(repository: Path, heading: str) -> str:
    """What the page says below a heading."""
    page = (repository / "docs/structure.md").read_text()
    return re.split(r"^## ", re.split(rf"^## {heading}$", page, flags=re.MULTILINE)[1], flags=re.MULTILINE)[0]


def test_a_generate_reaches_its_first_delta_within_so_many_files(traced: dict[str, list[Hop]]) -> None:
    calls = traced["until_delta"]
    assert len({hop.file for hop in calls}) <= MAX_FILES
    assert len(calls) <= MAX_FUNCTIONS


def test_a_request_is_wrapped_so_many_times_on_its_way_to_the_model(
    traced: dict[str, list[Hop]], repository: Path
) -> None:
    """Every class that carries it is on the page: those on the way in their order, and those that keep it."""
    section = section_of(repository, "What carries a request")
    forward, keep = hops_of(repository, "What carries a request"), [Hop(*each) for each in _KEEPER.findall(section)]
    assert len(forward) <= MAX_WRAPS
    assert [each for each in traced["wraps"] if each not in keep] == forward
    assert set(keep) <= set(traced["wraps"])


def out_of_order(hops: list[Hop], calls: list[Hop]) -> Hop | None:
    """The first hop that was never called behind the one before it. Gateway and worker call some functions both: one of
    the two calls has to be in its place."""
    rest = iter(calls)
    return next((hop for hop in hops if hop not in rest), None)


def test_a_hop_that_is_never_called_behind_the_last_one_is_out_of_order() -> None:
    a, b, c = (Hop("x.py", name) for name in "abc")
    assert out_of_order([a, b, c], [b, a, b, c]) is None
    assert out_of_order([a, b, c], [b, a, c]) == b


@pytest.mark.parametrize("heading", ["A request", "A step", "A block"])
def test_the_page_lists_the_hops_in_the_order_in_which_they_were_traced(
    heading: str, traced: dict[str, list[Hop]], repository: Path
) -> None:
    """What the page leaves out is its own choice; what it lists is called, and in that order."""
    hops = hops_of(repository, heading)
    assert len(hops) >= 6
    assert [hop for hop in hops if hop not in traced["all"]] == []
    assert out_of_order(hops, traced["all"]) is None


@pytest.mark.parametrize("heading", ["A request", "A step", "A block"])
def test_two_lines_of_the_page_that_change_places_are_noticed(
    heading: str, traced: dict[str, list[Hop]], repository: Path
) -> None:
    hops = hops_of(repository, heading)
    swapped = [[*hops[:i], hops[i + 1], hops[i], *hops[i + 2 :]] for i in range(len(hops) - 1)]
    assert [each for each in swapped if out_of_order(each, traced["all"]) is None] == []


def test_the_worker_sends_no_heartbeats_while_it_is_traced(traced: dict[str, list[Hop]]) -> None:
    """Its thread encodes, too: where one is sent before the `Run` is, the page's order is not what was traced."""
    assert traced["heartbeats"] == []


def test_a_turn_of_the_engine_counts_from_the_one_that_finds_the_request() -> None:
    """A turn that waited in vain for messages looks at the scheduler's news, too; the request's turn does so last."""
    calls = Calls()
    calls.begin()
    idle = ["Engine.step", "WorkerLink.drain", "StepPipeline.launch_ahead", "StepOutputs.take"]
    of_request = ["Engine.step", "WorkerLink.drain", "WorkerLink._take", "StepPipeline.launch_ahead"]
    for function in [*idle, *idle, *of_request, "Runner.launch", "StepOutputs.take"]:
        calls.profile(called(function), "call", None)
    assert functions_of(calls) == [*of_request, "Runner.launch", "StepOutputs.take"]


def test_what_the_gateway_does_at_intervals_is_not_the_requests() -> None:
    calls = Calls()
    calls.begin()
    task = called(CLOCK, folder="gateway")

    def in_gateway() -> None:
        for caller in (task, None):
            calls.profile(called("observe", folder="gateway", caller=caller), "call", None)
            seen.append(functions_of(calls))

    seen: list[list[str]] = []
    thread = threading.Thread(target=in_gateway)
    thread.start()
    thread.join()
    assert seen == [[], ["observe"]]


def test_the_worker_is_idle_while_it_waits_for_messages() -> None:
    calls, wait = Calls(), called("WorkerLink.wait")
    seen = []
    for event in ("call", "c_call", "c_return", "return"):
        calls.profile(wait, event, None)
        seen.append(calls.is_worker_idle)
    assert seen == [True, True, True, False]


def functions_of(calls: Calls) -> list[str]:
    """In their order."""
    return [function for _, function, _ in json.loads(calls.as_json())["calls"]]


def called(function: str, *, folder: str = "worker", caller: FrameType | None = None) -> FrameType:
    """A frame, as `sys.setprofile` gives it."""
    code = SimpleNamespace(co_filename=f"{ROOT}/{folder}/some.py", co_qualname=function, co_argcount=0)
    return cast("FrameType", SimpleNamespace(f_code=code, f_back=caller))


def test_the_hops_of_a_crash_exist(repository: Path) -> None:
    """Nobody dies in a trace: tests/faults see the crash itself."""
    hops = hops_of(repository, "A crash")
    assert len(hops) >= 5
    for hop in hops:
        tree = ast.walk(ast.parse((repository / hop.file).read_text()))
        names = {node.name for node in tree if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)}
        assert hop.function in names, hop


def test_the_page_states_the_bounds_of_this_test(repository: Path) -> None:
    page = (repository / "docs/structure.md").read_text()
    assert f"at most {MAX_FILES} files and {MAX_FUNCTIONS} functions" in page
