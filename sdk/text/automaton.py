"""Finds any of several strings in a text that arrives character by character (Aho-Corasick).

The state is the longest end of the text that begins one of the strings. So it says both which
string is complete and how much of the text may still become part of one.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable


class StringAutomaton:
    """The strings of one request, shared by all its answers. State 0 is the beginning."""

    def __init__(self, strings: Iterable[str]) -> None:
        self._edges: list[dict[str, int]] = [{}]
        #: By state: how many of the last characters begin a string, and the longest string that
        #: is complete.
        self.depth = [0]
        self.found: list[str | None] = [None]
        for text in strings:
            self._insert(text)
        self._fallback = self._link()

    def __bool__(self) -> bool:
        return len(self._edges) > 1

    def follow(self, state: int, character: str) -> int:
        """The state after one more character."""
        edges, fallback = self._edges, self._fallback
        while state and character not in edges[state]:
            state = fallback[state]
        return edges[state].get(character, 0)

    def _insert(self, text: str) -> None:
        state = 0
        for character in text:
            following = self._edges[state].get(character)
            if following is None:
                following = len(self._edges)
                self._edges[state][character] = following
                self._edges.append({})
                self.depth.append(self.depth[state] + 1)
                self.found.append(None)
            state = following
        self.found[state] = text

    def _link(self) -> list[int]:
        """The next state if no edge matches: the longest other prefix that the text ends with."""
        fallback = [0] * len(self._edges)
        queue = deque(self._edges[0].values())
        while queue:
            state = queue.popleft()
            for character, following in self._edges[state].items():
                queue.append(following)
                other = fallback[state]
                while other and character not in self._edges[other]:
                    other = fallback[other]
                fallback[following] = self._edges[other].get(character, 0)
                if self.found[following] is None:
                    self.found[following] = self.found[fallback[following]]
        return fallback
