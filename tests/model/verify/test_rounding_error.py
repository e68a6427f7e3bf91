"""What rounding costs is measured as defined, and more rounding costs more."""

import copy

import pytest
import torch
from torch.nn.functional import cross_entropy

from octavo.model import CausalLM, ModelConfig
from octavo.model.attention.interface import get_backend
from octavo.model.attention.paged import paged_logits
from octavo.model.verify.rounding_error import Rounding, common_prefix, measure, round_model, until_end
from tests.support.model.checkpoints import tiny_config

TEXTS = [list(range(5, 70)), list(range(100, 20, -3))]
PROMPTS = [[5, 6, 7], [90, 3]]


def make() -> CausalLM:
    return CausalLM.random(ModelConfig.from_dict(tiny_config()), seed=0)


def test_a_model_has_no_error_against_itself() -> None:
    model = make()
    error = measure(model, copy.deepcopy(model), TEXTS, PROMPTS, max_new_tokens=5)
    assert error.perplexity == pytest.approx(error.before)
    assert (error.relative_error, error.divergence, error.same_choice) == (0, 0, 1)
    assert (error.same_outputs, error.num_outputs, error.mean_prefix) == (2, 2, 5)


@pytest.mark.parametrize("rounding", [way for way in Rounding if way is not Rounding.NONE])
def test_each_rounding_has_an_error_of_its_size(rounding: Rounding) -> None:
    model, before = make(), make()
    round_model(model, rounding)
    error = measure(model, before, TEXTS, PROMPTS, kv_dtype=rounding.kv_dtype, max_new_tokens=4).relative_error
    low, high = (0.05, 0.5) if "int4" in rounding.value else (0.002, 0.05) if "int8" in rounding.value else (0.01, 0.2)
    assert low < error < high


def test_perplexity_is_that_of_the_next_tokens() -> None:
    model, losses = make(), []
    for text in TEXTS:
        logits_TV = paged_logits(model, get_backend("reference"), text, [len(text)])
        losses.append(cross_entropy(logits_TV[:-1], torch.tensor(text[1:]), reduction="none"))
    expected = float(torch.cat(losses).mean().exp())
    assert measure(model, make(), TEXTS, []).perplexity == pytest.approx(expected, rel=1e-4)


def test_outputs_are_compared_up_to_their_end() -> None:
    model = make()
    object.__setattr__(model.config, "eos_token_ids", (9,))
    assert until_end([1, 9, 3, 9], model) == [1, 9]
    assert until_end([1, 2], model) == [1, 2]
    assert (common_prefix([1, 2], [1, 3]), common_prefix([1, 2], [1, 2])) == (1, 2)
