"""How costs grow with the work: `python -m bench.costs [--draw]`, which writes docs/pictures/costs.json and costs.png.

Curves over powers of what there is to do, each with its exponent b, fitted to cost = a · size^b by least squares on
logarithms: the host's CPU time of a decode step by its rows; of a block in the worker's prefix index and in the
gateway's, to insert, look up and evict one, by the blocks that are there; memory of an open stream at a gateway, and
CPU time of its token, by the streams. CPU time: a busy machine adds little to it. --draw only draws what was measured
before.
"""

import argparse
import gc
import hashlib
import json
import math
import time
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from bench.figures import write_json
from bench.gateway import open_streams
from bench.machine import this_machine
from bench.worker.scheduler import make_steady
from octavo.blockmgr import BlockManager, BlockManagerConfig, PrefixCache
from octavo.gateway.workers.prefix_index import PrefixIndex
from octavo.wire.messages import KvEvent, KvEventKind

PICTURES = Path(__file__).resolve().parents[1] / "docs" / "pictures"
ROWS = (1, 4, 16, 64, 256, 1024)
BLOCKS = (10_000, 30_000, 100_000, 300_000, 1_000_000)
STREAMS = (100, 300, 1000, 3000, 10_000)
NUM_STEPS, STREAM_STEPS, REPEATS, NUM_MORE = 200, 2, 5, 100
BLOCK, PROMPT_BLOCKS = 16, 500
Curve = dict[str, Any]
"""Has name, unit, panel, and sizes with costs."""


def exponent(sizes: Sequence[float], costs: Sequence[float]) -> float:
    """b of cost = a · size^b. Raises ValueError for fewer than two sizes."""
    if len(sizes) < 2:
        raise ValueError("an exponent needs two sizes at least")
    x, y = np.log(sizes), np.log(costs)
    return float(np.polyfit(x, y, 1)[0])


def cpu_us(call: Callable[[], object]) -> float:
    """Microseconds of CPU time of this thread."""
    start = time.thread_time()
    call()
    return 1e6 * (time.thread_time() - start)


def curve(panel: str, name: str, unit: str, points: Iterable[tuple[float, float]]) -> Curve:
    """A curve with its exponent."""
    sizes, costs = zip(*points, strict=True)
    return {
        "panel": panel,
        "name": name,
        "unit": unit,
        "sizes": list(sizes),
        "costs": [float(f"{cost:.4g}") for cost in costs],
        "exponent": round(exponent(sizes, costs), 2) + 0.0,  # no "-0.00"
    }


def steps() -> list[Curve]:
    """The host's part of a steady decode step."""
    points = []
    for num_rows in ROWS:
        engine = make_steady(num_rows, 1, REPEATS * NUM_STEPS).engine

        def run(engine: Any = engine) -> None:
            for _ in range(NUM_STEPS):
                engine.step()

        points.append((num_rows, min(cpu_us(run) for _ in range(REPEATS)) / NUM_STEPS))
    return [curve("rows of a step", "host, a step", "µs", points)]


def worker_index() -> list[Curve]:
    """The block manager's index: commit prompts, look them up, and evict others from a pool full of cached blocks."""
    rows = [_worker_index(num_blocks) for num_blocks in BLOCKS]
    return _by_verb("worker", rows)


def _worker_index(num_blocks: int) -> dict[str, float]:
    manager = BlockManager(
        BlockManagerConfig(
            num_blocks=num_blocks,
            block_size=BLOCK,
            max_slots=4,
            max_blocks_per_slot=PROMPT_BLOCKS + 1,
            fingerprint=b"bench",
            prefix_cache=PrefixCache.ON,
        )
    )
    talks = _talks(num_blocks // PROMPT_BLOCKS + NUM_MORE)

    def admit(number: int) -> None:
        ids_T = talks[number].reshape(-1)
        slot = manager.admit("r", ids_T, reserve_tokens=len(ids_T)).slot
        manager.commit(slot, ids_T, len(ids_T))
        manager.release(slot, "r")
        manager.take_events()
        manager.take_updates()

    def look_up(number: int) -> None:
        manager.match(np.append(talks[number].reshape(-1), np.int32(1)))

    return _verbs(num_blocks // PROMPT_BLOCKS, admit, look_up)


def gateway_index() -> list[Curve]:
    """The router's tree: a worker reports blocks, prompts are looked up, and at the tree's limit the oldest are
    evicted."""
    rows = [_gateway_index(num_blocks) for num_blocks in BLOCKS]
    return _by_verb("gateway", rows)


def _gateway_index(num_blocks: int) -> dict[str, float]:
    index = PrefixIndex(block_size=BLOCK, max_nodes=num_blocks)
    talks = _talks(num_blocks // PROMPT_BLOCKS + NUM_MORE)

    def tell(number: int) -> None:
        parent = b""
        for place, block in enumerate(talks[number]):
            name = (number * PROMPT_BLOCKS + place + 1).to_bytes(16, "big")
            tokens = block.tobytes()
            index.apply(1, KvEvent(kind=KvEventKind.STORED, block_hash=name, parent_hash=parent, token_ids=tokens))
            parent = name

    def look_up(number: int) -> None:
        index.match(talks[number].reshape(-1), "")

    return _verbs(num_blocks // PROMPT_BLOCKS, tell, look_up)


def _talks(num: int) -> np.ndarray:
    """int32 [num, PROMPT_BLOCKS, BLOCK]: no two blocks are equal."""
    return np.arange(num * PROMPT_BLOCKS * BLOCK, dtype=np.int32).reshape(num, PROMPT_BLOCKS, BLOCK)


def _verbs(num_filling: int, insert: Callable[[int], None], look_up: Callable[[int], None]) -> dict[str, float]:
    """CPU time per block: for the last prompts that fill an index, for look-ups then, and for more prompts than it
    holds."""
    gc.collect()
    filling = [cpu_us(partial(insert, number)) for number in range(num_filling)]
    num_last = max(num_filling // 4, 5)
    asked = [cpu_us(partial(look_up, number)) for number in range(num_filling - 10, num_filling)]
    evicting = sum(cpu_us(partial(insert, number)) for number in range(num_filling, num_filling + NUM_MORE))
    return {
        "insert": float(np.median(filling[-num_last:])) / PROMPT_BLOCKS,
        "look up": float(np.median(asked)) / PROMPT_BLOCKS,
        "evict and insert": evicting / NUM_MORE / PROMPT_BLOCKS,
    }


def _by_verb(whose: str, rows: Sequence[dict[str, float]]) -> list[Curve]:
    return [
        curve(
            "blocks of a prefix index",
            f"{whose}, {verb}",
            "µs a block",
            [(size, row[verb]) for size, row in zip(BLOCKS, rows, strict=True)],
        )
        for verb in rows[0]
    ]


def streams() -> list[Curve]:
    """Memory and CPU time of a gateway's open streams."""
    rows = [open_streams.measure(num_streams, STREAM_STEPS) for num_streams in STREAMS]
    named = (
        ("kib_per_stream", "memory of a stream", "KiB"),
        ("us_per_token", "CPU of a token", "µs"),
        ("open_us", "CPU of opening one", "µs"),
    )
    return [
        curve("open streams of a gateway", name, unit, [(row["streams"], row[key]) for row in rows])
        for key, name, unit in named
    ]


def digest(content: dict[str, Any]) -> str:
    """A digest of the figures, which a picture has in its metadata."""
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


def draw(content: dict[str, Any], path: Path) -> None:
    """Draw a panel for each kind of work, with logarithmic axes."""
    from matplotlib.figure import Figure

    curves = content["curves"]
    panels = list(dict.fromkeys(each["panel"] for each in curves))
    figure = Figure(figsize=(4.6 * len(panels), 4.0), dpi=96, layout="constrained")
    for axes, panel in zip(figure.subplots(1, len(panels), squeeze=False)[0], panels, strict=True):
        for each in curves:
            if each["panel"] == panel:
                label = f"{each['name']}, {each['unit']}: size^{each['exponent']:.2f}"
                axes.loglog(each["sizes"], each["costs"], marker="o", markersize=3, linewidth=1.2, label=label)
        low, high = axes.get_ylim()
        decades = max(2, math.ceil(math.log10(high)) - math.floor(math.log10(low)))
        axes.set_ylim(10 ** math.floor(math.log10(low)), 10 ** (math.floor(math.log10(low)) + decades + 1))
        axes.set_xlabel(panel)
        axes.grid(color="#e5e7eb", linewidth=0.6)
        axes.legend(fontsize=7, loc="upper left")
    figure.savefig(path, metadata={"Description": digest(content), "Software": None})


def main() -> None:
    """Measure, write, draw, print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, default=PICTURES)
    parser.add_argument("--draw", action="store_true", help="draw what costs.json has")
    given = parser.parse_args()
    figures, picture = given.folder / "costs.json", given.folder / "costs.png"
    if not given.draw:
        machine = this_machine()
        curves = [*steps(), *worker_index(), *gateway_index(), *streams()]
        write_json(figures, {"machine": machine.as_dict(), "curves": curves})
    content = json.loads(figures.read_text())
    draw(content, picture)
    for each in content["curves"]:
        points = ", ".join(f"{size:,}: {cost:g}" for size, cost in zip(each["sizes"], each["costs"], strict=True))
        print(f"{each['panel']}; {each['name']}, {each['unit']} (size^{each['exponent']:.2f}): {points}")


if __name__ == "__main__":
    main()
