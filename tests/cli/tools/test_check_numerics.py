"""`octavo verify --check-numerics` names the layer that a checkpoint breaks in; what is given instead of the comparison
looks at all that is given with it."""

from pathlib import Path

import pytest
from safetensors.torch import load_file, save_file

from octavo.cli.errors import CliError
from octavo.cli.main import main
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


def test_auto_is_the_checkpoints_own_type_here_too(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = write_tiny_checkpoint(tmp_path)
    assert main(["verify", str(folder), "--check-numerics", "--dtype=auto", "--device=cpu", "--prompts=1"]) == 0
    assert "within the limit" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ("--check-numerics --address 127.0.0.1:1", "--address and --check-numerics are given"),
        ("--check-numerics --rounding --quantization int8", "--check-numerics and --rounding are given"),
        ("--check-numerics --quantization int8 --deterministic", "--quantization, --deterministic would change"),
        ("--check-numerics --device cuda", "--check-numerics does not look at that"),
        ("--rounding --quantization int8 --max-model-len 64", "--max-model-len would change nothing"),
        ("--address 127.0.0.1:1 --tensor-parallel-size 2", "--tensor-parallel-size would change nothing"),
        ("--address 127.0.0.1:1 --quantization int3", "bad value for --quantization"),
        ("--rounding --kv-cache-dtype fp4", "bad value for --kv-cache-dtype"),
        ("--check-numerics --dtype int8", "bad value for --dtype"),
        ("--limit 5", "--limit is of --check-numerics"),
        ("--model-name other", "--model-name is of --address"),
    ],
)
def test_what_would_be_ignored_is_refused(
    arguments: str, words: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Else "every activation is finite" would be read as an answer about a service, or about rounded weights."""
    folder = write_tiny_checkpoint(tmp_path)
    assert main(["verify", str(folder), "--prompts=1", "--max-new-tokens=1", *arguments.split()]) == 2
    assert words in capsys.readouterr().err
