"""From GBNF to llguidance's Lark.

Rules that reach no recursion become terminals, that is regular expressions, and so does every run of such parts within
other rules: a terminal takes the longest text that it can, and what stands in one terminal is matched exactly. Only
across the border of a recursive rule does the longest match decide where a grammar is ambiguous.
"""

from collections.abc import Iterator

from grammar.errors import GrammarRefused, Refusal
from grammar.gbnf_parser import Choice, Class, Node, Reference, Repeat, Sequence, Text, parse_gbnf
from grammar.lark import class_character, quoted
from grammar.limits import GrammarLimits

ROOT = "root"


def gbnf_to_lark(source: str, limits: GrammarLimits) -> str:
    """Raises GrammarRefused."""
    num_bytes = len(source.encode())
    if num_bytes > limits.max_source_bytes:
        raise GrammarRefused(Refusal.LIMIT, f"has {num_bytes} bytes, at most {limits.max_source_bytes} are allowed")
    rules = parse_gbnf(source)
    _check_names(rules)
    return _Writer(rules).text()


def _check_names(rules: dict[str, Node]) -> None:
    if ROOT not in rules:
        raise GrammarRefused(Refusal.SYNTAX, f"has no rule {ROOT}")
    for rule, node in rules.items():
        for name in _references(node):
            if name not in rules:
                raise GrammarRefused(Refusal.SYNTAX, f"rule {rule} names {name}, which there is not")


def _references(node: Node) -> Iterator[str]:
    match node:
        case Reference(name):
            yield name
        case Sequence(parts) | Choice(parts):
            for part in parts:
                yield from _references(part)
        case Repeat(item):
            yield from _references(item)


def _regular_rules(rules: dict[str, Node]) -> set[str]:
    """Rules that lead to no recursion: those whose references all are such rules."""
    open_names = {name: set(_references(node)) for name, node in rules.items()}
    regular: set[str] = set()
    while found := {name for name, names in open_names.items() if names <= regular}:
        regular |= found
        for name in found:
            del open_names[name]
    return regular


class _Writer:
    """Lark names: T0, T1 … for rules that are terminals, r0, r1 … for others, X0, X1 … for runs within rules."""

    def __init__(self, rules: dict[str, Node]) -> None:
        self._rules = rules
        self._regular = _regular_rules(rules)
        kinds = {name: "T" if name in self._regular else "r" for name in rules}
        self._names = {name: f"{kinds[name]}{index}" for index, name in enumerate(rules)}
        self._runs: dict[str, str] = {}

    def text(self) -> str:
        lines = [f"start: {self._names[ROOT]}"]
        for name, node in self._rules.items():
            body = self._terminal(node) if name in self._regular else self._rule(node)
            lines.append(f"{self._names[name]}: {body}")
        lines += [f"{name}: {body}" for body, name in self._runs.items()]
        return "\n".join(lines) + "\n"

    def _is_regular(self, node: Node) -> bool:
        return all(name in self._regular for name in _references(node))

    # ------------------------------------------------------------ terminals

    def _terminal(self, node: Node) -> str:
        match node:
            case Text(text):
                return quoted(text)
            case Class():
                return _class(node)
            case Reference(name):
                return self._names[name]
            case Sequence(items):
                return " ".join(self._terminal(item) for item in items) if items else '""'
            case Choice(options):
                return "(" + " | ".join(self._terminal(option) for option in options) + ")"
            case Repeat(item, low, high):
                return f"({self._terminal(item)}){_times(low, high)}"

    # ------------------------------------------------------------ rules

    def _rule(self, node: Node) -> str:
        if self._is_regular(node):
            return self._run(node)
        match node:
            case Reference(name):
                return self._names[name]
            case Sequence(items):
                return " ".join(self._rule(part) for part in self._gathered(items))
            case Choice(options):
                return "(" + " | ".join(self._rule(option) for option in options) + ")"
            case Repeat(item, low, high):
                return f"({self._rule(item)}){_times(low, high)}"
        raise AssertionError(node)

    def _gathered(self, items: tuple[Node, ...]) -> Iterator[Node]:
        """Neighbours that are regular as one."""
        run: list[Node] = []
        for item in items:
            if self._is_regular(item):
                run.append(item)
                continue
            if run:
                yield Sequence(tuple(run))
            run = []
            yield item
        if run:
            yield Sequence(tuple(run))

    def _run(self, node: Node) -> str:
        """A terminal of its own for a part of a rule."""
        if isinstance(node, Sequence) and not node.items:
            return '""'
        body = self._terminal(node)
        return self._runs.setdefault(body, f"X{len(self._runs)}")


def _times(low: int, high: int | None) -> str:
    if high is None:
        return {0: "*", 1: "+"}.get(low, f"{{{low},}}")
    return "?" if (low, high) == (0, 1) else f"{{{low},{high}}}"


def _class(node: Class) -> str:
    if not node.ranges:
        return r"/[\s\S]/"
    inside = "".join(
        class_character(low) if low == high else f"{class_character(low)}-{class_character(high)}"
        for low, high in node.ranges
    )
    return f"/[{'^' if node.is_negated else ''}{inside}]/"
