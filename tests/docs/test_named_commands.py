"""What the pages name in passing is as the code has it: flags of the command that they stand behind, targets of make,
tests, series of /metrics, defaults in parentheses."""

import re
from functools import cache
from pathlib import Path

import pytest

from octavo.cli.app import whole_command
from octavo.cli.settings.groups import AllSettings

ROOT = Path(__file__).resolve().parents[2]
PAGES = [ROOT / "README.md", ROOT / "README.zh.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]
NOT_SERIES = {"octavo_dynamo"}  # a package
EXPORTERS = [path for folder in ("gateway", "worker", "wire") for path in (ROOT / folder).rglob("*.py")]


def spans(page: Path) -> list[str]:
    """What stands in backticks, outside of blocks."""
    text = re.sub(r"^```.*?^```$", "", page.read_text(), flags=re.MULTILINE | re.DOTALL)
    return re.findall(r"`([^`\n]+)`", text)


@cache
def code_of_exporters() -> str:
    return "\n".join(path.read_text() for path in EXPORTERS)


def unknown_flags(typed: str) -> list[str]:
    """Of a command line with `octavo`; the command itself, where there is none of its name."""
    command = whole_command()
    words = typed.split()[1:]
    while words and words[0] in getattr(command, "commands", {}):
        command = command.commands[words.pop(0)]
    if hasattr(command, "commands") and words and not words[0].startswith("-"):
        return [words[0]]
    known = {flag for each in command.params for flag in (*each.opts, *each.secondary_opts)} | {"--help", "--debug"}
    return [word for word in words if word.startswith("--") and word.partition("=")[0] not in known]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_flags_are_of_the_command_that_they_stand_behind(page: Path) -> None:
    typed = [each for each in spans(page) if re.match(r"(\.venv/bin/)?octavo [a-z]", each)]
    assert [(each, wrong) for each in typed if (wrong := unknown_flags(each))] == []


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_targets_of_make_and_tests_are_there(page: Path) -> None:
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    named = [found[1] for each in spans(page) if (found := re.match(r"make ([a-z-]+)", each))]
    assert [each for each in named if each not in targets] == []
    tests = [each.split("::") for each in spans(page) if re.fullmatch(r"tests/[\w/]+\.py::\w+", each)]
    assert [name for path, name in tests if f"def {name}(" not in (ROOT / path).read_text()] == []


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_series_of_the_metrics_are_exported(page: Path) -> None:
    code = code_of_exporters()
    named = {found[0] for each in spans(page) if (found := re.match(r"octavo_\w+[a-z](?![\w.])", each))} - NOT_SERIES
    assert [each for each in sorted(named) if re.sub(r"_(total|bucket|sum|count|info)$", "", each) not in code] == []


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_a_number_behind_a_flag_in_parentheses_is_its_default(page: Path) -> None:
    text = page.read_text()
    told = re.findall(r"`--([a-z-]+)`,? \((?:default )?(\d[\d,]*(?:\.\d+)?)[);,]", text)
    fields = {name.replace("_", "-"): field.default for name, field in AllSettings.model_fields.items()}
    wrong = [
        (flag, number)
        for flag, number in told
        if flag in fields and fields[flag] is not None and fields[flag] != float(number.replace(",", ""))
    ]
    assert wrong == []


def test_what_is_wrong_is_found() -> None:
    """The control of the tests above."""
    assert unknown_flags("octavo serve --tempo 3 --port=1 --page off") == ["--tempo"]
    assert unknown_flags("octavo keys mew worker") == ["mew"]
    assert unknown_flags("octavo config show --block-size 32") == []
