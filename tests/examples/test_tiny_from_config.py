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


@pytest.mark.parametrize(
    ("flags", "told"),
    [
        (["--prompts", "0"], "--prompts: '0' is no number from 1"),
        (["--tokens", "x"], "--tokens: 'x' is no number from 1"),
        (["--heads", "3", "--kv-heads", "2"], "num_key_value_heads: 2 does not divide num_attention_heads 3"),
    ],
)
def test_a_shape_that_cannot_be_is_told_in_a_line(
    flags: list[str], told: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        tiny_from_config.main(flags)
    assert ended.value.code == 2
    assert told in capsys.readouterr().err
