"""Which characters a part of a grammar may begin with, and which may continue it once it is complete.

For parts without recursion. If a part is ambiguous in itself, the answer may include too many characters.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from octavo.grammar.gbnf_parser import Choice, Class, Node, Reference, Repeat, Sequence, Text

Ranges = tuple[tuple[int, int], ...]
"""Ranges of code points, both ends included, in no particular order."""

_LAST = 0x10FFFF
_MAX_SPANS = 64


@dataclass(frozen=True, slots=True)
class Reach:
    """Characters of a part's texts. first: those that a text may begin with. further: those that may follow a complete
    text within a longer one. every: all of them."""

    is_nullable: bool
    first: Ranges
    further: Ranges
    every: Ranges


NOTHING = Reach(True, (), (), ())


def reach(node: Node, rules: Mapping[str, Reach]) -> Reach:
    """The reach of a node. rules: the reach of each rule that the node names."""
    match node:
        case Text(text):
            spans = _short(dict.fromkeys((ord(character), ord(character)) for character in text))
            return Reach(not text, ((ord(text[0]), ord(text[0])),) if text else (), (), spans)
        case Class():
            return Reach(False, _spans(node), (), _spans(node))
        case Reference(name):
            return rules[name]
        case Sequence(items):
            found = NOTHING
            for item in items:
                found = _then(found, reach(item, rules))
            return found
        case Choice(options):
            return _or([reach(option, rules) for option in options])
        case Repeat(item, low, high):
            return _times(reach(item, rules), low, high)


def overlap(one: Ranges, other: Ranges) -> bool:
    """Whether the ranges share a character."""
    return any(low <= top and bottom <= high for low, high in one for bottom, top in other)


def _then(one: Reach, other: Reach) -> Reach:
    every = _joined(one.every, other.every)
    first = _joined(one.first, other.first) if one.is_nullable else one.first
    if overlap(one.further, other.first):  # it is not clear where the first part ends
        return Reach(one.is_nullable and other.is_nullable, first, every, every)
    further = _joined(one.further, other.first, other.further) if other.is_nullable else other.further
    return Reach(one.is_nullable and other.is_nullable, first, further, every)


def _or(options: list[Reach]) -> Reach:
    every = _joined(*(option.every for option in options))
    first = _joined(*(option.first for option in options))
    is_nullable = any(option.is_nullable for option in options)
    is_open = any(overlap(a.first, b.first) for n, a in enumerate(options) for b in options[n + 1 :])
    further = every if is_open else _joined(*(option.further for option in options), first if is_nullable else ())
    return Reach(is_nullable, first, further, every)


def _times(item: Reach, low: int, high: int | None) -> Reach:
    if high == 0:
        return NOTHING
    is_nullable = low == 0 or item.is_nullable
    if high == 1:
        return Reach(is_nullable, item.first, _joined(item.further, item.first if is_nullable else ()), item.every)
    is_open = overlap(item.further, item.first)
    further = item.every if is_open else _joined(item.further, item.first)
    if low == high and not item.is_nullable and not is_open:
        further = item.further  # the number is fixed: no text is complete before the last item
    return Reach(is_nullable, item.first, further, item.every)


def _joined(*ranges: Ranges) -> Ranges:
    return _short(dict.fromkeys(span for each in ranges for span in each))


def _short(spans: Iterable[tuple[int, int]]) -> Ranges:
    """If there are more than _MAX_SPANS, one range that covers them all, so that comparing stays cheap."""
    spans = tuple(spans)
    if len(spans) <= _MAX_SPANS:
        return spans
    return ((min(low for low, _ in spans), max(high for _, high in spans)),)


def _spans(node: Class) -> Ranges:
    spans = sorted((ord(low), ord(high)) for low, high in node.ranges)
    if not node.is_negated:
        return _short(spans)
    gaps, begin = [], 0
    for low, high in spans:
        if begin < low:
            gaps.append((begin, low - 1))
        begin = max(begin, high + 1)
    return _short((*gaps, (begin, _LAST)) if begin <= _LAST else gaps)
