"""Steady steps with every sampling parameter enqueue without waiting for the device."""

import warnings
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import pytest
import torch

pytest.importorskip("triton", reason="triton is not installed")

from octavo.model.kernels.sampling.mask import num_words
from octavo.wire.messages import Grammar, GrammarKind
from octavo.worker.runners.cuda.graph_runner import Launching
from octavo.worker.scheduler.plan import StepMasks, StepPlan
from tests.support.worker.cuda_runners import VOCAB, Hand, prompt, runner_pair
from tests.support.worker.hand_plans import chunk

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")]
GRAMMAR = Grammar(kind=GrammarKind.REGEX, source="unread here")


@contextmanager
def waiting_forbidden() -> Iterator[None]:
    """What waits for the device raises; torch warns that it does not find every such call."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize("has_grammar", [True, False], ids=["grammar", "recorded"])
def test_nothing_waits_between_two_steps(has_grammar: bool) -> None:
    hand = Hand(runner_pair(launching=Launching.GRAPHS))
    filters = {"temperature": 9.0, "top_k": 70, "top_p": 0.9, "typical_p": 0.9, "num_logprobs": 5}
    masks = {"logit_bias": {3: 1.0}, "bad_words": ((1, 2), (5,)), "min_tokens": 9, "stop_token_ids": (4,)}
    hand.join(0, prompt(0, 5), **filters, **(masks if has_grammar else {}))
    hand.join(1, prompt(1, 5), grammar=GRAMMAR if has_grammar else None, repetition_penalty=1.2)
    everything = StepMasks(index_N=np.asarray([1]), bits_NW=np.full((1, num_words(VOCAB)), -1, np.int32))
    hand.launch(prefill=(chunk(0, 0, 5), chunk(1, 0, 5)))
    hand.runner.constrain(everything)
    hand.runner.collect()
    fast = hand.runner.fast
    slots, updates = np.asarray([0, 1], np.int32), np.asarray([[0, 1, 20], [1, 1, 21]], np.int32)
    for step in range(3):
        positions = np.full(2, 5 + step, np.int32)
        plan = StepPlan(
            step=9 + step,
            decode_slots_S=slots,
            decode_positions_S=positions,
            block_updates_U3=updates[: 2 * (not step)],
        )
        with waiting_forbidden():
            fast.launch(plan)
            fast.constrain(everything)
        assert fast.collect().logprobs.keys() == {0}
