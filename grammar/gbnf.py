"""Converts GBNF to llguidance's Lark.

Rules that lead to no recursion become terminals, that is, regular expressions, and so does every run of such parts
within other rules. A terminal matches the longest text that it can, and is exact inside. Where runs meet such that the
longest match would be wrong (`grammar.gbnf_borders`), they are split into smaller ones, down to single characters: this
is exact, but slower.
"""

from collections.abc import Iterator

from octavo.grammar.errors import GrammarRefused, Refusal
from octavo.grammar.gbnf_borders import Call, Either, Many, Plan, Run, Series, broken_up, unclear
from octavo.grammar.gbnf_parser import Choice, Class, Node, Reference, Repeat, Sequence, Text, parse_gbnf
from octavo.grammar.gbnf_reach import Reach, reach
from octavo.grammar.lark import class_character, quoted
from octavo.grammar.limits import GrammarLimits

ROOT = "root"
MAX_DIVISIONS = 8  # each one goes through the whole grammar
MAX_RULE_DEPTH = 128
# For grammars with recursion: llguidance's limits do not bound the time that these take.
MAX_PARTS = 1_000
MAX_TEXT = 512


def gbnf_to_lark(source: str, limits: GrammarLimits) -> str:
    """The grammar in Lark. Raises GrammarRefused."""
    num_bytes = len(source.encode())
    if num_bytes > limits.max_source_bytes:
        raise GrammarRefused(Refusal.LIMIT, f"has {num_bytes} bytes, at most {limits.max_source_bytes} are allowed")
    rules = parse_gbnf(source)
    _check_names(rules)
    _check_depth(rules)
    _check_size(rules)
    return _Writer(rules).text()


def _check_names(rules: dict[str, Node]) -> None:
    if ROOT not in rules:
        raise GrammarRefused(Refusal.SYNTAX, f"has no rule {ROOT}")
    for rule, node in rules.items():
        for name in _references(node):
            if name not in rules:
                raise GrammarRefused(Refusal.SYNTAX, f"rule {rule} names {name}, which there is not")


def _check_depth(rules: dict[str, Node]) -> None:
    """Limit how deep rules are nested, without recursion: llguidance's compiler recurses once for each level."""
    depths: dict[str, int] = {}
    for name in _regular_rules(rules):
        depths[name] = 1 + max((depths[used] for used in _references(rules[name])), default=0)
    if max(depths.values(), default=0) > MAX_RULE_DEPTH:
        raise GrammarRefused(Refusal.LIMIT, f"has rules nested deeper than {MAX_RULE_DEPTH}")


def _check_size(rules: dict[str, Node]) -> None:
    if len(_regular_rules(rules)) == len(rules):
        return
    num_parts = 0
    for part in (part for node in rules.values() for part in _parts(node)):
        num_parts += 1
        if isinstance(part, Text) and len(part.text) > MAX_TEXT:
            raise GrammarRefused(Refusal.LIMIT, f"has a text of more than {MAX_TEXT} characters beside recursion")
    if num_parts > MAX_PARTS:
        raise GrammarRefused(Refusal.LIMIT, f"has {num_parts} parts beside recursion, at most {MAX_PARTS} are allowed")


def _parts(node: Node) -> Iterator[Node]:
    yield node
    match node:
        case Sequence(parts) | Choice(parts):
            for part in parts:
                yield from _parts(part)
        case Repeat(item):
            yield from _parts(item)


def _references(node: Node) -> Iterator[str]:
    match node:
        case Reference(name):
            yield name
        case Sequence(parts) | Choice(parts):
            for part in parts:
                yield from _references(part)
        case Repeat(item):
            yield from _references(item)


def _regular_rules(rules: dict[str, Node]) -> list[str]:
    """Rules that lead to no recursion, in an order in which each comes after the rules that it names."""
    num_open = {name: len(set(_references(node))) for name, node in rules.items()}
    users: dict[str, list[str]] = {name: [] for name in rules}
    for name, node in rules.items():
        for used in set(_references(node)):
            users[used].append(name)
    ordered = [name for name, count in num_open.items() if not count]
    for name in ordered:  # grows during the loop
        for user in users[name]:
            num_open[user] -= 1
            if not num_open[user]:
                ordered.append(user)
    return ordered


class _Planner:
    """Divides rules into runs, and splits runs for which the longest match would be wrong into smaller ones."""

    def __init__(self, rules: dict[str, Node], regular: list[str]) -> None:
        self._rules = rules
        self._ordered = regular
        self._regular = set(regular)
        self._divided: set[Node] = set()

    def plans(self) -> dict[str, Plan]:
        """Plans by rule name: of the root, and of every rule that is not within a run."""
        reaches: dict[str, Reach] = {}
        for name in self._ordered:
            reaches[name] = reach(self._rules[name], reaches)
        for _ in range(MAX_DIVISIONS):
            plans = self._reachable()
            nodes = unclear(plans, ROOT, reaches) - self._divided
            if not nodes:
                break
            self._divided |= nodes
        return self._reachable()

    def _reachable(self) -> dict[str, Plan]:
        plans: dict[str, Plan] = {}
        names = [ROOT]
        while names:
            name = names.pop()
            if name not in plans:
                plans[name] = self._plan(self._rules[name])
                names += _calls(plans[name])
        return plans

    def _is_regular(self, node: Node) -> bool:
        return all(name in self._regular for name in _references(node))

    def _plan(self, node: Node) -> Plan:
        if self._is_regular(node) and node not in self._divided:
            return Run(node)
        match node:
            case Reference(name):
                return Call(name)
            case Choice(options):
                return Either(tuple(self._plan(option) for option in options))
            case Repeat(item, low, high):
                return Many(self._plan(item), low, high)
            case Sequence(items) if not self._is_regular(node):
                return Series(tuple(self._plan(part) for part in self._gathered(items)))
        return Series(tuple(self._plan(part) for part in broken_up(node)))

    def _gathered(self, items: tuple[Node, ...]) -> Iterator[Node]:
        """The items, with adjacent regular ones joined into one."""
        run: list[Node] = []
        for item in (*items, None):
            if item is not None and self._is_regular(item):
                run.append(item)
                continue
            if run:
                yield run[0] if len(run) == 1 else Sequence(tuple(run))
            run = []
            if item is not None:
                yield item


class _Writer:
    """Lark names: T0, T1 … for rules as terminals, r0, r1 … for other rules, X0, X1 … for runs."""

    def __init__(self, rules: dict[str, Node]) -> None:
        self._rules = rules
        self._regular = _regular_rules(rules)
        self._numbers = {name: number for number, name in enumerate(rules)}
        self._runs: dict[str, str] = {}

    def text(self) -> str:
        """The whole grammar."""
        plans = _Planner(self._rules, self._regular).plans()
        lines = [f"start: r{self._numbers[ROOT]}"]
        lines += [f"r{self._numbers[name]}: {self._rule(plan)}" for name, plan in plans.items()]
        lines += [f"T{self._numbers[name]}: {self._terminal(self._rules[name])}" for name in sorted(self._regular)]
        lines += [f"{name}: {body}" for body, name in self._runs.items()]
        return "\n".join(lines) + "\n"

    def _terminal(self, node: Node) -> str:
        match node:
            case Text(text):
                return quoted(text)
            case Class():
                return _class(node)
            case Reference(name):
                return f"T{self._numbers[name]}"
            case Sequence(items):
                return " ".join(self._terminal(item) for item in items) if items else '""'
            case Choice(options):
                return "(" + " | ".join(self._terminal(option) for option in options) + ")"
            case Repeat(item, low, high):
                return f"({self._terminal(item)}){_times(low, high)}"

    def _rule(self, plan: Plan) -> str:
        match plan:
            case Run(node):
                body = self._terminal(node)
                return body if body == '""' else self._runs.setdefault(body, f"X{len(self._runs)}")
            case Call(name):
                return f"r{self._numbers[name]}"
            case Series(parts):
                return " ".join(self._rule(part) for part in parts) or '""'
            case Either(parts):
                return "(" + " | ".join(self._rule(part) for part in parts) + ")"
            case Many(part, low, high):
                return f"({self._rule(part)}){_times(low, high)}"


def _calls(plan: Plan) -> list[str]:
    match plan:
        case Call(name):
            return [name]
        case Series(parts) | Either(parts):
            return [name for part in parts for name in _calls(part)]
        case Many(part):
            return _calls(part)
    return []


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
