"""The first module whose numbers go wrong is named, with the row and what is wrong."""

import pytest
import torch

from octavo.model import CausalLM, ModelConfig, dense_logits
from octavo.model.numerics import NumericFault, NumericFinding, NumericsWatch, default_limit, watch_numerics
from tests.support.model.checkpoints import tiny_config

IDS = torch.arange(10)


@pytest.fixture
def model() -> CausalLM:
    return CausalLM.random(ModelConfig.from_dict(tiny_config()), seed=0)


def first_finding(model: CausalLM, limit: float | None = None) -> NumericFinding | None:
    with watch_numerics(model, limit=limit) as watch:
        dense_logits(model, IDS)
    return watch.first


def test_a_sound_model_has_no_finding(model: CausalLM) -> None:
    assert first_finding(model) is None


@pytest.mark.parametrize(
    ("value", "fault"),
    [(torch.nan, NumericFault.NAN), (torch.inf, NumericFault.INFINITE), (1e9, NumericFault.OVER_LIMIT)],
)
def test_the_module_that_goes_wrong_first_is_named(model: CausalLM, value: float, fault: NumericFault) -> None:
    model.decoder_layers[1].mlp.gate_up_proj.weight.data[7, 3] = value
    finding = first_finding(model)
    assert finding is not None
    assert (finding.module, finding.fault, finding.row) == ("layers.1.mlp.gate_up_proj", fault, 0)
    assert finding.num_bad == len(IDS)
    assert str(finding).startswith(f"layers.1.mlp.gate_up_proj: output is {fault.value}: 10 values, first in row 0")


def test_a_model_with_fused_layers_is_watched_stage_by_stage_and_fused_again_afterwards() -> None:
    model = CausalLM.random(ModelConfig.from_dict(tiny_config()), seed=0, dtype=torch.bfloat16)
    model.pack_weights()
    rests = [layer.rest for layer in model.decoder_layers]
    panels = model.decoder_layers[1].mlp.gate_up_proj.panels
    if panels is None or None in rests:
        pytest.skip("nothing is fused here: no C compiler, or no CPU with AVX512-BF16")
    panels.panels[0, 1, 7] = torch.nan
    finding = first_finding(model)
    assert finding is not None
    assert (finding.module, finding.fault) == ("layers.1.mlp.gate_up_proj", NumericFault.NAN)
    assert [layer.rest for layer in model.decoder_layers] == rests


def test_the_row_of_the_token_is_found(model: CausalLM) -> None:
    model.embed_tokens.weight.data[6] = torch.nan
    finding = first_finding(model)
    assert finding is not None
    assert (finding.module, finding.row, finding.num_bad) == ("embed_tokens", 6, 64)


def test_a_lower_limit_finds_what_is_merely_large(model: CausalLM) -> None:
    finding = first_finding(model, limit=0.5)
    assert finding is not None
    assert finding.fault is NumericFault.OVER_LIMIT
    assert 0.5 < finding.largest < 100


def test_the_limit_follows_from_the_dtype() -> None:
    assert [default_limit(dtype) for dtype in (torch.float32, torch.bfloat16, torch.float16)] == [1e6, 1e6, 32752.0]


def test_watching_can_begin_again_and_leaves_no_hooks(model: CausalLM) -> None:
    model.embed_tokens.weight.data[6] = torch.nan
    watch = NumericsWatch(model)
    watch.attach()
    watch.attach()
    dense_logits(model, IDS)
    assert watch.first is not None
    watch.reset()
    assert watch.first is None
    watch.detach()
    watch.detach()
    dense_logits(model, IDS)
    assert watch.first is None
    assert not any(module._forward_hooks for module in model.modules())
