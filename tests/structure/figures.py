"""How much there is to read, in figures: `python -m tests.structure.figures` prints the table of docs/structure.md.

One request is traced (`tests.structure.trace`), the rest is counted in the files and in their imports. --parameter: a
sampling parameter whose files are counted by its name. --commit: a commit that adds one, counted by what it changed.
"""

import argparse
import ast
import json
import os
import subprocess
import sys
from collections import Counter
from collections.abc import Iterable
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PRODUCT = ("blockmgr", "cli", "gateway", "grammar", "model", "proto/octavo", "wire", "worker")
COUNTED = (*PRODUCT, "bench", "sim")
SMALL = 60
PARAMETER = "top_n_sigma"  # no contract of others has it, so that only its own way is counted

# What was measured before the rooms were laid out anew, and what was asked for.
BEFORE_AND_BOUND: dict[str, tuple[str, str]] = {
    "files on the way of a Generate to its first delta": ("104", "50"),
    "functions on that way": ("", ""),
    "classes that carry the request forward": ("7", "4"),
    "source files of a sampling parameter": ("18", "8"),
    "modules in the largest folder": ("81", "20"),
    f"modules under {SMALL} lines with one importer": ("46", "15"),
    "lines of Python, with bench and sim": ("55600", ""),
    "test files": ("", ""),
    "tests": ("", ""),
}


def sources(*folders: str) -> list[Path]:
    """Hand-written Python files of these folders."""
    found = (path for folder in folders for path in sorted((ROOT / folder).rglob("*.py")))
    return [path for path in found if not path.stem.endswith(("_pb2", "_pb2_grpc"))]


def traced() -> dict[str, list[list[str]]]:
    """What `tests.structure.trace` prints."""
    done = subprocess.run(
        [sys.executable, "-m", "tests.structure.trace"],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": f"{ROOT}{os.pathsep}{ROOT / 'proto'}", "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=200,
        check=True,
    )
    found: dict[str, list[list[str]]] = json.loads(done.stdout)
    return found


def module_of(path: Path) -> str:
    """Its dotted name, without `octavo.`."""
    parts = path.relative_to(ROOT / "proto/octavo" if path.is_relative_to(ROOT / "proto") else ROOT).with_suffix("")
    return ".".join(parts.parts).removesuffix(".__init__")


def importers(paths: Iterable[Path]) -> Counter[str]:
    """Of each module, the number of modules that import it or something in it."""
    names = {module_of(path): path for path in paths}
    found: Counter[str] = Counter()
    for name, path in names.items():
        wanted: set[str] = set()
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Import):
                wanted |= {alias.name.removeprefix("octavo.") for alias in node.names}
            elif isinstance(node, ast.ImportFrom) and node.module:
                base = node.module.removeprefix("octavo.")
                wanted |= {f"{base}.{alias.name}" if f"{base}.{alias.name}" in names else base for alias in node.names}
        found.update((wanted & names.keys()) - {name})
    return found


def small_with_one_importer() -> list[str]:
    """Modules that might live in the one that imports them."""
    paths = sources(*PRODUCT)
    counts = importers(paths)
    return sorted(
        module_of(path)
        for path in paths
        if path.name != "__init__.py" and counts[module_of(path)] == 1 and len(path.read_text().splitlines()) < SMALL
    )


def files_of_parameter(name: str) -> list[str]:
    """Product files that name it, the contract's among them."""
    paths = [*sources(*PRODUCT), *(ROOT / "proto/octavo/v1").glob("*.proto")]
    return sorted(str(path.relative_to(ROOT)) for path in paths if name in path.read_text())


def files_of_commit(revision: str) -> list[str]:
    """Hand-written product files that a commit changed."""
    command = ["git", "show", "--name-only", "--format=", revision]
    changed = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout.split()
    folders = tuple(f"{folder}/" for folder in PRODUCT)
    return [each for each in changed if each.startswith(folders) and "_pb2" not in each]


def largest_folder() -> int:
    """Modules side by side, without `__init__.py`."""
    return max(Counter(path.parent for path in sources(*COUNTED) if path.name != "__init__.py").values())


def num_tests() -> int:
    """As pytest collects them, in all."""
    command = [sys.executable, "-m", "pytest", "--collect-only", "-q", "-p", "no:cacheprovider"]
    said = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False).stdout
    return sum(int(count) for _, _, count in (line.rpartition(": ") for line in said.splitlines()) if count.isdigit())


def figures(parameter: str = PARAMETER, commit: str | None = None) -> dict[str, int]:
    """Every figure of the table by its name."""
    trace = traced()
    until_delta = trace["calls"][: int(str(trace["num_until_delta"]))]
    return dict(
        zip(
            BEFORE_AND_BOUND,
            (
                len({file for file, *_ in until_delta}),
                len(until_delta),
                num_wraps(trace["wraps"]),
                len(files_of_commit(commit) if commit else files_of_parameter(parameter)),
                largest_folder(),
                len(small_with_one_importer()),
                sum(len(path.read_text().splitlines()) for path in sources(*COUNTED)),
                len(list((ROOT / "tests").rglob("test_*.py"))),
                num_tests(),
            ),
            strict=True,
        )
    )


def num_wraps(wraps: list[list[str]]) -> int:
    """Those on the way; who keeps the request meanwhile is named on the page."""
    page = (ROOT / "docs/structure.md").read_text()
    return sum(f"`{file}` `{name}`" not in page for file, name in wraps)


def table(found: dict[str, int]) -> str:
    """As the page has it."""
    lines = ["| figure | before | asked for | now |", "|---|---|---|---|"]
    for name, (before, bound) in BEFORE_AND_BOUND.items():
        lines.append(f"| {name} | {before} | {f'≤ {bound}' if bound else ''} | {found[name]} |")
    return "\n".join(lines) + "\n"


def main() -> None:
    """Prints the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--parameter", default=PARAMETER)
    parser.add_argument("--commit")
    arguments = parser.parse_args()
    sys.stdout.write(table(figures(arguments.parameter, arguments.commit)))
    sys.stdout.write("\n" + "\n".join(f"one importer: {name}" for name in small_with_one_importer()) + "\n")


if __name__ == "__main__":
    main()
