"""Rows F of the fault matrix: names that lead elsewhere, logs that cannot be written, scrapers that never stop."""

import asyncio
import json
import os
import re
import subprocess
import sys
import time
import urllib.request
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise
from pathlib import Path
from typing import Any

from octavo import AsyncClient, OctavoError
from tests.support.faults.callers import Call, calls, run
from tests.support.faults.figures import percentile, record
from tests.support.faults.siege import besiege
from tests.support.services.service import REPOSITORY, environment, free_port

HOSTILE_NAMES = (
    "../secret", "../../etc/passwd", "/etc/passwd", "/dev/zero", "a/../../secret", "%2e%2e/secret", "..\\secret",
    "a\0b", "fifo", "link", "pickled.bin", "file:///etc/passwd", "~root", "$(id)", "a/b/c", "x" * 5_000, " ", "-rf",
)  # fmt: skip
AUDITED = """
import json, os, sys
from pathlib import Path
opened = []
EVENTS = ("open", "os.listdir", "os.scandir", "subprocess.Popen", "os.system", "socket.connect", "pickle.find_class")
def hook(event, arguments):
    if event in EVENTS:
        opened.append((event, str(arguments[0])))
from octavo.model.checkpoint.source import resolve_checkpoint
from octavo.model.errors import CheckpointError
import huggingface_hub, octavo.model.checkpoint.loading
os.environ["HF_HUB_OFFLINE"] = "1"
sys.addaudithook(hook)
outcomes = {}
for name in json.loads(sys.argv[1]):
    try:
        outcomes[name] = str(resolve_checkpoint(name))
    except CheckpointError as error:
        outcomes[name] = "CheckpointError"
    except BaseException as error:
        outcomes[name] = type(error).__name__
sys.stdout.write(json.dumps([outcomes, opened]))
"""


def test_row_58_names_that_lead_elsewhere_open_nothing(tmp_path: Path) -> None:
    """Every file that Python opens is watched while each name is resolved."""
    inside = tmp_path / "models"
    inside.mkdir()
    (tmp_path / "secret").write_text("{}")
    os.mkfifo(inside / "fifo")
    (inside / "link").symlink_to(tmp_path / "secret")
    (inside / "pickled.bin").write_bytes(b"\x80\x04.")
    names = [name for name in HOSTILE_NAMES if "\0" not in name]
    done = subprocess.run(
        [sys.executable, "-c", AUDITED, json.dumps(HOSTILE_NAMES)], cwd=inside, capture_output=True, text=True,
        timeout=120, check=False, env=environment() | {"HF_HUB_OFFLINE": "1", "HF_HOME": str(tmp_path / "hub")},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-2000:]
    outcomes, opened = json.loads(done.stdout)
    assert {name: outcomes[name] for name in names} == dict.fromkeys(names, "CheckpointError")
    assert outcomes["a\0b"] == "CheckpointError"
    ours = (str(REPOSITORY / "model"), sys.prefix, sys.base_prefix, "/proc/", str(tmp_path / "hub"))
    escapes = [each for each in opened if not each[1].startswith(ours)]
    record("58 names", names=len(HOSTILE_NAMES), escapes=len(escapes))
    assert escapes == []


async def test_row_58_callers_learn_nothing_from_names_of_models(standing: Any) -> None:
    async with standing() as faults:
        answers = set()
        async with AsyncClient(faults.service.target) as client:
            for name in (each for each in HOSTILE_NAMES if each.strip() and len(each) < 100 and "\0" not in each):
                try:
                    await client.complete(text="x", model=name, max_tokens=1)
                except OctavoError as error:
                    answers.add(
                        (error.code.name, error.reason, str(error).replace(name, "NAME").replace(repr(name), "NAME"))
                    )
        record("58 callers", distinct_answers=len({each[:2] for each in answers}))
        assert {each[:2] for each in answers} <= {
            ("NOT_FOUND", "MODEL_NOT_FOUND"),
            ("INVALID_ARGUMENT", "INVALID_FIELD"),
        }
        assert not [each for each in answers if re.search(r"(?<!NAME)/(etc|dev|proc|tmp|home)/\w", each[2])]
        await faults.canary()


async def test_row_59_a_hundred_scrapers_and_five_hundred_names_add_no_series(standing: Any) -> None:
    def scrape() -> tuple[float, set[str]]:
        """Seconds that it took, and the series."""
        start_s = time.monotonic()
        with urllib.request.urlopen(f"http://127.0.0.1:{faults.metrics_port}/metrics", timeout=60) as answer:
            lines = answer.read().decode().splitlines()
        return time.monotonic() - start_s, {line.rpartition(" ")[0] for line in lines if not line.startswith("#")}

    def attack() -> list[float]:
        with ThreadPoolExecutor(20) as threads:
            return [took for took, _ in threads.map(lambda _: scrape(), range(100))]

    async def strangers(count: int, first: int) -> None:
        async with AsyncClient(faults.service.target) as client:
            for n in range(first, first + count):
                try:
                    await client.complete(text="x", model=f"tenant-{n}", cache_salt=f"salt-{n}", max_tokens=1)
                except OctavoError as error:
                    assert error.reason == "MODEL_NOT_FOUND"  # noqa: PT017

    async with standing() as faults:
        await strangers(5, 0)
        await faults.canary()
        await asyncio.sleep(2.0)  # series of workers and of the first ends appear with their first news, each second
        _, before = await asyncio.to_thread(scrape)
        await strangers(500, 5)
        _, after = await asyncio.to_thread(scrape)
        siege = await besiege(faults, attack)
        record(
            "59 metrics",
            names=500, series_before=len(before), series_after=len(after), scrapes=100,
            scrape_p99_ms=round(1000 * percentile(siege.result, 99)), **siege.figures(),
        )  # fmt: skip
        assert [each for each in after if re.search(r"(tenant|salt)-\d", each)] == []
        assert len(after - before) < 25, after - before  # none on a machine that is not held up; 500 names came
        assert percentile(siege.result, 99) < 0.8 + longest_gap_s(siege.canaries), "connections are tried again"


def longest_gap_s(canaries: Sequence[Call]) -> float:
    """Between two canaries, one of which was sent when the one before was done: what the machine itself took from
    both, or from one. A connection that must be tried again takes a second more."""
    return max((later.sent_s - earlier.sent_s for earlier, later in pairwise(canaries)), default=60.0)


async def test_row_59_a_log_that_cannot_be_written_stops_nobody(tmp_path: Path) -> None:
    """stderr of every process is a full disk; then a pipe whose reader is gone."""
    for kind in ("full", "broken"):
        port, folder = free_port(), tmp_path / kind
        folder.mkdir()
        command = [
            sys.executable, "-m", "octavo.cli.main", "serve", f"--port={port}", "--metrics-port=0",
            "--worker-metrics-port=0",
            f"--run-dir={folder / 'run'}", "--model=oracle", "--runner=oracle", "--num-blocks=256",
        ]  # fmt: skip
        reader, writer = os.pipe()
        target = os.open("/dev/full", os.O_WRONLY) if kind == "full" else writer
        process = subprocess.Popen(command, cwd=folder, env=environment(), stdout=target, stderr=target)  # noqa: ASYNC220
        os.close(target)
        if kind == "full":
            os.close(writer)
        else:
            await asyncio.sleep(0.5)
        os.close(reader)
        try:
            done = await _served(f"127.0.0.1:{port}")
            record(f"59 log {kind}", served=len(done))
            assert [call.error for call in done] == [None] * len(done)
        finally:
            process.terminate()
            process.wait(60)


async def _served(target: str) -> list[Call]:
    deadline_s = time.monotonic() + 120
    while True:
        probe = Call(prompt=[3, 1, 4], max_tokens=3)
        async with AsyncClient(target) as client:
            await run(client, probe)
            if probe.error is None:
                return [await run(client, each) for each in calls(8, max_tokens=20)]
        assert time.monotonic() < deadline_s, f"never served: {probe.error}"
        await asyncio.sleep(0.1)
