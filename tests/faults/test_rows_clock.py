"""Row 59 of the fault matrix, the clock: a running service whose wall clock is set an hour ahead, and back."""

import asyncio
import json
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest

from octavo import AsyncClient
from octavo.cli.main import main
from tests.support.faults.bench import NO_RETRIES, FaultBench
from tests.support.faults.callers import Call, calls, request, run
from tests.support.faults.figures import percentile, record

HOUR_S = 3600
JUMPS_S = (HOUR_S, -HOUR_S, 10 * 365 * 86400, 0)
HEARTBEAT_TIMEOUT_S = 10.0
DEADLINE_S = 1.0
SLEWED_S = 0.1  # gRPC takes a deadline for a date, and the machine's own clock may be slewed meanwhile
SETTINGS = (
    "--workers=2", f"--heartbeat-timeout-s={HEARTBEAT_TIMEOUT_S}", "--heartbeat-interval-s=0.2", "--stall-timeout-s=15",
    "--public-scopes=generate", "--public-scopes=health", "--public-scopes=models", "--public-scopes=admin",
)  # fmt: skip


@pytest.fixture
def key(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> str:
    """An API key that expires in half an hour, in the file that the service reads."""
    expires = (datetime.now(UTC) + timedelta(minutes=30)).strftime("%Y-%m-%dT%H:%M:%SZ")
    assert main(["keys", "new-api", "ann", "--file", str(tmp_path / "keys.toml"), "--expires", expires]) == 0
    return capsys.readouterr().out.strip()


async def at_deadline(faults: FaultBench) -> float:
    """Seconds that an endless output went on after its deadline."""
    call = Call(prompt=[5, 10], max_tokens=4000)
    faults.num_rpcs += 1
    async with AsyncClient(faults.service.target, options=NO_RETRIES) as client:
        await run(client, call, timeout_s=DEADLINE_S)
    assert call.code == "DEADLINE_EXCEEDED"
    return call.ended_s - call.sent_s - DEADLINE_S


async def with_key(faults: FaultBench, key: str) -> str:
    """The code that a caller gets who shows it."""
    call = Call(prompt=[5, 11], max_tokens=3)
    faults.num_rpcs += 1
    async with AsyncClient(faults.service.target, api_key=key, options=NO_RETRIES) as client:
        return (await run(client, call)).code


async def longest_duration_s(faults: FaultBench) -> float:
    """Of a receipt, none of which may be negative."""
    faults.num_rpcs += 1
    async with AsyncClient(faults.service.target) as client:
        stream = client.stream(request(Call(prompt=[5, 12], max_tokens=20)))
        assert [delta async for delta in stream.deltas()]
    assert stream.finished is not None
    durations = [value for field, value in stream.finished.receipt.ListFields() if field.name.endswith("_s")]
    assert min(durations) >= 0
    return max(durations)


def log_times(log: Path) -> Iterator[datetime]:
    """Of the lines that gateway and workers wrote."""
    for line in log.read_text().splitlines():
        if line.startswith("{") and "timestamp" in (fields := json.loads(line)):
            yield datetime.fromisoformat(fields["timestamp"])


@pytest.mark.slow
async def test_row_59_a_clock_that_jumps_ends_nothing_but_keys(bench: Any, tmp_path: Path, key: str) -> None:
    """Streams run through every jump; nobody is taken for dead, no deadline comes early or late, no duration is odd."""
    clock = tmp_path / "clock"
    settings = (*SETTINGS, f"--api-keys-file={tmp_path / 'keys.toml'}")
    async with bench(*settings, clock_file=str(clock)) as faults:
        processes = {each.pid for name in ("gateway", "worker") for each in faults.service.children(name)}
        everybody = calls(16, max_tokens=1500)
        running = asyncio.create_task(faults.run(everybody))
        codes, over_s, lasted_s = [await with_key(faults, key)], list[float](), list[float]()
        for jump_s in JUMPS_S:
            written = clock.with_suffix(".new")
            written.write_text(str(jump_s))
            written.rename(clock)
            codes.append(await with_key(faults, key))
            over_s.append(await at_deadline(faults))
            lasted_s.append(await longest_duration_s(faults))
            await asyncio.sleep(0.5)  # heartbeats under the new time
        await running
        assert {each.pid for name in ("gateway", "worker") for each in faults.service.children(name)} == processes
        assert codes == ["OK", "UNAUTHENTICATED", "OK", "UNAUTHENTICATED", "OK"]
        assert min(over_s) >= -SLEWED_S
        assert max(over_s) < 10.0  # 4000 steps take 20 s
        assert max(lasted_s) < 60
        await faults.check(everybody, limit_s=120)
        page = await faults.metrics()
        assert page.total("octavo_gateway_workers_lost_total") == 0
        assert page.total("octavo_e2e_request_latency_seconds_sum") < 60 * faults.num_rpcs
        logged = sorted(log_times(faults.service.log))
        assert logged[-1] - logged[0] > timedelta(days=365)  # the clock really jumped there
        record(
            "59 clock",
            jumps_s=list(JUMPS_S),
            streams=len(everybody),
            lost=0,
            false_kills=0,
            deadline_overshoot_ms_max=round(1000 * percentile(over_s, 100)),
        )
