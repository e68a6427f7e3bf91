"""Why a grammar is refused."""

import re
from enum import Enum

_MAX_CHARACTERS = 300
_NOISE = re.compile(r"\s+")


class Refusal(Enum):
    """Why a grammar is refused. A closed set, since metrics use it as a label."""

    SYNTAX = "syntax"  # it is malformed
    UNSUPPORTED = "unsupported"  # a keyword, format or construct that is not served
    LIMIT = "limit"  # larger, deeper or more complex than the limits allow
    UNSATISFIABLE = "unsatisfiable"  # nothing matches it
    TIMEOUT = "timeout"  # checking or compiling took too long
    TOKENIZER = "tokenizer"  # the model's tokenizer cannot be constrained


class GrammarRefused(Exception):
    """path: where in the source, such as ``properties.name.format``; empty for the whole source."""

    def __init__(self, refusal: Refusal, description: str, *, path: str = "") -> None:
        super().__init__(f"{path}: {description}" if path else description)
        self.refusal = refusal
        self.path = path
        self.description = description


def one_line(message: str) -> str:
    """A library's message on one line, shortened to fit a status."""
    text = _NOISE.sub(" ", message).strip()
    return text if len(text) <= _MAX_CHARACTERS else text[: _MAX_CHARACTERS - 1] + "…"
