"""Draws the pictures of the pages: `python docs/pictures/draw.py` writes architecture.svg, request.svg and blocks.svg.

The map of blocks is that of a real block manager to which the requests in the picture were given.
"""

from html import escape
from pathlib import Path

import numpy as np

from octavo.blockmgr import BlockManager, BlockManagerConfig, PrefixCache
from octavo.blockmgr.block_map import BlockState

HERE = Path(__file__).resolve().parent
INK, PALE, LINE = "#1f2933", "#52606d", "#9aa5b1"
GATEWAY, WORKER, OTHERS, DEVICE = "#dbeafe", "#dcfce7", "#f1f5f9", "#fde68a"
COLOURS = {
    BlockState.FREE: ("#ffffff", "blank"),
    BlockState.CACHED: ("#bfdbfe", "cached: free, and found by its content"),
    BlockState.ACTIVE: ("#86efac", "held by one request"),
    BlockState.SHARED: ("#f59e0b", "held by several"),
}


class Picture:
    """Shapes, and the file that they end in."""

    def __init__(self, width: int, height: int, title: str) -> None:
        self._parts = [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" font-family="sans-serif" '
            f'font-size="13" role="img" aria-label="{escape(title)}">',
            f"<title>{escape(title)}</title>",
            '<defs><marker id="tip" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="8" markerHeight="8" '
            f'orient="auto-start-reverse"><path d="M0,0 L8,4 L0,8 z" fill="{PALE}"/></marker></defs>',
            f'<rect width="{width}" height="{height}" fill="#ffffff"/>',
        ]

    def box(self, x: float, y: float, width: float, height: float, fill: str, title: str = "", *lines: str) -> None:
        """A title in bold, lines below it."""
        self._parts.append(
            f'<rect x="{x}" y="{y}" width="{width}" height="{height}" rx="6" fill="{fill}" stroke="{LINE}"/>'
        )
        if title:
            self.text(x + 10, y + 20, title, weight="bold")
        for number, line in enumerate(lines):
            self.text(x + 10, y + 40 + 18 * number, line, fill=PALE)

    def text(
        self, x: float, y: float, words: str, *, fill: str = INK, weight: str = "normal", anchor: str = "start"
    ) -> None:
        """One line."""
        self._parts.append(
            f'<text x="{x}" y="{y}" fill="{fill}" font-weight="{weight}" text-anchor="{anchor}">{escape(words)}</text>'
        )

    def arrow(self, x1: float, y1: float, x2: float, y2: float, words: str = "") -> None:
        """From one point to another; words above its middle."""
        self._parts.append(
            f'<line x1="{x1}" y1="{y1}" x2="{x2}" y2="{y2}" stroke="{PALE}" stroke-width="1.5" marker-end="url(#tip)"/>'
        )
        if words:
            self.text((x1 + x2) / 2, min(y1, y2) + abs(y2 - y1) / 2 - 7, words, fill=PALE, anchor="middle")

    def svg(self) -> str:
        """The whole file."""
        return "\n".join([*self._parts, "</svg>"]) + "\n"


def architecture() -> str:
    """Processes, and what each has."""
    picture = Picture(1000, 430, "Callers, gateways, workers, and what watches them")
    picture.text(
        20, 28, "octavo serve: starts the processes of one host, starts again what dies, drains them", fill=PALE
    )
    picture.box(
        20,
        50,
        150,
        260,
        OTHERS,
        "callers",
        "Python, Node, Go,",
        "Java, Rust: gRPC",
        "",
        "smg, openai",
        "tritonclient",
        "grpcurl",
    )
    picture.box(
        290,
        50,
        270,
        260,
        GATEWAY,
        "gateway × N (no torch)",
        "TLS, keys, tenants",
        "check every field",
        "chat template, tokenizer",
        "admission, limits",
        "choose a worker",
        "",
        "detokenize, stop strings,",
        "tool calls",
        "streams, receipts",
    )
    picture.box(700, 50, 280, 260, WORKER, "worker × M (one per model, device)", "scheduler: who goes next")
    picture.box(715, 112, 250, 60, "#ffffff", "block manager", "who owns which KV block")
    picture.box(715, 180, 250, 60, "#ffffff", "runner", "a plan to tensors, results back")
    picture.box(715, 248, 250, 52, DEVICE, "model on a CPU or GPU", "")
    picture.text(725, 288, "kernels, KV pool in blocks", fill=PALE)
    picture.arrow(170, 130, 290, 130, "gRPC")
    picture.arrow(290, 230, 170, 230, "deltas")
    picture.arrow(560, 130, 700, 130, "Run (ZeroMQ)")
    picture.arrow(700, 230, 560, 230, "one StepOutput")
    picture.text(630, 250, "a step and gateway", fill=PALE, anchor="middle")
    picture.box(290, 360, 690, 50, OTHERS, "")
    picture.text(
        300, 390, "Prometheus, Grafana, OpenTelemetry, WatchLoad: read only, off the way of a token", fill=PALE
    )
    picture.arrow(425, 360, 425, 312)
    picture.arrow(840, 360, 840, 312)
    return picture.svg()


def request() -> str:
    """A request from its call to its receipt, by who has it; a bar in the words begins a new line."""
    picture = Picture(1000, 345, "A request's life, from left to right")
    lanes = {"caller": 10, "gateway": 90, "worker": 170, "device": 250}
    for name, y in lanes.items():
        picture.text(20, y + 30, name, weight="bold")
        picture.arrow(100, y + 58, 985, y + 58)
    for lane, x, width, fill, words in (
        ("caller", 105, 75, OTHERS, "Generate"),
        ("gateway", 185, 60, GATEWAY, "check"),
        ("gateway", 250, 100, GATEWAY, "render|tokenize"),
        ("gateway", 355, 70, GATEWAY, "choose|a worker"),
        ("worker", 430, 60, WORKER, "queue"),
        ("worker", 495, 90, WORKER, "blocks,|shared first"),
        ("device", 590, 90, DEVICE, "prefill|in chunks"),
        ("device", 690, 58, DEVICE, "decode"),
        ("device", 753, 58, DEVICE, "decode"),
        ("device", 816, 58, DEVICE, "decode"),
        ("gateway", 690, 184, GATEWAY, "text, stop strings,|tool calls"),
        ("caller", 700, 55, OTHERS, "delta"),
        ("caller", 763, 55, OTHERS, "delta"),
        ("worker", 880, 90, WORKER, "blocks back"),
        ("caller", 880, 90, OTHERS, "finished,|receipt"),
    ):
        picture.box(x, lanes[lane] + 7, width, 42, fill)
        lines = words.split("|")
        for number, line in enumerate(lines):
            picture.text(x + width / 2, lanes[lane] + 41 - 8 * len(lines) + 16 * number, line, anchor="middle")
    for x, words in ((105, "the receipt's seconds:  gateway"), (430, "queue"), (590, "prefill"), (690, "decode")):
        picture.text(x, 332, words, fill=PALE)
    return picture.svg()


BLOCK, NUM_BLOCKS, NUM_COLUMNS = 16, 60, 15
SYSTEM = np.arange(5 * BLOCK, dtype=np.int32)


def filled_manager() -> tuple[BlockManager, dict[str, int]]:
    """Three requests with one system prompt, one without it, and what an ended one left; slots by name."""
    config = BlockManagerConfig(
        num_blocks=NUM_BLOCKS,
        block_size=BLOCK,
        max_slots=8,
        max_blocks_per_slot=40,
        fingerprint=b"picture",
        prefix_cache=PrefixCache.ON,
        secret=b"picture",
    )
    manager, slots = BlockManager(config), dict[str, int]()
    for name, tokens in {
        "ended": np.arange(9_000, 9_000 + 6 * BLOCK, dtype=np.int32),
        "a": np.concatenate([SYSTEM, np.arange(1_000, 1_000 + 7 * BLOCK + 3, dtype=np.int32)]),
        "b": np.concatenate([SYSTEM, np.arange(2_000, 2_000 + 3 * BLOCK + 9, dtype=np.int32)]),
        "c": np.concatenate([SYSTEM, np.arange(3_000, 3_000 + 2 * BLOCK, dtype=np.int32)]),
        "d": np.arange(4_000, 4_000 + 8 * BLOCK + 1, dtype=np.int32),
    }.items():
        slots[name] = int(manager.admit(name, tokens, reserve_tokens=len(tokens)).slot)
        manager.commit(slots[name], tokens, len(tokens))
    manager.release(slots.pop("ended"), "ended")
    return manager, slots


def blocks() -> str:
    """The pool by state, and the tables that lead into it."""
    manager, slots = filled_manager()
    cells = manager.map(NUM_BLOCKS).cells_C
    picture = Picture(1000, 400, "The map of a pool of blocks, and four requests' tables")
    picture.text(20, 28, f"{NUM_BLOCKS} blocks of {BLOCK} tokens", weight="bold")
    for block, state in enumerate(cells.tolist()):
        x, y = 20 + 38 * (block % NUM_COLUMNS), 44 + 38 * (block // NUM_COLUMNS)
        picture.box(x, y, 34, 34, COLOURS[BlockState(state)][0])
        picture.text(x + 17, y + 22, str(block), fill=PALE, anchor="middle")
    for number, (fill, meaning) in enumerate(COLOURS.values()):
        picture.box(620, 44 + 30 * number, 22, 22, fill)
        picture.text(652, 60 + 30 * number, meaning)
    picture.text(20, 230, "tables: where each request's tokens are", weight="bold")
    for number, (name, slot) in enumerate(sorted(slots.items())):
        row = [block for block in manager.table_SM[slot].tolist() if block >= 0]
        y = 246 + 36 * number
        picture.text(20, y + 20, name, weight="bold")
        for place, block in enumerate(row):
            picture.box(48 + 38 * place, y, 34, 30, COLOURS[BlockState(cells[block])][0])
            picture.text(48 + 38 * place + 17, y + 20, str(block), fill=PALE, anchor="middle")
    picture.text(620, 262, "a, b and c begin with the same 80 tokens:", fill=PALE)
    picture.text(620, 282, "five blocks are computed once and held three times.", fill=PALE)
    picture.text(620, 302, "A request that ended left six blocks in the cache;", fill=PALE)
    picture.text(620, 322, "they are taken, oldest first, when blanks run out.", fill=PALE)
    return picture.svg()


PICTURES = {"architecture.svg": architecture, "request.svg": request, "blocks.svg": blocks}


def main() -> None:
    """Writes them all."""
    for name, draw in PICTURES.items():
        (HERE / name).write_text(draw())


if __name__ == "__main__":
    main()
