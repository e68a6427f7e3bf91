"""Control tokens in what callers write are plain text.

A chat template concatenates strings, so `<|im_end|>` inside a message would end the turn once the result is
tokenized: whoever fills in a message could speak as the system. Here the tokens in callers' strings are marked with a
private character before the template sees them, and the rendered text is cut at the tokens that carry no mark, which
the template wrote. See docs/decisions/0001-chat-control-tokens.md.
"""

import json
import re
from collections.abc import Iterable, Iterator
from typing import Any

from gateway.text.errors import TemplateError

_PRIVATE_USE = range(0xF0000, 0xFFFFE)


def strings_in(value: Any) -> Iterator[str]:
    """Every string of a JSON value, keys included."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict):
        yield from value
        for item in value.values():
            yield from strings_in(item)
    elif isinstance(value, list):
        for item in value:
            yield from strings_in(item)


class ControlTokens:
    """The special tokens of one tokenizer."""

    def __init__(self, tokens: Iterable[str]) -> None:
        longest_first = sorted((token for token in tokens if token), key=len, reverse=True)
        self._pattern = re.compile("|".join(map(re.escape, longest_first)) or "(?!)")

    def occur_in(self, value: Any) -> bool:
        """Whether a string of this JSON value contains one."""
        return any(self._pattern.search(text) for text in strings_in(value))

    def mark_for(self, value: Any) -> str:
        """A character that no string of this JSON value contains."""
        used = frozenset().union(*strings_in(value))
        for code in _PRIVATE_USE:
            if chr(code) not in used:
                return chr(code)
        raise TemplateError("the messages use every private-use character")

    def marked(self, value: Any, mark: str) -> Any:
        """The JSON value with the mark after the first character of every control token in it."""
        if isinstance(value, str):
            return self._pattern.sub(lambda match: match[0][0] + mark + match[0][1:], value)
        if isinstance(value, dict):
            return {self.marked(key, mark): self.marked(item, mark) for key, item in value.items()}
        if isinstance(value, list):
            return [self.marked(item, mark) for item in value]
        return value

    def pieces(self, rendered: str, mark: str) -> Iterator[tuple[str, str]]:
        """The rendered text as (text without marks, control token after it or "") in order."""
        start = 0
        for match in self._pattern.finditer(rendered):
            yield unmarked(rendered[start : match.start()], mark), match[0]
            start = match.end()
        yield unmarked(rendered[start:], mark), ""


def unmarked(text: str, mark: str) -> str:
    """Without marks, also where a template escaped them as JSON."""
    escaped = json.dumps(mark)[1:-1]
    return text.replace(mark, "").replace(escaped, "") if mark else text
