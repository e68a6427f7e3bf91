"""Tool calls in a stream of text, as Qwen2.5 writes them (the format of NousResearch's Hermes models).

    plain text <tool_call>\\n{"name": "f", "arguments": {...}}\\n</tool_call> plain text

Everything from tag to tag is the call; everything else is text, untouched but for white space alone behind a call: it
divides calls, and is dropped. Arguments may be a string that holds their object, as OpenAI's API has them.

What begins as a call and proves to be none is text: its tag first, then what follows is looked at anew. Arguments go
out as they come, so that such a call may have to be withdrawn. A call whose object is complete counts where the output
ends before the closing tag does. What could still become an opening tag is held back, and nothing else of the text.

Must not know tokens, streams or messages. `parse_whole` is the slow obvious twin.
"""

import json
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from gateway.text.call_body import CallBody, callable_name
from gateway.text.json_scanner import MAX_DEPTH, WHITESPACE, BadJson

OPEN, CLOSE = "<tool_call>", "</tool_call>"


@dataclass(frozen=True, slots=True, kw_only=True)
class CallPiece:
    """Of call number ``index``. The first piece has id and name. arguments: what follows in their JSON text.
    is_withdrawn: this is no call after all; forget its pieces."""

    index: int
    id: str = ""
    name: str = ""
    arguments: str = ""
    is_withdrawn: bool = False


class ToolCallParser:
    """One output. `take_text` and `take_calls` give what has been found since they were last asked."""

    __slots__ = ("_after", "_body", "_calls", "_gap", "_has_begun", "_held", "_index", "_make_id", "_text", "num_calls")

    def __init__(self, make_id: Callable[[], str]) -> None:
        self.num_calls = 0  # complete ones
        self._make_id = make_id
        self._held = ""  # what may become a tag; within a call all of it, the tag included
        self._body: CallBody | None = None
        self._after = ""  # behind a complete object: whitespace, the beginning of the closing tag
        self._has_begun = False
        self._index = 0
        self._gap: str | None = None  # white space behind a call; None where text came since
        self._text: list[str] = []
        self._calls: list[CallPiece] = []

    def take_text(self) -> str:
        """Plain text that has been found."""
        text = "".join(self._text)
        self._text = []
        return text

    def take_calls(self) -> list[CallPiece]:
        """Pieces of calls that have been found."""
        calls, self._calls = self._calls, []
        return calls

    def feed(self, text: str) -> None:
        """What follows."""
        while text:
            text = self._feed_plain(text) if self._body is None else self._feed_call(self._body, text)

    def finish(self) -> None:
        """The end of the output."""
        while self._body is not None:
            if self._body.is_done and CLOSE.startswith(self._after):
                self._complete()
            else:
                self.feed(self._give_up())
        self._add_text(self._held)
        self._held = ""

    # ------------------------------------------------------------ text

    def _feed_plain(self, text: str) -> str:
        """What is left to look at."""
        if not self._held and "<" not in text:
            self._add_text(text)
            return ""
        text, self._held = self._held + text, ""
        start = text.find(OPEN)
        if start < 0:
            cut = len(text) - _held_back(text)
            self._add_text(text[:cut])
            self._held = text[cut:]
            return ""
        self._add_text(text[:start])
        self._held, self._body = OPEN, CallBody()
        return text[start + len(OPEN) :]

    def _add_text(self, text: str) -> None:
        if self._gap is not None:
            text, self._gap = self._gap + text, None
            if not text.strip(WHITESPACE):
                text, self._gap = "", text
        self._text.append(text)

    # ------------------------------------------------------------ calls

    def _feed_call(self, body: CallBody, text: str) -> str:
        """What is left to look at."""
        try:
            position = body.feed(text, 0)
        except BadJson:
            self._tell(body)  # the same pieces, however the text is cut
            self._held += text
            return self._give_up()
        self._tell(body)
        self._held += text[:position]
        return self._feed_close(text[position:])

    def _feed_close(self, text: str) -> str:
        for index, character in enumerate(text):
            if not self._after and character in WHITESPACE:
                continue
            if character != CLOSE[len(self._after)]:
                self._held += text
                return self._give_up()
            self._after += character
            if self._after == CLOSE:
                self._complete()
                return text[index + 1 :]
        self._held += text
        return ""

    def _tell(self, body: CallBody) -> None:
        if body.name is None or not body.arguments:
            return
        if self._has_begun:
            piece = CallPiece(index=self._index, arguments=body.arguments)
        else:
            piece = CallPiece(index=self._index, id=self._make_id(), name=body.name, arguments=body.arguments)
        self._calls.append(piece)
        self._has_begun, body.arguments = True, ""

    def _complete(self) -> None:
        self.num_calls += 1
        self._gap = ""
        self._leave_call()

    def _give_up(self) -> str:
        """This is no call: what is to be looked at anew, behind its tag."""
        held = self._held
        if self._has_begun:
            self._calls.append(CallPiece(index=self._index, is_withdrawn=True))
        self._leave_call()
        self._add_text(OPEN)
        return held[len(OPEN) :]

    def _leave_call(self) -> None:
        self._index += self._has_begun
        self._body, self._held, self._after, self._has_begun = None, "", "", False


def _held_back(text: str) -> int:
    """Characters at the end that may become an opening tag."""
    for length in range(min(len(OPEN) - 1, len(text)), 0, -1):
        if OPEN.startswith(text[-length:]):
            return length
    return 0


# ---------------------------------------------------------------- the twin


def parse_whole(text: str) -> tuple[str, list[tuple[str, str]]]:
    """Plain text, and (name, arguments as text) of each call, of a whole output."""
    plain, calls, position = [""], list[tuple[str, str]](), 0  # plain: before the first call, behind each
    while (start := text.find(OPEN, position)) >= 0:
        plain[-1] += text[position:start]
        position = start + len(OPEN)
        found = _call_at(text, position)
        if found is None:
            plain[-1] += OPEN
        else:
            name, arguments, position = found
            calls.append((name, arguments))
            plain.append("")
    plain[-1] += text[position:]
    return plain[0] + "".join(each for each in plain[1:] if each.strip(WHITESPACE)), calls


def _call_at(text: str, position: int) -> tuple[str, str, int] | None:
    """Name, arguments, and where the call ends."""
    try:
        start = _skip(text, position)
        _, end = _decode(text, start)
        if text[start] != "{":
            return None
        members = _members(text, start)
        (name,) = [value for key, value in members if key == "name"]
        (arguments,) = [value for key, value in members if key == "arguments"]
        name = callable_name(name) if name.startswith('"') else ""
        if arguments.startswith('"'):
            arguments = json.loads(arguments).strip(WHITESPACE)
            arguments.encode()  # half a surrogate pair raises
            if _decode(arguments, 0)[1] != len(arguments):
                return None
    except (ValueError, IndexError, RecursionError):
        return None
    rest = text[_skip(text, end) :]
    if not name or not arguments.startswith("{") or not (rest.startswith(CLOSE) or CLOSE.startswith(rest)):
        return None
    return name, arguments, len(text) - len(rest) + min(len(rest), len(CLOSE))


def _members(text: str, start: int) -> list[tuple[str, str]]:
    """Key and value's text of each member of the valid object that begins here."""
    members, position = list[tuple[str, str]](), _skip(text, start + 1)
    while text[position] != "}":
        position = _skip(text, position + (text[position] == ","))
        key, position = _decode(text, position)
        value_start = _skip(text, _skip(text, position) + 1)
        _, end = _decode(text, value_start)
        members.append((str(key), text[value_start:end]))
        position = _skip(text, end)
    return members


def _skip(text: str, position: int) -> int:
    while position < len(text) and text[position] in WHITESPACE:
        position += 1
    return position


def _refuse(name: str) -> None:
    raise ValueError(name)


_DECODER = json.JSONDecoder(parse_int=str, parse_float=str, parse_constant=_refuse)


def _decode(text: str, position: int) -> tuple[Any, int]:
    value, end = _DECODER.raw_decode(text, position)
    if _depth(value) > MAX_DEPTH:
        raise ValueError("too deep")
    return value, end


def _depth(value: Any) -> int:
    if isinstance(value, dict):
        return 1 + max(map(_depth, value.values()), default=0)
    return 1 + max(map(_depth, value), default=0) if isinstance(value, list) else 0
