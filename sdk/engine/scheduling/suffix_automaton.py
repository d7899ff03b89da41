"""A suffix automaton of a growing text: where its last tokens occurred before, in constant time.

Blumer et al. 1985. A state stands for all substrings that end at the same positions. Its link leads
to the longest of their suffixes that also occurs elsewhere. So after each token the link of the
last state is the longest suffix of the text that occurred before, and no search is needed.
"""

from __future__ import annotations

#: The suffixes of the text, longest first, of which the last occurrence is noted. Noting it for all
#: of them would take more than constant time.
_RECENT = 4


class SuffixAutomaton:
    """All suffixes of a text of tokens. Appending takes amortized constant time: 2 us, 0.4 KB.

    ``most``: matches are no longer than this.
    """

    #: Bytes per state, of which a text has at most two per token: measured with tracemalloc.
    STATE_BYTES = 360

    __slots__ = ("_ends", "_last", "_lengths", "_links", "_most", "_next", "match", "tokens")

    def __init__(self, most: int | None = None) -> None:
        self._most = most
        self.tokens: list[int] = []
        #: Length of the longest suffix that occurred before, and the position after a recent
        #: occurrence.
        self.match = 0, 0
        self._last = 0
        self._next: list[dict[int, int]] = [{}]  # by state: the state after each token
        self._links = [-1]
        self._lengths = [0]  # of the longest substring
        self._ends = [0]  # the position after an occurrence

    @property
    def num_states(self) -> int:
        return len(self._links)

    def append(self, token: int) -> None:
        """Add a token to the text and update ``match``."""
        following, links, lengths = self._next, self._links, self._lengths
        self.tokens.append(token)
        end, state, new = len(self.tokens), self._last, len(links)
        following.append({})
        lengths.append(end)
        self._ends.append(end)
        links.append(0)
        self._last = new
        while state >= 0 and token not in following[state]:
            following[state][token] = new
            state = links[state]
        if state >= 0:
            other = following[state][token]
            if lengths[other] > lengths[state] + 1:
                other = self._split(state, token, other)
            links[new] = other
        found, most = links[new], self._most
        if most is None or lengths[found] <= most:
            self.match = lengths[found], self._ends[found]
        else:
            limited = found
            while lengths[links[limited]] >= most:
                limited = links[limited]
            self.match = most, self._ends[limited]
        for _ in range(_RECENT):
            self._ends[found] = end
            found = links[found]
            if found <= 0:
                break

    def _split(self, state: int, token: int, other: int) -> int:
        """Give the substrings of ``other`` that continue ``state`` their own state."""
        following, links, lengths = self._next, self._links, self._lengths
        split = len(links)
        following.append(following[other].copy())
        lengths.append(lengths[state] + 1)
        self._ends.append(self._ends[other])
        links.append(links[other])
        links[other] = split
        while state >= 0 and following[state].get(token) == other:
            following[state][token] = split
            state = links[state]
        return split

    def follow(self, state: int, length: int, token: int) -> tuple[int, int]:
        """Continue a match of another text by one token.

        The match is the ``length`` last tokens of that text, which lead to ``state`` (0, 0: none).
        """
        following, links, lengths = self._next, self._links, self._lengths
        state = self._of(state, length)
        while state and token not in following[state]:
            state = links[state]
            length = lengths[state]
        target = following[state].get(token)
        return (0, 0) if target is None else (target, length + 1)

    def _of(self, state: int, length: int) -> int:
        """The state of a match; ``state`` was it before states were split."""
        links, lengths = self._links, self._lengths
        while state and length <= lengths[links[state]]:
            state = links[state]
        return state

    def end_of(self, state: int, length: int) -> int:
        """The position after a recent occurrence of a match."""
        return self._ends[self._of(state, length)]
