"""What several test files need stands once: in a conftest.py above them, or in tests/support."""

import re
from collections import defaultdict
from pathlib import Path

LEAST_LINES = 4
FUNCTION = re.compile(
    r"^(?:async )?def (?P<name>\w+)\(.*?\)(?: -> [^\n]+)?:\n"
    r'(?:    """.*?"""\n+)?'
    r"(?P<body>(?:(?:    [^\n]*)?\n)+)",
    re.MULTILINE | re.DOTALL,
)


def repeated(files: dict[str, str]) -> list[list[str]]:
    """Functions of a module that have the same lines, whatever they are called, each as FILE::NAME; files: sources."""
    places = defaultdict[str, list[str]](list)
    for file, source in files.items():
        for found in FUNCTION.finditer(source):
            if len(found["body"].strip().splitlines()) >= LEAST_LINES:
                places[found["body"].strip()].append(f"{file}::{found['name']}")
    return [where for where in places.values() if len({each.partition("::")[0] for each in where}) > 1]


def test_no_two_files_have_the_same_helper(repository: Path) -> None:
    folder = repository / "tests"
    files = {str(path.relative_to(folder)): path.read_text() for path in sorted(folder.rglob("*.py"))}
    assert repeated(files) == []


def test_a_helper_that_stands_twice_is_found_whatever_it_is_called() -> None:
    lines = "    x = 1\n    x += 1\n\n    x += 2\n    return x\n"
    files = {
        "a.py": f'def one(\n    x: int,\n) -> int:\n    """Own."""\n{lines}\n\ndef two() -> None:\n    pass\n',
        "b.py": f"@fixture\nasync def other(given: int) -> int:\n{lines}",
        "c.py": "def short() -> None:\n    x = 1\n    return x\n",
        "d.py": "def short() -> None:\n    x = 1\n    return x\n",
    }
    assert repeated(files) == [["a.py::one", "b.py::other"]]
