"""Weights that are drawn instead of read, for shapes that are on no disk."""

from pathlib import Path

import pytest
import torch

from octavo.model import ConfigError, get_backend
from octavo.model.attention.paged import paged_logits
from octavo.model.checkpoint.loading import draw_model
from octavo.model.parallel import Ranks
from tests.support.model.checkpoints import write_tiny_checkpoint
from tests.support.model.packed_checkpoints import GPTQ_CONFIG


def test_a_folder_without_weights_gives_a_model_with_finite_answers(tmp_path: Path) -> None:
    folder = write_tiny_checkpoint(tmp_path, tie_word_embeddings=False)
    (folder / "model.safetensors").unlink()
    model, again = draw_model(folder, dtype=torch.float32), draw_model(folder, dtype=torch.float32)
    logits_TV = paged_logits(model, get_backend("sdpa"), list(range(20)), [20])
    assert 0.1 < logits_TV.std() < 10
    assert model.fingerprint == again.fingerprint != b""
    assert all(torch.equal(*pair) for pair in zip(model.parameters(), again.parameters(), strict=True))


def test_a_rank_draws_what_it_has(tmp_path: Path) -> None:
    folder = write_tiny_checkpoint(tmp_path)
    whole, part = draw_model(folder), draw_model(folder, ranks=Ranks(rank=1, size=2))
    sizes = [sum(each.numel() for each in model.decoder_layers[0].mlp.parameters()) for model in (whole, part)]
    assert sizes[0] == 2 * sizes[1]
    assert whole.fingerprint != part.fingerprint


def test_packed_weights_are_not_drawn(tmp_path: Path) -> None:
    folder = write_tiny_checkpoint(tmp_path, quantization_config=GPTQ_CONFIG)
    with pytest.raises(ConfigError, match="quantization_config: packed weights cannot be drawn, only read"):
        draw_model(folder)
