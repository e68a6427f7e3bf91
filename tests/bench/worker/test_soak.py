"""The soak's parts: the line through the samples, and a short run over the oracle."""

from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest

from bench.in_process import InProcess
from bench.worker.soak_load import Canary, Load, LoadSizes
from bench.worker.soak_run import Sample, Soak, slope, verdicts
from octavo.worker.config import Deterministic
from octavo.worker.runners.oracle.model import OracleModel
from octavo.worker.runners.oracle.runner import OracleRunner

ONE = Sample(
    at_s=0.0, rss=0, cuda_allocated=0, cuda_reserved=0, cuda_used=0, num_free=0, num_cached=0, num_active=0,
    num_preemptions=0, num_hit_tokens=0, num_tokens=0, num_steps=0, violations=(),
)  # fmt: skip


def test_what_grows_is_seen_and_noise_is_flat() -> None:
    grows = [replace(ONE, at_s=10.0 * i, rss=(500 << 20) + i * (1 << 20)) for i in range(30)]
    found = slope(grows, "rss")
    assert found.kib_per_minute == pytest.approx(6 * 1024)
    assert not found.is_flat
    rng = np.random.default_rng(0)
    noise = [replace(ONE, at_s=10.0 * i, rss=(500 << 20) + int(rng.integers(1 << 20))) for i in range(30)]
    assert slope(noise, "rss").is_flat
    with pytest.raises(ValueError, match="too few"):
        slope(noise[:3], "rss")


def soak(*, num_blocks: int, num_seconds: float) -> Soak:
    """Over the oracle, with a clock that every step advances by a tenth of a second."""
    model = OracleModel(vocab_size=500, eos_token_ids=())
    sizes = SimpleNamespace(num_blocks=num_blocks, block_size=4, max_slots=6, max_model_len=120, vocab_size=500)
    runner = OracleRunner(model, num_blocks=num_blocks, block_size=4, max_slots=6, max_blocks_per_slot=31)
    engine = InProcess(runner, sizes, max_batch_tokens=32)
    load = Load(
        engine=engine,
        sizes=LoadSizes(concurrency=9, longest_prompt=60, longest_output=30, vocab_size=500),
        rng=np.random.default_rng(0),
    )

    def clock() -> float:
        return engine.engine.num_steps * 0.1

    canary = Canary(engine=engine, prompt_ids_T=np.arange(30, dtype=np.int32), clock=clock)
    here = Soak(engine=engine, load=load, canary=canary, clock=clock)
    here.run(num_seconds)
    return here


def test_a_soak_ends_with_everything_answered_and_says_what_it_saw() -> None:
    here = soak(num_blocks=70, num_seconds=80.0)
    found = verdicts(here, Deterministic.ON)
    del found["memory flat"]  # of the test's own process
    assert found == dict.fromkeys(found, True)
    assert here.canary.num_answers > 5
    assert not here.load.open
    assert here.engine.mail.tokens == {}
    assert here.engine.mail.finished == {}


def test_a_canary_that_changes_its_answer_is_told() -> None:
    here = soak(num_blocks=70, num_seconds=45.0)
    here.canary.first = (here.canary.first[0] + 1, *here.canary.first[1:])
    here.canary.ask()
    while here.canary.handle is not None:
        here._step()
    assert [parting.index for parting in here.canary.partings] == [0]
    assert not verdicts(here, Deterministic.ON)["canary gave one answer"]
