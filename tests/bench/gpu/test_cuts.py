"""What bench/gpu/cuts.py tries and keeps; its engine in Triton's interpreter, at a tiny size."""

from typing import Any

import numpy as np
import pytest
import torch

pytest.importorskip("triton", reason="triton is not installed")

from bench.gpu.cuts import LEAST_GAIN, MAX_TILES, MOST_ELEMENTS, TURNS, Cuts, CutTimer, descend, options_of
from bench.gpu.timed_engine import GpuEngine
from bench.shapes import PUBLISHED
from octavo.model.gpu.small_batch_layers import LANES, MEASURED, cuts_of
from octavo.model.kernels.small_batch import mlp
from octavo.model.kernels.small_batch.launch import Cut
from tests.support.model.interpreter import WARNINGS
from tests.support.worker.cuda_runners import CONFIG, runner_pair

pytestmark = [*WARNINGS]
ONE, TWO, FOUR = (Cut(rows=rows, warps=1) for rows in (1, 2, 4))
OPTIONS = dict.fromkeys(TURNS, (ONE, TWO, FOUR))


@pytest.mark.parametrize("shape", PUBLISHED)
def test_what_is_tried_fits_into_registers_and_has_most_of_what_was_measured(shape: str) -> None:
    config = PUBLISHED[shape].config
    options = options_of(config)
    assert tuple(options) == TURNS
    for cut in options["down"]:
        length = config.intermediate_size
        assert cut.rows * length <= MOST_ELEMENTS * LANES * cut.warps
        assert cut.block is None or -(-length // cut.block) <= MAX_TILES
    taken = cuts_of(config)
    assert all(getattr(taken, name) in options[name] for name in ("output", "qkv", "gate_up"))


def test_measured_cuts_of_one_rank_are_among_what_is_tried() -> None:
    for config in (each.config for each in PUBLISHED.values()):
        heads = config.num_attention_heads * config.head_dim
        measured = MEASURED.get((config.hidden_size, heads, config.intermediate_size), {})
        assert all(cut in options_of(config)[name] for name, cut in measured.items())


def test_each_product_gets_its_best_cut_beside_those_of_the_others() -> None:
    def ms_of(cuts: Cuts) -> float:
        """Down is fastest with as many rows as output has, which is fastest with two."""
        return 1.0 + abs(cuts["output"].rows - 2) + abs(cuts["down"].rows - cuts["output"].rows) / 8

    told = list[str]()
    found = descend(dict.fromkeys(TURNS, ONE), OPTIONS, ms_of, rounds=5, note=told.append)
    assert found == dict.fromkeys(TURNS, ONE) | {"output": TWO, "down": TWO}
    assert told[0] == "round 1, output: 1x1 2.0000, 2x1 1.1250, 4x1 3.3750 ms"
    assert len(told) == 2 * len(TURNS)  # the second round changes nothing, so it is the last


def test_what_gains_too_little_is_left() -> None:
    found = descend(
        dict.fromkeys(TURNS, ONE), OPTIONS, lambda cuts: 1.0 - LEAST_GAIN / 2 * (cuts["qkv"] == TWO), rounds=3,
        note=lambda line: None,
    )  # fmt: skip
    assert found == dict.fromkeys(TURNS, ONE)


def test_the_cuts_that_are_timed_are_those_of_the_engines_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    rows: list[int] = []
    launch = mlp._launch

    def watched(y_BQ: torch.Tensor, matrix_OQ: torch.Tensor, *rest: Any, adds: int) -> None:
        cut = next(each for each in rest if isinstance(each, Cut))
        rows.append(cut.rows if matrix_OQ.shape[1] == CONFIG.intermediate_size else 0)
        launch(y_BQ, matrix_OQ, *rest, adds=adds)

    def few_ids_ms(engine: GpuEngine, batch: int, *, num_steps: int) -> float:
        for _ in range(batch):
            engine.ask(np.arange(5, dtype=np.int32), num_steps, temperature=0.0)
        seconds = engine.finish()
        assert engine.mail.num_tokens == num_steps * batch
        return 1e3 * seconds / num_steps

    monkeypatch.setattr(mlp, "_launch", watched)
    monkeypatch.setattr("bench.gpu.cuts.decode_ms", few_ids_ms)
    timer = CutTimer(runner_pair().fast)
    del rows[:]
    assert timer.ms(timer.cuts | {"down": Cut(rows=2, warps=1, block=16)}, num_steps=2) > 0
    assert set(rows) - {0} == {2}
    assert rows.count(2) >= CONFIG.num_hidden_layers  # of one step; the prompt's goes another way
