"""Tool calls in a stream of text, as Qwen2.5 writes them (the format of NousResearch's Hermes models).

    plain text <tool_call>\\n{"name": "f", "arguments": {...}}\\n</tool_call> plain text

Everything between the tags is the call; everything else is text, unchanged except that white space between calls is
dropped. Arguments may be a string that holds their object, as in OpenAI's API.

What begins as a call and proves not to be one is text: first its tag, then the rest is parsed again. Arguments are sent
as they come, so such a call may have to be withdrawn. A call whose object is complete counts even if the output ends
before the closing tag. Only text that could still become an opening tag is held back.

Must not know tokens, streams or messages. Tests compare it with a reference that reads whole texts.
"""

import json
import re
from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum, auto

from octavo.gateway.text.json_scanner import WHITESPACE, BadJson, JsonScanner

OPEN, CLOSE = "<tool_call>", "</tool_call>"
_FIRST_CHARACTERS = {"name": '"', "arguments": '{"'}
# What a string may contain: whole escapes, and surrogates only in pairs.
_DECODABLE = re.compile(
    r"""(?:[^"\\]+|\\[^u]|\\u(?![dD][89a-fA-F])[0-9a-fA-F]{4}|\\u[dD][89abAB][0-9a-fA-F]{2}\\u[dD][c-fC-F][0-9a-fA-F]{2})*"""
)
_LONGEST_ESCAPE = len(r"\ud83e\udd99")


class _At(Enum):
    START = auto()
    FIRST_KEY = auto()
    KEY = auto()
    IN_KEY = auto()
    COLON = auto()
    VALUE = auto()
    IN_VALUE = auto()
    AFTER = auto()
    DONE = auto()


class _QuotedObject:
    """A JSON object inside a JSON string, read as it comes. `feed` appends the object's own text, without surrounding
    white space."""

    __slots__ = ("_is_open", "_rest", "_scanner", "text")

    def __init__(self) -> None:
        self.text = ""
        self._is_open = False
        self._rest = ""  # of an escape
        self._scanner: JsonScanner | None = None

    def feed(self, quoted: str) -> None:
        """More text, starting at the opening quotation mark and ending before the closing one. Raises BadJson; what
        came before is kept."""
        quoted = self._rest + (quoted if self._is_open else quoted[1:])
        self._is_open = True
        found = _DECODABLE.match(quoted)
        assert found is not None
        self._rest = quoted[found.end() :]
        self._read(json.loads(f'"{found[0]}"'))
        if len(self._rest) >= _LONGEST_ESCAPE:
            raise BadJson

    def end(self) -> None:
        """Raises BadJson if the object is not complete."""
        if self._rest or self._scanner is None or not self._scanner.is_done:
            raise BadJson

    def _read(self, text: str) -> None:
        if self._scanner is None:
            text = text.lstrip(WHITESPACE)
            if not text:
                return
            if text[0] != "{":
                raise BadJson
            self._scanner = JsonScanner()
        if not self._scanner.is_done:
            try:
                end = self._scanner.feed(text)
            finally:
                self.text += text[: self._scanner.position]
            text = text[end:]
        if text.strip(WHITESPACE):
            raise BadJson


class CallBody:
    """The JSON object of one tool call, read as it comes: `{"name": "f", "arguments": {...}}`, members in any order,
    other members ignored, each of the two exactly once; the arguments may be a string that holds their object.

    name: once complete. arguments: the part of their text that was read and not taken. Must not know tags.
    """

    __slots__ = ("_at", "_key", "_part", "_quoted", "_scanner", "_seen", "arguments", "name")

    def __init__(self) -> None:
        self.name: str | None = None
        self.arguments = ""
        self._at = _At.START
        self._scanner = JsonScanner()
        self._part: list[str] = []  # of the key or the name that is being read
        self._key = ""
        self._seen: set[str] = set()
        self._quoted: _QuotedObject | None = None  # of the arguments that are being read

    @property
    def is_done(self) -> bool:
        """Whether the object is complete."""
        return self._at is _At.DONE

    def feed(self, text: str, start: int) -> int:
        """Read on. Returns where it stopped: after the object, or at the end of the text. Raises BadJson if this is not
        a call; what came before is kept."""
        position = start
        while position < len(text) and not self.is_done:
            if self._at in (_At.IN_KEY, _At.IN_VALUE):
                position = self._read_on(text, position)
            elif text[position] in WHITESPACE:
                position += 1
            elif self._begins(text[position]):
                pass  # the scanner reads this character
            else:
                position += 1
        return position

    def _begins(self, character: str) -> bool:
        """Handle a character between parts. Returns whether it begins a key or a value."""
        at = self._at
        if at in (_At.KEY, _At.FIRST_KEY) and character == '"':
            self._begin(_At.IN_KEY)
        elif at is _At.VALUE:
            if character not in _FIRST_CHARACTERS.get(self._key, character):
                raise BadJson
            self._quoted = _QuotedObject() if self._key == "arguments" and character == '"' else None
            self._begin(_At.IN_VALUE)
        elif at is _At.START and character == "{":
            self._at = _At.FIRST_KEY
        elif at is _At.COLON and character == ":":
            self._at = _At.VALUE
        elif at is _At.AFTER and character == ",":
            self._at = _At.KEY
        elif at in (_At.AFTER, _At.FIRST_KEY) and character == "}":
            self._end()
        else:
            raise BadJson
        return self._at in (_At.IN_KEY, _At.IN_VALUE)

    def _begin(self, at: _At) -> None:
        self._at, self._scanner, self._part = at, JsonScanner(), []

    def _read_on(self, text: str, start: int) -> int:
        try:
            end = self._scanner.feed(text, start)
        finally:
            read = text[start : self._scanner.position]
            if self._at is _At.IN_VALUE and self._quoted is not None:
                self._read_quoted(self._quoted, read)
            elif self._at is _At.IN_VALUE and self._key == "arguments":
                self.arguments += read
            else:
                self._part.append(read)
        if self._scanner.is_done:
            if self._at is _At.IN_KEY:
                self._take_key(json.loads("".join(self._part)))
            else:
                self._take_value()
        return end

    def _read_quoted(self, quoted: _QuotedObject, read: str) -> None:
        try:
            quoted.feed(read[:-1] if self._scanner.is_done else read)
            if self._scanner.is_done:
                quoted.end()
        finally:
            self.arguments, quoted.text = self.arguments + quoted.text, ""

    def _take_key(self, key: str) -> None:
        if key in _FIRST_CHARACTERS and key in self._seen:
            raise BadJson
        self._seen.add(key)
        self._key, self._at = key, _At.COLON

    def _take_value(self) -> None:
        self._at = _At.AFTER
        if self._key == "name":
            self.name = callable_name("".join(self._part))

    def _end(self) -> None:
        if not self._seen.issuperset(_FIRST_CHARACTERS):
            raise BadJson
        self._at = _At.DONE


def callable_name(text: str) -> str:
    """The name in this JSON text. Raises BadJson if a message cannot carry it."""
    name: str = json.loads(text)
    try:
        name.encode()
    except UnicodeEncodeError:  # half a surrogate pair
        raise BadJson from None
    if not name:
        raise BadJson
    return name


@dataclass(frozen=True, slots=True, kw_only=True)
class CallPiece:
    """A piece of call number ``index``. The first piece has id and name. arguments: the next part of their JSON text.
    is_withdrawn: this was not a call after all; discard its pieces."""

    index: int
    id: str = ""
    name: str = ""
    arguments: str = ""
    is_withdrawn: bool = False


class ToolCallParser:
    """Finds the calls of one output. `take_text` and `take_calls` give what was found since they were last called."""

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
        """Plain text found since the last call."""
        text = "".join(self._text)
        self._text = []
        return text

    def take_calls(self) -> list[CallPiece]:
        """Pieces of calls found since the last call."""
        calls, self._calls = self._calls, []
        return calls

    def feed(self, text: str) -> None:
        """More of the output's text."""
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
        """Returns the text that is still to be looked at."""
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
        """Returns the text that is still to be looked at."""
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
        """This is not a call. Returns the text after its tag, to be looked at again."""
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
    """How many characters at the end may become an opening tag."""
    for length in range(min(len(OPEN) - 1, len(text)), 0, -1):
        if OPEN.startswith(text[-length:]):
            return length
    return 0
