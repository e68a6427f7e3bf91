"""Stop strings in a stream of text.

The output ends where, reading character by character, a stop string is first complete; of several that are complete
at the same character the longest counts. This depends on the text alone, never on how it was cut into tokens or
messages. What could still become a stop string is held back: at most the longest one's length - 1 characters.

Aho-Corasick ("Efficient string matching", CACM 18:6, 1975): the depth of the automaton's state is exactly the number of
characters to hold back.
"""

from collections import deque
from collections.abc import Sequence


class StopStrings:
    """The automaton over a request's stop strings; immutable."""

    __slots__ = ("children", "depth", "fail", "first", "longest_end")

    def __init__(self, strings: Sequence[str]) -> None:
        """strings: all non-empty."""
        self.children: list[dict[str, int]] = [{}]
        self.depth = [0]
        self.longest_end: list[str | None] = [None]  # the longest stop string that ends in this state
        for string in strings:
            self._insert(string)
        self.first = frozenset(self.children[0])
        self.fail = [0] * len(self.children)
        self._link()

    def _insert(self, string: str) -> None:
        if not string:
            raise ValueError("a stop string must not be empty")
        node = 0
        for character in string:
            child = self.children[node].get(character)
            if child is None:
                child = self.children[node][character] = len(self.children)
                self.children.append({})
                self.depth.append(self.depth[node] + 1)
                self.longest_end.append(None)
            node = child
        self.longest_end[node] = string

    def _link(self) -> None:
        queue = deque(self.children[0].values())
        while queue:
            node = queue.popleft()
            for character, child in self.children[node].items():
                self.fail[child] = self.step(self.fail[node], character)
                queue.append(child)
            if self.longest_end[node] is None:
                self.longest_end[node] = self.longest_end[self.fail[node]]

    def step(self, node: int, character: str) -> int:
        """The state after one more character."""
        while node and character not in self.children[node]:
            node = self.fail[node]
        return self.children[node].get(character, 0)


class StopMatcher:
    """One output's text on its way to the caller."""

    __slots__ = ("_held", "_node", "_strings", "match")

    def __init__(self, strings: StopStrings) -> None:
        self._strings = strings
        self._node = 0
        self._held = ""
        self.match: str | None = None  # the stop string that ended the text

    def feed(self, text: str) -> str:
        """The text that may be sent now. After a match, `match` is set and any further text is dropped."""
        if self.match is not None:
            return ""
        strings, node = self._strings, self._node
        if node == 0 and strings.first.isdisjoint(text):
            return text
        for index, character in enumerate(text):
            node = strings.step(node, character)
            if (stop := strings.longest_end[node]) is not None:
                return self._end(self._held + text[: index + 1], stop)
        self._node = node
        whole = self._held + text
        cut = len(whole) - strings.depth[node]
        self._held = whole[cut:]
        return whole[:cut]

    def _end(self, whole: str, stop: str) -> str:
        self.match, self._held = stop, ""
        return whole[: len(whole) - len(stop)]

    def flush(self) -> str:
        """The text has ended: what was held back is not a stop string."""
        held, self._held, self._node = self._held, "", 0
        return held
