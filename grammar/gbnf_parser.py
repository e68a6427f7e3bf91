"""Parses GBNF, the EBNF of llama.cpp (its grammars/README.md), into a tree.

root ::= "yes" | "no" ws number{1,3}     # rules, texts, classes, groups, * + ? {m} {m,} {m,n}
"""

from dataclasses import dataclass

from octavo.grammar.errors import GrammarRefused, Refusal

MAX_GROUP_DEPTH = 64
MAX_REPEAT = 100_000
_ESCAPES = {"n": "\n", "r": "\r", "t": "\t", '"': '"', "\\": "\\", "[": "[", "]": "]", "-": "-", "/": "/", "^": "^"}
_HEX = {"x": 2, "u": 4, "U": 8}


@dataclass(frozen=True, slots=True)
class Text:
    """A literal text."""

    text: str


@dataclass(frozen=True, slots=True)
class Class:
    """One character in these ranges, both ends included; if negated, one that is in none of them."""

    ranges: tuple[tuple[str, str], ...]
    is_negated: bool


@dataclass(frozen=True, slots=True)
class Reference:
    """A reference to a rule."""

    name: str


@dataclass(frozen=True, slots=True)
class Sequence:
    """All of the items, in order; without items, the empty text."""

    items: tuple["Node", ...]


@dataclass(frozen=True, slots=True)
class Choice:
    """One of the options."""

    options: tuple["Node", ...]


@dataclass(frozen=True, slots=True)
class Repeat:
    """The item, low to high times; high None: no upper limit."""

    item: "Node"
    low: int
    high: int | None


Node = Text | Class | Reference | Sequence | Choice | Repeat
ANYTHING = Class((), True)


def parse_gbnf(source: str) -> dict[str, Node]:
    """The rules by name. Raises GrammarRefused, for syntax errors with the line."""
    return _Parser(source).rules()


class _Parser:
    def __init__(self, source: str) -> None:
        self._source = source
        self._at = 0
        self._depth = 0

    def rules(self) -> dict[str, Node]:
        rules: dict[str, Node] = {}
        self._skip_lines()
        while self._at < len(self._source):
            name = self._name()
            if name in rules:
                raise self._wrong(f"rule {name} is defined twice")
            self._skip_blanks()
            self._expect("::=")
            self._skip_lines()
            rules[name] = self._choice()
            if self._peek() not in ("", "\n", "\r"):
                raise self._wrong(f"unexpected {self._peek()!r}")
            self._skip_lines()
        return rules

    def _choice(self) -> Node:
        options = [self._sequence()]
        while self._peek() == "|":
            self._at += 1
            self._skip_lines()
            options.append(self._sequence())
        return options[0] if len(options) == 1 else Choice(tuple(options))

    def _sequence(self) -> Node:
        items: list[Node] = []
        self._skip_inside()
        while (item := self._item()) is not None:
            items.append(self._repeated(item))
            self._skip_inside()
        return items[0] if len(items) == 1 else Sequence(tuple(items))

    def _item(self) -> Node | None:
        character = self._peek()
        if character == '"':
            return self._text()
        if character == "[":
            return self._class()
        if character == "(":
            return self._group()
        if character == ".":
            self._at += 1
            return ANYTHING
        return Reference(self._name()) if _is_name(character) else None

    def _group(self) -> Node:
        self._depth += 1
        if self._depth > MAX_GROUP_DEPTH:
            raise GrammarRefused(Refusal.LIMIT, f"has groups nested deeper than {MAX_GROUP_DEPTH}")
        self._at += 1
        node = self._choice()
        self._expect(")")
        self._depth -= 1
        return node

    def _repeated(self, item: Node) -> Node:
        signs: dict[str, tuple[int, int | None]] = {"*": (0, None), "+": (1, None), "?": (0, 1)}
        while (sign := self._peek()) in ("*", "+", "?", "{") and sign:
            self._at += 1
            low, high = self._bounds() if sign == "{" else signs[sign]
            item = Sequence(()) if high == 0 else Repeat(item, low, high)
        return item

    def _bounds(self) -> tuple[int, int | None]:
        end = self._source.find("}", self._at)
        low, comma, high = self._source[self._at : end].partition(",") if end >= 0 else ("", "", "")
        try:
            least = int(low)
            most = least if not comma else int(high) if high.strip() else None
        except ValueError:
            raise self._wrong("a repetition is {m}, {m,} or {m,n}") from None
        if not 0 <= least <= (least if most is None else most) <= MAX_REPEAT:
            raise self._wrong(f"repetitions count up, from 0 to {MAX_REPEAT}")
        self._at = end + 1
        return least, most

    def _text(self) -> Node:
        self._at += 1
        characters = []
        while self._peek() != '"':
            characters.append(self._character())
        self._at += 1
        return Text("".join(characters))

    def _class(self) -> Node:
        self._at += 1
        is_negated = self._peek() == "^"
        self._at += is_negated
        ranges = []
        while self._peek() != "]":
            low = self._character()
            high = low
            if self._peek() == "-" and self._source[self._at + 1 : self._at + 2] != "]":
                self._at += 1
                high = self._character()
            if high < low:
                raise self._wrong(f"the range {low!r} to {high!r} counts down")
            ranges.append((low, high))
        self._at += 1
        if not ranges and not is_negated:
            raise self._wrong("an empty class matches nothing")
        return Class(tuple(ranges), is_negated)

    def _character(self) -> str:
        character = self._peek()
        if not character:
            raise self._wrong("the end comes too soon")
        self._at += 1
        if character != "\\":
            return character
        escape = self._peek()
        self._at += 1
        if escape in _ESCAPES:
            return _ESCAPES[escape]
        digits = self._source[self._at : self._at + _HEX.get(escape, 0)]
        try:
            code = int(digits, 16) if len(digits) == _HEX[escape] else -1
            chr(code).encode()
        except (KeyError, ValueError):
            raise self._wrong(f"unknown escape \\{escape}{digits}") from None
        self._at += len(digits)
        return chr(code)

    def _name(self) -> str:
        start = self._at
        while _is_name(self._peek()):
            self._at += 1
        if self._at == start:
            raise self._wrong(f"expected a rule, found {self._peek()!r}")
        return self._source[start : self._at]

    def _skip_inside(self) -> None:
        """Skip blanks and comments; inside groups, and before a |, also line ends."""
        self._skip_blanks()
        start = self._at
        self._skip_lines()
        if not self._depth and self._peek() != "|":
            self._at = start

    def _skip_blanks(self) -> None:
        while self._peek() in (" ", "\t") and self._peek():
            self._at += 1
        if self._peek() == "#":
            while self._peek() not in ("", "\n", "\r"):
                self._at += 1

    def _skip_lines(self) -> None:
        self._skip_blanks()
        while self._peek() in ("\n", "\r") and self._peek():
            self._at += 1
            self._skip_blanks()

    def _expect(self, sign: str) -> None:
        if not self._source.startswith(sign, self._at):
            raise self._wrong(f"expected {sign!r}, found {self._peek()!r}")
        self._at += len(sign)

    def _peek(self) -> str:
        return self._source[self._at : self._at + 1]

    def _wrong(self, what: str) -> GrammarRefused:
        line = self._source.count("\n", 0, self._at) + 1
        return GrammarRefused(Refusal.SYNTAX, what, path=f"line {line}")


def _is_name(character: str) -> bool:
    return character != "" and (character.isalnum() or character in "-_")
