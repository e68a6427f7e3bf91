"""The JSON object of one tool call, as it comes: its name, and its arguments' text piece by piece.

    {"name": "f", "arguments": {...}}

Members in any order, others beside them ignored; each of the two exactly once. Must not know tags.
"""

import json
from enum import Enum, auto

from gateway.text.json_scanner import WHITESPACE, BadJson, JsonScanner

_FIRST_CHARACTER = {"name": '"', "arguments": "{"}


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


class CallBody:
    """name: once it is complete. arguments: what of their text is here and was not taken."""

    __slots__ = ("_at", "_key", "_part", "_scanner", "_seen", "arguments", "name")

    def __init__(self) -> None:
        self.name: str | None = None
        self.arguments = ""
        self._at = _At.START
        self._scanner = JsonScanner()
        self._part: list[str] = []  # of the key or the name that is being read
        self._key = ""
        self._seen: set[str] = set()

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
            if character != _FIRST_CHARACTER.get(self._key, character):
                raise BadJson
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
            if self._at is _At.IN_VALUE and self._key == "arguments":
                self.arguments += read
            else:
                self._part.append(read)
        if self._scanner.is_done:
            if self._at is _At.IN_KEY:
                self._take_key(json.loads("".join(self._part)))
            else:
                self._take_value()
        return end

    def _take_key(self, key: str) -> None:
        if key in _FIRST_CHARACTER and key in self._seen:
            raise BadJson
        self._seen.add(key)
        self._key, self._at = key, _At.COLON

    def _take_value(self) -> None:
        self._at = _At.AFTER
        if self._key == "name":
            self.name = callable_name("".join(self._part))

    def _end(self) -> None:
        if not self._seen.issuperset(_FIRST_CHARACTER):
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
