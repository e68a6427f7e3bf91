"""What is added to a linear's product (an adapter) gives what the same weights in one matrix give."""

import pytest
import torch

from octavo.model import CausalLM, ModelConfig, dense_logits, get_backend
from octavo.model.attention.paged import paged_logits
from octavo.model.layers.linear import Linear
from tests.support.model.checkpoints import QWEN3, tiny_config

IDS = list(range(3, 40))
RANK = 4


def models(dtype: torch.dtype, **changes: object) -> tuple[CausalLM, CausalLM]:
    """One with a low-rank addend at every linear, one with the same in its weights."""
    config = ModelConfig.from_dict(tiny_config(tie_word_embeddings=False, **changes))
    plain, merged = (CausalLM.random(config, seed=4, dtype=dtype) for _ in range(2))
    generator = torch.Generator().manual_seed(5)
    for path, module in merged.named_modules():
        if isinstance(module, Linear):
            down = torch.randn(RANK, module.num_inputs, generator=generator).to(dtype) * module.num_inputs**-0.5
            up = torch.randn(module.num_outputs, RANK, generator=generator).to(dtype) * 0.3
            module.weight.data += up @ down
            plain.set_addend(path, lambda x, down=down, up=up: x @ down.T @ up.T)
    return plain, merged


@pytest.mark.parametrize("changes", [{}, QWEN3], ids=["qwen2", "qwen3"])
def test_addends_at_every_linear_are_as_if_they_were_in_the_weights(changes: dict[str, object]) -> None:
    plain, merged = models(torch.float32, **changes)
    expected_TV = dense_logits(merged, torch.tensor(IDS))
    with torch.inference_mode():
        for found_TV in (
            dense_logits(plain, torch.tensor(IDS)),
            paged_logits(plain, get_backend("sdpa"), IDS, [20, 1, 1, 15]),
        ):
            torch.testing.assert_close(found_TV, expected_TV, rtol=0, atol=1e-4)


def test_a_packed_model_takes_them_and_is_fused_again_without_them() -> None:
    plain, merged = models(torch.bfloat16)
    paths = [path for path, module in plain.named_modules() if isinstance(module, Linear)]
    for model in (plain, merged):
        model.pack_weights()
    with torch.inference_mode():
        found_TV, expected_TV = (paged_logits(model, get_backend("sdpa"), IDS, [37]) for model in (plain, merged))
        assert float((found_TV - expected_TV).norm() / expected_TV.norm()) < 0.03
        assert all(layer.rest is None for layer in plain.decoder_layers)
        for path in paths:
            plain.set_addend(path, None)
        without_TV = paged_logits(plain, get_backend("sdpa"), IDS, [37])
    assert float((without_TV - expected_TV).norm() / expected_TV.norm()) > 0.1
    is_fused = [layer.rest is not None for layer in merged.decoder_layers]
    assert [layer.rest is not None for layer in plain.decoder_layers] == is_fused


def test_only_a_linear_takes_one() -> None:
    plain, _ = models(torch.float32)
    with pytest.raises(AttributeError, match=r"layers\.0\.mlp is a Mlp, not a Linear"):
        plain.set_addend("layers.0.mlp", torch.relu)
