"""Finds where the parts of a recursive grammar meet such that the longest match would be wrong.

A **run** is a part without recursion, which is matched as a whole. Several runs may be possible after a run, or at the
beginning. It must be clear where a run ends: no run that may follow begins with a character that could continue it, and
no two runs that are possible at the same place begin with the same character.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from itertools import combinations

from octavo.grammar.gbnf_parser import Choice, Class, Node, Reference, Repeat, Sequence, Text
from octavo.grammar.gbnf_reach import Reach, overlap, reach

# Larger grammars are not checked: this must take milliseconds.
MAX_RUNS = 64
MAX_RULES = 100
_MAX_DIVIDED_TEXT = 64


@dataclass(frozen=True, slots=True)
class Run:
    """A leaf of a plan: a part that is matched as a whole."""

    node: Node


@dataclass(frozen=True, slots=True)
class Series:
    """All of the parts, in order."""

    parts: tuple["Plan", ...]


@dataclass(frozen=True, slots=True)
class Either:
    """One of the parts."""

    parts: tuple["Plan", ...]


@dataclass(frozen=True, slots=True)
class Many:
    """A repeated part; see `grammar.gbnf_parser.Repeat`."""

    part: "Plan"
    low: int
    high: int | None


@dataclass(frozen=True, slots=True)
class Call:
    """A reference to a rule that is no run."""

    name: str


Plan = Run | Series | Either | Many | Call


@dataclass(slots=True)
class _Edge:
    """The runs with which a plan may begin and end."""

    is_nullable: bool = False
    first: frozenset[Run] = frozenset()
    last: frozenset[Run] = frozenset()


@dataclass(slots=True)
class _Meetings:
    """Which runs may follow which, over all rules. `settle` iterates until nothing new is found."""

    plans: Mapping[str, Plan]
    reaches: dict[Run, Reach]
    edges: dict[str, _Edge] = field(default_factory=dict)
    after: dict[Run, set[Run]] = field(default_factory=dict)

    def settle(self) -> None:
        self.edges = {name: _Edge() for name in self.plans}
        while True:
            size = self._size()
            for name, plan in self.plans.items():
                self.edges[name] = self._edge(plan)
            if self._size() == size:
                return

    def _size(self) -> tuple[int, int]:
        edges = sum(edge.is_nullable + len(edge.first) + len(edge.last) for edge in self.edges.values())
        return edges, sum(len(runs) for runs in self.after.values())

    def _edge(self, plan: Plan) -> _Edge:
        match plan:
            case Run():
                alone = frozenset((plan,))
                return _Edge(self.reaches[plan].is_nullable, alone, alone)
            case Call(name):
                return self.edges[name]
            case Series(parts):
                found = _Edge(True)
                for part in parts:
                    found = self._then(found, self._edge(part))
                return found
            case Either(parts):
                edges = [self._edge(part) for part in parts]
                return _Edge(
                    any(edge.is_nullable for edge in edges),
                    frozenset().union(*(edge.first for edge in edges)),
                    frozenset().union(*(edge.last for edge in edges)),
                )
            case Many(part, low, high):
                edge = self._edge(part)
                if high is None or high > 1:
                    self._meet(edge, edge)
                return _Edge(low == 0 or edge.is_nullable, edge.first, edge.last)

    def _then(self, one: _Edge, other: _Edge) -> _Edge:
        self._meet(one, other)
        return _Edge(
            one.is_nullable and other.is_nullable,
            one.first | other.first if one.is_nullable else one.first,
            other.last | one.last if other.is_nullable else other.last,
        )

    def _meet(self, one: _Edge, other: _Edge) -> None:
        for run in one.last:
            self.after.setdefault(run, set()).update(other.first)


def unclear(plans: Mapping[str, Plan], root: str, regular: Mapping[str, Reach]) -> set[Node]:
    """The nodes of the runs that must be split. regular: the reach of each rule that runs name."""
    runs = {run for plan in plans.values() for run in _runs(plan)}
    if len(runs) > MAX_RUNS or len(plans) > MAX_RULES:
        return set()
    meetings = _Meetings(plans, {run: reach(run.node, regular) for run in runs})
    meetings.settle()
    reaches = meetings.reaches
    found: set[Node] = set()
    for run, followers in meetings.after.items():
        if any(overlap(reaches[run].further, reaches[follower].first) for follower in followers):
            found.add(run.node)
    places = {meetings.edges[root].first, *(frozenset(followers) for followers in meetings.after.values())}
    for one, other in combinations(runs, 2):
        if overlap(reaches[one].first, reaches[other].first) and any(one in at and other in at for at in places):
            found |= _longer(one.node, other.node)
    return {node for node in found if not _is_atom(node)}


def _longer(one: Node, other: Node) -> set[Node]:
    """Of two nodes that begin alike, those that can be split; none if they are texts that differ before either ends."""
    if isinstance(one, Text) and isinstance(other, Text):
        is_beginning = one.text.startswith(other.text) or other.text.startswith(one.text)
        return {one, other} if is_beginning else set()
    return {node for node in (one, other) if not _is_atom(node)}


def _is_atom(node: Node) -> bool:
    return isinstance(node, Class) or (isinstance(node, Text) and not 1 < len(node.text) <= _MAX_DIVIDED_TEXT)


def _runs(plan: Plan) -> set[Run]:
    match plan:
        case Run():
            return {plan}
        case Series(parts) | Either(parts):
            return {run for part in parts for run in _runs(part)}
        case Many(part):
            return _runs(part)
    return set()


def broken_up(node: Node) -> tuple[Node, ...]:
    """The parts of a run that must be split, one level down; a rule's name stays as it is."""
    match node:
        case Text(text):
            return tuple(Text(character) for character in text)
        case Sequence(items) | Choice(items):
            return items
        case Repeat(item):
            return (item,)
        case Class() | Reference():
            return (node,)
