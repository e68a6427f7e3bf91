"""`octavo verify --check-numerics` names the layer that a checkpoint breaks in."""

from pathlib import Path

import pytest
from safetensors.torch import load_file, save_file

from octavo.cli.errors import CliError
from octavo.cli.tools.verify import check_numerics
from tests.support.model.checkpoints import write_tiny_checkpoint


def look(folder: Path, limit: float | None = None) -> int:
    return check_numerics(str(folder), revision=None, dtype=None, limit=limit, num_prompts=2)


def test_a_sound_checkpoint_is_said_to_be_sound(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert look(write_tiny_checkpoint(tmp_path)) == 0
    assert "within the limit" in capsys.readouterr().out


def test_the_first_layer_beyond_the_limit_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = write_tiny_checkpoint(tmp_path) / "model.safetensors"
    tensors = load_file(file)
    tensors["model.layers.1.mlp.down_proj.weight"] *= 1e9
    save_file(tensors, file, metadata={"format": "pt"})
    assert look(tmp_path) == 1
    assert "layers.1.mlp.down_proj: output is over the limit" in capsys.readouterr().out
    assert look(tmp_path, limit=1e20) == 0


@pytest.mark.parametrize("limit", [float("nan"), float("inf"), 0.0, -1.0])
def test_a_limit_that_nothing_is_within_or_beyond_is_refused(limit: float, tmp_path: Path) -> None:
    with pytest.raises(CliError, match="--limit") as refused:
        look(tmp_path, limit=limit)
    assert refused.value.exit_code == 2
