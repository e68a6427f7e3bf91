"""What the doctor says of deterministic mode."""

import pytest

from octavo.cli.settings.groups import ServeSettings
from octavo.cli.tools.doctor import check_deterministic
from octavo.cli.tools.doctor_checks import Verdict


def test_it_is_silent_where_the_mode_is_off() -> None:
    assert check_deterministic(ServeSettings()) == []


def test_it_says_by_what_it_is_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("octavo.model.invariant.kernels_fingerprint", lambda: "kernels-abc")
    (found,) = check_deterministic(ServeSettings(deterministic=True, device="cpu"))
    assert (found.verdict, found.detail) == (Verdict.GOOD, "on: the same bits in any batch (cpu kernels-abc)")


def test_it_says_what_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("octavo.model.invariant.kernels_fingerprint", lambda: "")
    (found,) = check_deterministic(ServeSettings(deterministic=True, device="cpu"))
    assert found.verdict is Verdict.BAD
    assert "C compiler" in found.advice
