"""Sums over chunks, by hand, and when all of a step's hidden states are needed."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from octavo.wire.messages import Pooling, SamplingParams
from octavo.worker.runners.outputs import Pooler, PromptScorer
from octavo.worker.scheduler.plan import Chunk, NewRequest, Slot, SlotLogprobs, StepPlan

HIDDEN_TD = torch.arange(60, dtype=torch.float32).reshape(20, 3)


def join(slot: int, pooling: Pooling | None) -> NewRequest:
    ids_T = np.zeros(5, np.int32)
    return NewRequest(
        slot=Slot(slot),
        request_id="r",
        token_ids_T=ids_T,
        num_prompt_tokens=5,
        sampling=SamplingParams(),
        pooling=pooling,
    )


def plan(*chunks: tuple[int, int, int, bool], num_decodes: int = 0) -> StepPlan:
    prefill = tuple(Chunk(slot=Slot(s), start=start, num_tokens=n, is_last=last) for s, start, n, last in chunks)
    slots = np.arange(9, 9 + num_decodes, dtype=np.int32)
    return StepPlan(step=1, prefill=prefill, decode_slots_S=slots, decode_positions_S=slots)


def take(pooler: Pooler, step: StepPlan, *, first_token: int = 0) -> dict[int, list[float]]:
    return {
        index: vector_D.tolist()
        for index, vector_D in pooler.take(step, HIDDEN_TD.__getitem__, first_token=first_token).items()
    }


def rows(*indices: int) -> list[float]:
    return HIDDEN_TD[list(indices)].mean(dim=0).tolist()


def test_chunks_of_a_prompt_add_up_and_others_are_passed_over() -> None:
    pooler = Pooler()
    for slot, pooling in enumerate((Pooling.MEAN, None, Pooling.LAST_TOKEN)):
        pooler.join(join(slot, pooling))
    assert take(pooler, plan((0, 0, 2, False), (1, 0, 3, True), (2, 0, 4, False), num_decodes=2), first_token=4) == {}
    done = take(pooler, plan((0, 2, 3, True), (1, 3, 1, True), (2, 4, 1, True), num_decodes=2), first_token=2)
    mean = ((HIDDEN_TD[4:6].sum(dim=0) + HIDDEN_TD[2:5].sum(dim=0)) / 5).tolist()
    assert done == {2: mean, 4: HIDDEN_TD[6].tolist()}
    assert take(pooler, plan((0, 0, 5, True))) == {}


@pytest.mark.parametrize("before", [Pooling.MEAN, Pooling.LAST_TOKEN])
def test_a_slot_forgets_what_it_had_gathered_when_a_request_joins(before: Pooling) -> None:
    pooler = Pooler()
    pooler.join(join(0, before))
    take(pooler, plan((0, 0, 2, False)))
    pooler.join(join(0, Pooling.MEAN))
    assert take(pooler, plan((0, 0, 5, True))) == {0: rows(0, 1, 2, 3, 4)}
    pooler.join(join(0, before))
    take(pooler, plan((0, 0, 2, False)))
    pooler.join(join(0, None))
    assert take(pooler, plan((0, 0, 5, True))) == {}


def test_sums_are_in_float32() -> None:
    pooler = Pooler()
    pooler.join(join(0, Pooling.MEAN))
    half_TD = torch.full((20, 3), 1.0 + 2**-7, dtype=torch.bfloat16)
    (vector_D,) = pooler.take(plan((0, 0, 20, True)), half_TD.__getitem__, first_token=0).values()
    assert (vector_D.dtype, vector_D.tolist()) == (torch.float32, [1.0 + 2**-7] * 3)


def test_once_a_prompt_is_scored_only_sampled_tokens_are_read_again() -> None:
    scorer = PromptScorer(lambda hidden_ND: torch.zeros(len(hidden_ND), 8), vocab_size=8)
    scorer.join(replace(join(0, None), sampling=SamplingParams(num_prompt_logprobs=1)))
    scorer.join(join(1, None))
    for step, num_scored in ((plan((0, 0, 2, False), (1, 0, 5, True)), 2), (plan((0, 2, 3, True)), 2)):
        assert scorer.is_used
        assert {index: len(scores) for index, scores in take_scores(scorer, step).items()} == {0: num_scored}
    assert not scorer.is_used


def take_scores(scorer: PromptScorer, step: StepPlan) -> dict[int, list[SlotLogprobs]]:
    return scorer.take(step, HIDDEN_TD.__getitem__, first_token=0)
