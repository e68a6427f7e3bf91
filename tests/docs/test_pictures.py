"""The pictures of the pages are those that their command draws, and nothing in them is cut or covered."""

import importlib.util
import xml.etree.ElementTree as ET
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).resolve().parents[2]
NAMES = ("architecture.svg", "request.svg", "blocks.svg")
WIDTH_OF_LETTER = 7.2  # of sans-serif at 13 pixels, bold, at the most on average


@pytest.fixture(scope="module")
def draw() -> ModuleType:
    spec = importlib.util.spec_from_file_location("draw", ROOT / "docs/pictures/draw.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("name", NAMES)
def test_a_picture_is_what_the_command_draws(name: str, draw: ModuleType) -> None:
    assert (ROOT / "docs/pictures" / name).read_text() == draw.PICTURES[name](), "python docs/pictures/draw.py"


@pytest.mark.parametrize("name", NAMES)
def test_words_stay_within_the_picture(name: str) -> None:
    root = ET.parse(ROOT / "docs/pictures" / name).getroot()
    width, height = map(float, root.attrib["viewBox"].split()[2:])
    for text in root.iter("{http://www.w3.org/2000/svg}text"):
        long = WIDTH_OF_LETTER * len(text.text or "")
        left = float(text.attrib["x"]) - (long / 2 if text.attrib["text-anchor"] == "middle" else 0)
        assert left >= 0, text.text
        assert left + long <= width, text.text
        assert 10 <= float(text.attrib["y"]) <= height, text.text


def test_every_picture_is_on_a_page() -> None:
    pages = "".join(path.read_text() for path in (ROOT / "docs").glob("*.md"))
    for picture in (ROOT / "docs/pictures").glob("*.svg"):
        assert f"pictures/{picture.name})" in pages, picture.name


def test_the_map_is_that_of_a_block_manager(draw: ModuleType) -> None:
    manager, slots = draw.filled_manager()
    assert (manager.num_cached, len(slots)) == (6, 4)
    assert manager.map(draw.NUM_BLOCKS).num_shared == 5
    assert manager.audit().violations == ()
