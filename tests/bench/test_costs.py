"""How costs grow: exponents, the picture of the page, and that it is of the figures that stand beside it."""

import json
from pathlib import Path

import pytest

from bench.costs import PICTURES, curve, digest, draw, exponent


def test_an_exponent_is_the_slope_on_logarithms() -> None:
    assert exponent([1, 10, 100], [2, 20, 200]) == pytest.approx(1.0)
    assert exponent([10, 1000], [5, 5]) == pytest.approx(0.0)
    assert exponent([2, 4, 8], [4, 16, 64]) == pytest.approx(2.0)
    with pytest.raises(ValueError, match="two sizes"):
        exponent([1], [1])


def test_a_picture_says_which_figures_it_shows(tmp_path: Path) -> None:
    content = {"curves": [curve("rows", "a step", "µs", [(1, 2.0), (10, 4.0)])]}
    draw(content, tmp_path / "costs.png")
    stored = (tmp_path / "costs.png").read_bytes()
    assert stored.startswith(b"\x89PNG")
    assert digest(content).encode() in stored
    content["curves"][0]["costs"][0] = 3.0
    assert digest(content).encode() not in stored


def test_the_picture_of_the_page_is_of_the_present_figures() -> None:
    """Else: `python -m bench.costs --draw`."""
    content = json.loads((PICTURES / "costs.json").read_text())
    assert digest(content).encode() in (PICTURES / "costs.png").read_bytes()
    for each in content["curves"]:
        assert each["exponent"] == round(exponent(each["sizes"], each["costs"]), 2)


def test_nothing_grows_faster_than_the_work() -> None:
    """A step by its rows at most in proportion; what is done for a block or a token costs the same beside many."""
    for each in json.loads((PICTURES / "costs.json").read_text())["curves"]:
        assert each["exponent"] < (1.0 if each["panel"] == "rows of a step" else 0.25), each["name"]


def test_the_page_tells_the_exponents() -> None:
    page = (PICTURES.parent / "performance.md").read_text()
    assert "pictures/costs.png" in page
    for each in json.loads((PICTURES / "costs.json").read_text())["curves"]:
        assert f"{each['exponent']:.2f}" in page, each["name"]
