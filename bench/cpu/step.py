"""A decode step on this machine's CPU and what it is made of: `python -m bench.cpu.step [--rows 1 10 16]`.

Random weights of a published shape, packed as the worker packs them. Beside the whole step (forward pass, head, the
largest logit) stand its products alone, over the same weights in the same order, and its attention alone after them, so
that neither finds anything in a cache that it would not find there in a step. The rest is norms, RoPE, SiLU, additions
and Python. Before each step torch reads and sums the same weights: how near the products come to that is the last
column. Medians; prints a table, and writes JSON where --json says so. Set OMP_WAIT_POLICY=passive, as the worker does;
on a busy machine, --threads 1 --clock cpu.

Legend: T rows · N query heads · H head dim.
"""

import argparse
import statistics
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from rich.console import Console
from rich.table import Table

from bench.cpu.workloads import CLOCKS, Clock
from bench.figures import write_json
from bench.machine import this_machine
from bench.shapes import PUBLISHED
from octavo.model import CausalLM, get_backend, make_inputs
from octavo.model.attention.paged import PagedSequences
from octavo.model.cpu.ops import largest
from octavo.model.layers.linear import Linear, WeightFormat
from octavo.worker.loading.memory import keep_freed_memory, prefer_huge_pages

BLOCK_SIZE = 16


@dataclass(frozen=True, slots=True, kw_only=True)
class Parts:
    """Milliseconds of a step with this many rows. read_gb_s: rate at which the products read weights. of_plain_read:
    its ratio to a plain read of the same bytes, made in turns with it."""

    rows: int
    step_ms: float
    products_ms: float
    attention_ms: float
    rest_ms: float
    read_gb_s: float
    of_plain_read: float


class CpuStep:
    """A packed model, and sequences with equal contexts that decode together. Each method does its part once."""

    def __init__(self, model: CausalLM, *, rows: int, context: int, num_steps: int) -> None:
        self._model, self._backend = model, get_backend("sdpa")
        self._sequences = PagedSequences(
            model, self._backend, num_sequences=rows, max_tokens=context + num_steps + 1, block_size=BLOCK_SIZE
        )
        self._last = self._sequences.next_tokens({s: range(context) for s in range(rows)})
        _, self._inputs = make_inputs(self._sequences.tables, [context] * rows, [1] * rows, block_size=BLOCK_SIZE)
        self._products = [module for module in model.modules() if isinstance(module, Linear)]
        self._x = {
            size: torch.randn(rows, size).to(model.dtype) for size in {each.num_inputs for each in self._products}
        }
        config = model.config
        self._q_TNH = torch.randn(rows, config.num_attention_heads, config.head_dim).to(model.dtype)

    def whole(self) -> None:
        """A step, with the tokens of the previous one."""
        rows = self._sequences.step({s: [token] for s, token in self._last.items()})
        _, tokens_T = largest(self._model.logits(torch.cat(list(rows.values()))))
        self._last = dict(enumerate(tokens_T.tolist()))

    def products(self) -> None:
        """Every product of a step."""
        for linear in self._products:
            linear(self._x[linear.num_inputs])

    def read(self) -> None:
        """Read every weight of a step once that our own products multiply."""
        for linear in self._products:
            if linear.panels is not None:
                linear.panels.panels.view(-1).view(torch.int64).sum()

    def attention(self) -> None:
        """Attention of every layer."""
        kv, scale = self._sequences.kv, self._model.config.scale
        for k_pool, v_pool in zip(kv.k_pools, kv.v_pools, strict=True):
            self._backend.attend(self._q_TNH, k_pool, v_pool, self._inputs, scale)

    @property
    def weight_bytes(self) -> int:
        """Bytes of weights that a step reads."""
        return sum(linear.packed_bytes or linear.weight.numel() * 2 for linear in self._products)


def ms(work: Callable[[], None], clock: Clock) -> float:
    """Milliseconds of doing the work once."""
    start_s = clock()
    work()
    return 1e3 * (clock() - start_s)


def measure(model: CausalLM, *, rows: int, context: int, num_steps: int, clock: Clock) -> Parts:
    """Measure whole steps and their parts in turns."""
    step = CpuStep(model, rows=rows, context=context, num_steps=num_steps)
    works = (step.read, step.whole, step.products, step.attention)
    turns = [[ms(work, clock) for work in works] for _ in range(num_steps)]
    read_ms, step_ms, products_ms, attention_ms = (statistics.median(values) for values in zip(*turns, strict=True))
    return Parts(
        rows=rows,
        step_ms=step_ms,
        products_ms=products_ms,
        attention_ms=attention_ms,
        rest_ms=step_ms - products_ms - attention_ms,
        read_gb_s=step.weight_bytes / products_ms / 1e6,
        of_plain_read=read_ms / products_ms,
    )


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure, print, write."""
    parser = argparse.ArgumentParser(prog="python -m bench.cpu.step", description=__doc__)
    parser.add_argument("--shape", choices=PUBLISHED, default="0.5B")
    parser.add_argument("--weights", choices=("bf16", "int8", "int8-weights"), default="bf16")
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 4, 8, 10, 12, 16, 32])
    parser.add_argument("--context", type=int, default=200, help="tokens of every row; default: %(default)s")
    parser.add_argument("--steps", type=int, default=30, help="of each number of rows; default: %(default)s")
    parser.add_argument("--threads", type=int, help="of torch; default: one per core")
    parser.add_argument("--clock", choices=CLOCKS, default="wall", help="cpu: with --threads 1, on a busy machine")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args(arguments)
    prefer_huge_pages()
    if options.threads:
        torch.set_num_threads(options.threads)
    console, machine = Console(), this_machine()
    model = CausalLM.random(PUBLISHED[options.shape].config, seed=0, dtype=torch.bfloat16)
    model.pack_weights(WeightFormat(options.weights))
    keep_freed_memory()
    table = Table("rows", "step, ms", "products", "attention", "rest", "weights read, GB/s", "of a plain read")
    with torch.inference_mode():
        how = {"context": options.context, "num_steps": options.steps, "clock": CLOCKS[options.clock]}
        found = [measure(model, rows=rows, **how) for rows in options.rows]
    for parts in found:
        times = (
            parts.step_ms,
            parts.products_ms,
            parts.attention_ms,
            parts.rest_ms,
            parts.read_gb_s,
            parts.of_plain_read,
        )
        table.add_row(str(parts.rows), *(f"{value:.2f}" for value in times))
    console.print(table)
    console.print(machine.line(), f"shape {options.shape}, {options.weights} weights, context {options.context}")
    write_json(options.json, {"machine": machine.as_dict(), "parts": [asdict(parts) for parts in found]})
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
