"""Ten thousand schemas, no two alike, good ones and hostile ones. `make faults-long`."""

import os
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from octavo import Client, OctavoError
from tests.support.faults.figures import record
from tests.support.faults.siege import besiege, settle
from tests.support.grammar.schemas import Json, SchemaMaker

NUM_SCHEMAS = int(os.environ.get("OCTAVO_SCHEMAS", "10000"))
NUM_CALLERS = 8
MIB = 1 << 20
MAX_GROWTH_MIB = 128  # the cache's own bound is in estimated bytes, and full long before the end


def constraint(index: int) -> dict[str, Any]:
    """No two alike; one in twenty is hostile."""
    if index % 20:
        schema = SchemaMaker(index).schema()
        return {"json_schema": schema | {"description": f"number {index}"}}
    hostile: list[dict[str, Any]] = [
        {"json_schema": deep(200, index)},
        {
            "json_schema": {
                "$ref": "#/$defs/a",
                "$defs": {"a": {"allOf": [{"$ref": "#/$defs/a"}, {"title": str(index)}]}},
            }
        },
        {"regex": f"(a+)+${index}"},
        {"regex": "(x{1,1000}){1,100}" + f"{index}"},
        {"regex": f"({index}"},
        {"json_schema": {"type": "string", "pattern": f"^(a|b)*a(a|b){{40}}{index}$"}},
    ]
    return hostile[index // 20 % len(hostile)]


def deep(depth: int, index: int) -> Json:
    """Arrays in arrays."""
    schema: Json = {"const": index}
    for _ in range(depth):
        schema = {"type": "array", "items": schema}
    return schema


def ask(target: str, indices: range) -> Counter[str]:
    """Each schema once; how the calls ended."""
    endings = Counter[str]()
    with Client(target) as client:
        for index in indices:
            try:
                client.complete(text="x", max_tokens=4, seed=index, timeout_s=60, **constraint(index))
                endings["OK"] += 1
            except OctavoError as error:
                endings[f"{getattr(error.code, 'name', error.code)} {error.reason}".strip()] += 1
    return endings


@pytest.mark.long
@pytest.mark.timeout(1800)
async def test_row_48_ten_thousand_schemas_cost_bounded_memory_and_no_worker(bench: Any) -> None:
    def attack(first: int, last: int) -> Counter[str]:
        with ThreadPoolExecutor(NUM_CALLERS) as callers:
            shares = [range(first + caller, last, NUM_CALLERS) for caller in range(NUM_CALLERS)]
            return sum(callers.map(lambda share: ask(faults.service.target, share), shares), Counter[str]())

    async with bench("--workers=1") as faults:
        worker = faults.service.children("worker")[0]
        warm = NUM_SCHEMAS // 5  # the cache is full, and the allocator has what it needs
        attack(0, warm)
        await settle(faults)
        await faults.note_gateways()
        before = worker.memory_info().rss / MIB
        cpu_s = sum(worker.cpu_times()[:2])
        siege = await besiege(faults, lambda: attack(warm, NUM_SCHEMAS), canary_s=10)
        after = worker.memory_info().rss / MIB
        record(
            f"48 {NUM_SCHEMAS}",
            schemas=NUM_SCHEMAS, endings=dict(siege.result), per_s=round((NUM_SCHEMAS - warm) / siege.seconds),
            worker_mib=f"{before:.0f} → {after:.0f} (the last {NUM_SCHEMAS - warm})",
            worker_cpu_ms_each=round(1000 * (sum(worker.cpu_times()[:2]) - cpu_s) / (NUM_SCHEMAS - warm), 1),
            **siege.figures(),
        )  # fmt: skip
        assert siege.result.total() == NUM_SCHEMAS - warm
        assert set(siege.result) <= {"OK", "INVALID_ARGUMENT CONSTRAINT", "INVALID_ARGUMENT INVALID_FIELD"}
        assert faults.service.children("worker") == [worker]
        assert after - before < MAX_GROWTH_MIB
