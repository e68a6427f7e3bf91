"""The error of rounded models, as `octavo verify` reports it."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from octavo.cli.tools.verify import Served, rounding
from octavo.model.errors import CheckpointError
from octavo.model.verify.rounding import verify_rounding
from tests.support.model.checkpoints import write_tiny_checkpoint
from tests.support.model.packed_checkpoints import GPTQ_CONFIG, write_packed_checkpoint


@pytest.fixture(name="pair")
def make_pair(tmp_path: Path) -> tuple[Path, Path]:
    """A packed checkpoint and the plain one of the same weights."""
    packed, plain = tmp_path / "packed", tmp_path / "plain"
    tensors = write_packed_checkpoint(packed, GPTQ_CONFIG | {"group_size": 32})
    write_tiny_checkpoint(plain)
    save_file(tensors, plain / "model.safetensors", metadata={"format": "pt"})
    return packed, plain


def test_a_packed_checkpoint_has_no_error_against_the_weights_it_stands_for(pair: tuple[Path, Path]) -> None:
    error = verify_rounding(pair[0], against=pair[1], dtype=torch.float32, num_prompts=3, max_new_tokens=4)
    assert error.relative_error < 1e-5
    assert (error.same_outputs, error.num_outputs) == (3, 3)
    in_bf16 = verify_rounding(pair[0], against=pair[1], num_prompts=3, max_new_tokens=4)
    assert 1e-3 < in_bf16.relative_error < 0.1


def test_a_plain_checkpoint_is_rounded_as_asked(pair: tuple[Path, Path]) -> None:
    errors = [
        verify_rounding(pair[1], dtype=torch.float32, num_prompts=3, max_new_tokens=2, **how).relative_error
        for how in ({"quantization": "int8"}, {"quantization": "fp8"}, {"kv_cache_dtype": "fp8"})
    ]
    assert all(1e-3 < error < 0.2 for error in errors)
    assert errors[0] < errors[1]


def test_what_cannot_be_compared_is_refused(pair: tuple[Path, Path], tmp_path: Path) -> None:
    packed, plain = pair
    with pytest.raises(CheckpointError, match="name the plain checkpoint that it was made from: --against"):
        verify_rounding(packed)
    with pytest.raises(CheckpointError, match="is packed itself"):
        verify_rounding(plain, against=packed)
    with pytest.raises(CheckpointError, match="different models: num_hidden_layers"):
        verify_rounding(packed, against=write_tiny_checkpoint(tmp_path / "other", num_hidden_layers=1))
    with pytest.raises(ValueError, match="'int3' is none of int8, fp8"):
        verify_rounding(plain, quantization="int3")


def test_the_command_prints_a_table(pair: tuple[Path, Path], capsys: pytest.CaptureFixture[str]) -> None:
    packed, plain = str(pair[0]), str(pair[1])
    assert rounding(Served(model=packed, kv_cache_dtype="fp8"), against=plain, num_prompts=2, max_new_tokens=2) == 0
    assert "logits, relative error" in capsys.readouterr().out
