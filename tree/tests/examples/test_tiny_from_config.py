"""The example runs, and its exit code tells whether all ways agree."""

import pytest

from examples import tiny_from_config


@pytest.mark.parametrize(("heads", "kv_heads"), [(6, 2), (5, 1), (4, 4)])
def test_any_shape_generates_the_same_from_blocks(heads: int, kv_heads: int, capsys: pytest.CaptureFixture) -> None:
    flags = ["--heads", str(heads), "--kv-heads", str(kv_heads), "--head-dim", "8", "--tokens", "6"]
    assert tiny_from_config.main(flags) == 0
    assert capsys.readouterr().out.count("the same tokens") == 2


def test_a_difference_is_told(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture) -> None:
    monkeypatch.setattr(tiny_from_config, "paged_generate", lambda *_args, **_options: [[1]])
    assert tiny_from_config.main(["--tokens", "2", "--head-dim", "8"]) == 1
    assert "the same tokens" not in capsys.readouterr().out
