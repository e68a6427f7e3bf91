"""Settings that exclude each other, told before a process is started."""

import pytest

from octavo.cli.errors import CliError
from octavo.cli.main import main
from octavo.cli.serve import combinations
from octavo.cli.serve.combinations import check_combinations
from octavo.cli.settings.groups import ServeSettings

pytestmark = pytest.mark.usefixtures("nothing_set")


@pytest.mark.parametrize(
    ("words", "told"),
    [
        ("--device cpu --quantization fp8", "fp8 weights need a GPU"),
        ("--device cpu --quantization fp8 --tensor-parallel-size 2", "fp8 weights need a GPU"),
        ("--device cpu --cluster 127.0.0.1:1 --quantization fp8", "fp8 weights need a GPU"),
        ("--device cpu --deterministic --kv-cache-dtype fp8", "keys and values in the model's dtype"),
        ("--device cpu --deterministic --dtype float16", "for bfloat16 and float32, not float16"),
        ("--device cpu --deterministic --attention-backend sdpa", "no --attention-backend and no --check-numerics"),
        ("--device cpu --deterministic --check-numerics on", "no --attention-backend and no --check-numerics"),
        ("--device cpu --check-numerics-limit 9", "is 9, and nothing is checked against it"),
        ("--device cpu --num-threads 100000", "less than or equal to 1024"),  # the C library died of so many
    ],
)
def test_what_no_worker_could_be_is_one_error_before_any_process(
    words: str, told: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["serve", "--port", "0", "--metrics-port", "0", "--page", "off", *words.split()]) == 2
    shown = capsys.readouterr().err.splitlines()
    assert [each for each in shown if each.startswith("error: ")] == shown[:1]
    assert told in shown[1]


def test_what_only_a_device_can_tell_is_left_to_the_worker(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(combinations, "version", lambda name: "2.13.0+cu130")
    check_combinations(ServeSettings(device="auto", quantization="fp8"))
    monkeypatch.setattr(combinations, "version", lambda name: "2.13.0+cpu")
    with pytest.raises(CliError, match="fp8 weights"):
        check_combinations(ServeSettings(device="auto", quantization="fp8"))
    with pytest.raises(CliError, match="plain weights: no --quantization"):
        check_combinations(ServeSettings(device="cuda:1", quantization="int8", deterministic=True))
