"""The CPU benchmark on a toy: it measures what it says, and our side really generates."""

import io
import json
import time
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
import torch
from rich.console import Console

from bench.cpu.compare import Effort, Line, Workload, measure, show, write_json
from bench.cpu.local_engine import LocalEngine
from bench.cpu.workloads import Ask, ask, mixed
from bench.machine import this_machine
from octavo.model import CausalLM, ModelConfig, generate

TOY = ModelConfig(
    vocab_size=10_000,
    hidden_size=32,
    intermediate_size=48,
    num_hidden_layers=1,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=8,
    max_position_embeddings=512,
    tie_word_embeddings=True,
)
TINY_EFFORT = Effort(repeats=2, decode_tokens=2, prefill_tokens=8, mixed_requests=3, longest=24)


class Fixed:
    """A side that takes as long as it is told."""

    def __init__(self, name: str, *seconds: float) -> None:
        self.name, self._seconds = name, list(seconds)

    def serve(self, asks: Sequence[Ask]) -> float:
        return self._seconds.pop(0)


def test_our_side_gives_the_tokens_of_the_oracle() -> None:
    model = CausalLM.random(TOY, seed=0)
    for parameter in model.parameters():
        parameter.data *= 8
    asks = mixed(np.random.default_rng(0), count=5, shortest=2, longest=12)
    engine = LocalEngine(model, max_num_seqs=3, max_model_len=30, max_batch_tokens=8)
    expected = [generate(model, a.prompt_ids_T.tolist(), max_new_tokens=a.num_output) for a in asks]
    assert engine.outputs(asks) == expected


@pytest.mark.parametrize(
    ("unit", "ratios"), [("ms", {"one": 4.0, "other": 5.0}), ("tok/s", {"one": 0.25, "other": 0.2})]
)
def test_medians_are_compared_with_each_of_the_others(unit: str, ratios: dict[str, float]) -> None:
    sides = [Fixed("ours", 1.0, 0.5, 9.0), Fixed("one", 4.0, 4.0, 4.0), Fixed("other", 5.0, 5.0, 5.0)]
    one = ask(np.random.default_rng(0), num_prompt=1, num_output=1)
    workload = Workload("w", unit, lambda side, rng: side.serve([one]), sides, bar=1.0)
    for turn in range(3):
        workload.take_turns(turn, Console(quiet=True))
    values = {"ours": [1.0, 0.5, 9.0], "one": [4.0] * 3, "other": [5.0] * 3}
    assert workload.line() == Line(workload="w", unit=unit, values=values, ratios=ratios, bar=1.0)


def test_the_whole_run_prints_and_writes_every_side(tmp_path: Path) -> None:
    console = Console(record=True, width=160, file=io.StringIO())
    lines = measure(TOY, TINY_EFFORT, console, clock=time.perf_counter)
    show(lines, this_machine(), console)
    write_json(tmp_path / "deep" / "figures.json", lines, this_machine(), "wall", 1.0)
    written = json.loads((tmp_path / "deep" / "figures.json").read_text())
    turns = {
        line["workload"]: {side: len(values) for side, values in line["values"].items()} for line in written["lines"]
    }
    alone = {"octavo": 2, "transformers, one by one": 2}
    assert turns == {
        "decode, batch 1": alone,
        "prefill, 8 tokens": alone,
        "mixed, 3 requests": {"octavo": 2, "transformers, one by one": 1, "transformers, padded batch": 2},
    }
    assert written["machine"]["torch"] == torch.__version__
    assert "octavo is" in console.export_text()
