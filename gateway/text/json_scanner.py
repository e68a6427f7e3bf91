"""One JSON value (RFC 8259) read as it comes, cut anywhere: where it ends, or where it stops being JSON.

Keeps no values, only its state. Must not know what the value is for.
"""

import re
from enum import Enum, auto

MAX_DEPTH = 64
WHITESPACE = " \t\n\r"
_PLAIN = re.compile(r'[^"\\\x00-\x1f]+')  # of a string
_LITERALS = {"t": "rue", "f": "alse", "n": "ull"}
_DIGITS = frozenset("0123456789")
_HEX = frozenset("0123456789abcdefABCDEF")


class BadJson(ValueError):
    """A character that cannot stand there in JSON, or nesting deeper than `MAX_DEPTH`."""


class _At(Enum):
    VALUE = auto()
    FIRST_VALUE = auto()  # of an array, which may be empty
    FIRST_KEY = auto()  # of an object, which may be empty
    KEY = auto()
    COLON = auto()
    AFTER = auto()  # a member or an element
    STRING = auto()
    ESCAPE = auto()
    HEX = auto()
    LITERAL = auto()
    MINUS = auto()
    ZERO = auto()
    INTEGER = auto()
    POINT = auto()
    FRACTION = auto()
    EXPONENT = auto()
    EXPONENT_SIGN = auto()
    EXPONENT_DIGITS = auto()


# In a number: what a character leads to. Whatever is not here ends it, where it may end.
_NUMBER: dict[_At, dict[str, _At]] = {
    _At.MINUS: {"0": _At.ZERO} | dict.fromkeys("123456789", _At.INTEGER),
    _At.ZERO: {".": _At.POINT, "e": _At.EXPONENT, "E": _At.EXPONENT},
    _At.INTEGER: {".": _At.POINT, "e": _At.EXPONENT, "E": _At.EXPONENT} | dict.fromkeys(_DIGITS, _At.INTEGER),
    _At.POINT: dict.fromkeys(_DIGITS, _At.FRACTION),
    _At.FRACTION: {"e": _At.EXPONENT, "E": _At.EXPONENT} | dict.fromkeys(_DIGITS, _At.FRACTION),
    _At.EXPONENT: {"+": _At.EXPONENT_SIGN, "-": _At.EXPONENT_SIGN} | dict.fromkeys(_DIGITS, _At.EXPONENT_DIGITS),
    _At.EXPONENT_SIGN: dict.fromkeys(_DIGITS, _At.EXPONENT_DIGITS),
    _At.EXPONENT_DIGITS: dict.fromkeys(_DIGITS, _At.EXPONENT_DIGITS),
}
_WHOLE_NUMBERS = frozenset({_At.ZERO, _At.INTEGER, _At.FRACTION, _At.EXPONENT_DIGITS})


class JsonScanner:
    """Scans one value from its first character (no leading white space). ``is_done``: the value is complete.
    ``position``: where the last `feed` stopped, even if it raised."""

    __slots__ = ("_at", "_closers", "_is_key", "_rest", "is_done", "position")

    def __init__(self) -> None:
        self.is_done = False
        self.position = 0
        self._at = _At.VALUE
        self._closers: list[str] = []
        self._is_key = False
        self._rest = ""  # of a literal, or a digit each of a \\u escape

    def feed(self, text: str, start: int = 0) -> int:
        """Read on. Returns where it stopped: after the value once that is done, else at the end. Raises BadJson. The
        character after a number is not consumed, although only it shows that the number is done."""
        self.position, end = start, len(text)
        while self.position < end and not self.is_done:
            if self._at is _At.STRING and (run := _PLAIN.match(text, self.position)):
                self.position = run.end()
            elif self._take(text[self.position]):
                self.position += 1
        return self.position

    def _take(self, character: str) -> bool:
        """Process one character. Returns whether it belongs to the value."""
        at = self._at
        if at in _NUMBER:
            return self._take_in_number(character)
        if at is _At.STRING:
            self._take_in_string(character)
        elif at is _At.ESCAPE:
            self._take_escaped(character)
        elif at in (_At.HEX, _At.LITERAL):
            self._take_expected(character)
        elif character not in WHITESPACE or (at is _At.VALUE and not self._closers):
            self._take_between(character)
        return True

    def _take_in_number(self, character: str) -> bool:
        following = _NUMBER[self._at].get(character)
        if following is not None:
            self._at = following
            return True
        if self._at not in _WHOLE_NUMBERS:
            raise BadJson
        self._end_value()
        return False

    def _take_in_string(self, character: str) -> None:
        if character == '"':
            if self._is_key:
                self._is_key, self._at = False, _At.COLON
            else:
                self._end_value()
        elif character == "\\":
            self._at = _At.ESCAPE
        else:
            raise BadJson  # a control character

    def _take_escaped(self, character: str) -> None:
        if character == "u":
            self._at, self._rest = _At.HEX, "xxxx"
        elif character in '"\\/bfnrt':
            self._at = _At.STRING
        else:
            raise BadJson

    def _take_expected(self, character: str) -> None:
        is_hex = self._at is _At.HEX
        if character not in _HEX if is_hex else character != self._rest[0]:
            raise BadJson
        self._rest = self._rest[1:]
        if not self._rest:
            if is_hex:
                self._at = _At.STRING
            else:
                self._end_value()

    def _take_between(self, character: str) -> None:
        at = self._at
        is_first = at in (_At.FIRST_VALUE, _At.FIRST_KEY)
        if self._closers and character == self._closers[-1] and (is_first or at is _At.AFTER):
            self._closers.pop()
            self._end_value()
        elif at is _At.AFTER and character == ",":
            self._at = _At.KEY if self._closers[-1] == "}" else _At.VALUE
        elif at is _At.COLON and character == ":":
            self._at = _At.VALUE
        elif at in (_At.KEY, _At.FIRST_KEY) and character == '"':
            self._at, self._is_key = _At.STRING, True
        elif at in (_At.VALUE, _At.FIRST_VALUE):
            self._begin_value(character)
        else:
            raise BadJson

    def _begin_value(self, character: str) -> None:
        if character in "{[":
            if len(self._closers) >= MAX_DEPTH:
                raise BadJson
            self._closers.append("}" if character == "{" else "]")
            self._at = _At.FIRST_KEY if character == "{" else _At.FIRST_VALUE
        elif character == '"':
            self._at = _At.STRING
        elif character in _LITERALS:
            self._at, self._rest = _At.LITERAL, _LITERALS[character]
        elif character == "-":
            self._at = _At.MINUS
        elif character in _DIGITS:
            self._at = _At.ZERO if character == "0" else _At.INTEGER
        else:
            raise BadJson

    def _end_value(self) -> None:
        if self._closers:
            self._at = _At.AFTER
        else:
            self.is_done = True
