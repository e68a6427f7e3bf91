"""The norm gives the bits of transformers', and is worked out in fp32 whatever the dtype."""

import pytest
import torch
from transformers.models.qwen2.modeling_qwen2 import Qwen2RMSNorm

from octavo.model.layers.decoder import RmsNorm


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_every_dtype_gives_the_bits_of_transformers(dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(0)
    x_TD = torch.randn(17, 896, generator=generator).to(dtype)
    weight_D = (1 + torch.randn(896, generator=generator)).to(dtype)
    theirs = Qwen2RMSNorm(896, eps=1e-6).to(dtype)
    theirs.load_state_dict({"weight": weight_D})
    with torch.inference_mode():
        expected = theirs(x_TD)
    assert torch.equal(RmsNorm(weight_D, 1e-6)(x_TD), expected)


def test_squares_that_overflow_float16_do_no_harm() -> None:
    x_TD = torch.full((2, 64), 1000.0, dtype=torch.float16)
    expected = torch.ones(2, 64, dtype=torch.float16)
    assert torch.equal(RmsNorm(torch.ones(64, dtype=torch.float16), 1e-6)(x_TD), expected)
