"""The JSON object of one tool call, as it comes: its name, and its arguments' text piece by piece.

    {"name": "f", "arguments": {...}}

or with the arguments' object in a string. Members in any order, others beside them ignored; each of the two exactly
once. Must not know tags.
"""

import json
import re
from enum import Enum, auto

from gateway.text.json_scanner import WHITESPACE, BadJson, JsonScanner

_FIRST_CHARACTERS = {"name": '"', "arguments": '{"'}
# What a string may hold, one after another: escapes as a whole, and of surrogates only pairs.
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
    """A JSON object in a JSON string, as it comes. Its own text, without white space around it, is what `feed` adds."""

    __slots__ = ("_is_open", "_rest", "_scanner", "text")

    def __init__(self) -> None:
        self.text = ""
        self._is_open = False
        self._rest = ""  # of an escape
        self._scanner: JsonScanner | None = None

    def feed(self, quoted: str) -> None:
        """What follows, from the opening quotation mark on and without the closing one. Raises BadJson; what came
        before is kept."""
        quoted = self._rest + (quoted if self._is_open else quoted[1:])
        self._is_open = True
        found = _DECODABLE.match(quoted)
        assert found is not None
        self._rest = quoted[found.end() :]
        self._read(json.loads(f'"{found[0]}"'))
        if len(self._rest) >= _LONGEST_ESCAPE:
            raise BadJson

    def end(self) -> None:
        """Raises BadJson where there is no whole object."""
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
    """name: once it is complete. arguments: what of their text is here and was not taken."""

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
        """The object is complete."""
        return self._at is _At.DONE

    def feed(self, text: str, start: int) -> int:
        """Read on; where it stopped: behind the object, or the end. Raises BadJson where this is no call; what came
        before is kept."""
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
        """What a character between parts leads to; whether it is the first one of a key or a value."""
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
    """The name in this JSON text. Raises BadJson where no message can carry it."""
    name: str = json.loads(text)
    try:
        name.encode()
    except UnicodeEncodeError:  # half a surrogate pair
        raise BadJson from None
    if not name:
        raise BadJson
    return name
