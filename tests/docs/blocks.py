"""The blocks of code on the pages, each with what a comment before it says of it.

`<!-- not run: REASON -->` or `<!-- run by: FILE::TEST -->` before a block; a block without one is run by
tests/e2e/test_commands_of_the_pages.py.
"""

import re
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PAGES = (
    "README.md", "README.zh.md", "CONTRIBUTING.md", "SECURITY.md", "proto/README.md",
    *(f"docs/{path.name}" for path in sorted((ROOT / "docs").glob("*.md"))),
)  # fmt: skip
NO_COMMANDS = {"mermaid", "text"}
_BLOCK = re.compile(
    r"(?:^<!-- (?P<verb>not run|run by): (?P<what>.+?) -->\n\n?)?^```(?P<language>\w*)\n(?P<code>.*?)^```$",
    re.MULTILINE | re.DOTALL,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Block:
    """line: of its fence. verb, what: of the comment; empty where there is none."""

    page: str
    line: int
    language: str
    code: str
    verb: str
    what: str

    @property
    def name(self) -> str:
        """For people."""
        return f"{self.page}:{self.line}"

    def commands(self) -> list[str]:
        """Of a console: each as a shell takes it, with the lines that belong to it."""
        text = re.sub(r"\\\n\s*", "", self.code)
        found: list[str] = []
        for line in text.splitlines():
            if start := re.match(r"\w*\$ +", line):
                found.append(line[start.end() :])
            else:
                found[-1] += f"\n{line}"
        return found


def blocks_of(page: str) -> list[Block]:
    """In their order."""
    text = (ROOT / page).read_text()
    return [
        Block(
            page=page,
            line=text.count("\n", 0, found.start("language")) + 1,
            language=found["language"],
            code=found["code"],
            verb=found["verb"] or "",
            what=found["what"] or "",
        )
        for found in _BLOCK.finditer(text)
    ]


BLOCKS = [block for page in PAGES if (ROOT / page).exists() for block in blocks_of(page)]
"""All that may be run."""
