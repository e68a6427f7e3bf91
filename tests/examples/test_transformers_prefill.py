"""The example runs: transformers' cache in our blocks decodes as in transformers."""

import re
from pathlib import Path

import pytest

from examples import transformers_prefill
from tests.support.model.checkpoints import write_tiny_checkpoint


@pytest.mark.parametrize("backend", ["sdpa", "reference"])
def test_decode_continues_where_transformers_left_off(
    backend: str, tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    folder = write_tiny_checkpoint(tmp_path)
    flags = ["--model", str(folder), "--backend", backend, "--tokens", "20", "--prompt", "the quick brown fox " * 5]
    assert transformers_prefill.main(flags) == 0
    lines = capsys.readouterr().out.splitlines()
    differences = [float(match[1]) for line in lines if (match := re.search(r"\s(\d\.\d+e[+-]\d+)\s+\S+$", line))]
    assert len(differences) == 20
    assert max(differences) < 1e-4
    assert lines[-1] == f"prefill by transformers, decode by '{backend}': the tokens are equal"


def test_without_a_model_it_makes_its_own(capsys: pytest.CaptureFixture) -> None:
    assert transformers_prefill.main(["--tokens", "3"]) == 0
    assert "the tokens are equal" in capsys.readouterr().out
