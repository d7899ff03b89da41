"""A short way from a matcher's state to a complete answer.

A matcher only says which tokens may follow. A beam search over tokens looks for the first complete
text: it prefers tokens that close something (quotes and brackets), then tokens that lead to a state
not seen before, and it always tries the longest token, because forced text has only one way.
"""

from __future__ import annotations

import hashlib
import math
import operator
from collections import Counter
from collections.abc import Callable, Sequence

import numpy as np
from numpy.typing import NDArray

from sdk.structured.library import DEAD_END, GrammarError, Matcher, SearchLimit

#: Bytes that end a value or a container in JSON and in most other notations. Where nearly any token
#: may follow, the text is inside a string, and a quote ends it; elsewhere brackets come first.
_CLOSERS = b"\"'}])>;"
_IN_TEXT, _IN_STRUCTURE = b"\"'", b'}])>;"'
#: The share of a vocabulary from which on the text counts as inside a string.
_TEXT_SHARE = 1 / 8
#: States kept after each token, and the most tokens tried in a state.
_WIDTH, _BRANCHES = 8, 24
#: The states of one search, each about 0.1 ms; and how often a state may repeat, as far as its mask
#: says, until the search only goes on with the same token.
_STATES, _LOOPS = 2000, 16
#: Bytes of forced text that take as long as a mask.
_BYTES_OF_A_MASK = 1024
#: How often the search believes in the same state that a closing token closes something.
_VISITS = 8
#: The rank of a token after which nothing may follow.
_WORST = (True, 2**31, 0)
#: Bytes tried where many may follow.
_TRIED = b"\"'}])>;01,.:-_/@+ TZaAPxn\n*=&%$#!?(<[{|~^`\t\\"


class TokenShapes:
    """What the search must know about each token of a vocabulary, in arrays."""

    def __init__(self, tokens: Sequence[bytes]) -> None:
        self.lengths = np.fromiter(map(len, tokens), np.int32, len(tokens))
        self._bytes = b"".join(tokens) or b"\0"
        data = np.frombuffer(self._bytes, np.uint8)
        self._starts = starts = np.concatenate(([0], np.cumsum(self.lengths)[:-1])).astype(np.int64)
        closing = np.zeros(256, np.int32)
        closing[list(_CLOSERS)] = 1
        counts = np.add.reduceat(closing[data], np.minimum(starts, len(data) - 1))
        counts[self.lengths == 0] = 0
        #: Tokens that consist of closing bytes only.
        self.closes = (counts == self.lengths) & (self.lengths > 0)
        spaces = np.zeros(256, np.int32)
        spaces[list(b" \t\r\n")] = 1
        counts = np.add.reduceat(spaces[data], np.minimum(starts, len(data) - 1))
        self.spaces = (counts == self.lengths) & (self.lengths > 0)
        quotes = (data == ord('"')).astype(np.int32)
        counts = np.add.reduceat(quotes, np.minimum(starts, len(data) - 1))
        begin = np.minimum(starts, len(data) - 1)
        end = np.minimum(starts + np.maximum(self.lengths - 1, 0), len(data) - 1)
        #: Tokens with a quote inside: they begin a string and some text in it.
        self.begins_text = (self.lengths > 1) & (counts > quotes[begin] + quotes[end])
        opening = np.zeros(256, np.int32)
        opening[list(b"{[")] = 1
        opens = np.add.reduceat(opening[data], np.minimum(starts, len(data) - 1))
        #: Tokens of one byte.
        self.bytes = np.flatnonzero(self.lengths == 1).tolist()
        #: How many brackets each token opens at most.
        self.opens = np.where(self.lengths > 0, opens, 0)
        self.first = np.where(self.lengths > 0, data[np.minimum(starts, len(data) - 1)], 0)

    def text(self, token: int) -> bytes:
        """A token's bytes."""
        start = int(self._starts[token])
        return self._bytes[start : start + int(self.lengths[token])]

    def candidates(self, allowed: NDArray[np.intp]) -> tuple[list[int], bool]:
        """The tokens worth trying among those that are allowed, most promising first, and whether
        the first of them certainly closes something."""
        allowed = allowed[self.lengths[allowed] > 0]
        if not len(allowed):
            return [], False
        # Characters beyond ASCII take several tokens, and whitespace leads nowhere. A string is
        # begun with a token of its own, after which it may end at once.
        for wanted in (self.first < 128, ~self.spaces, ~self.begins_text):
            some = allowed[wanted[allowed]]
            allowed = some if len(some) else allowed
        closers = _IN_STRUCTURE
        if len(allowed) > _TEXT_SHARE * len(self.lengths):
            closers = _IN_TEXT
        closing = allowed[self.closes[allowed]]
        found: list[int] = []
        for byte in closers:
            some = closing[self.first[closing] == byte]
            if byte == ord('"') and closers is _IN_STRUCTURE:  # it begins a string
                some = some[self.lengths[some] <= 2]
            found += some[np.argsort(-self.lengths[some], kind="stable")][:2].tolist()
        closes = bool(found)
        if len(allowed) <= _BRANCHES:
            found += self._longest_of_each_way(allowed)
        else:
            found.append(int(allowed[self.lengths[allowed].argmax()]))
            found += self._of_each_byte(allowed)
        return list(dict.fromkeys(found))[:_BRANCHES], closes

    def _longest_of_each_way(self, allowed: NDArray[np.intp]) -> list[int]:
        """Without tokens that are the beginning of another one: they lead the same way."""
        found: list[int] = []
        texts: list[bytes] = []
        for token in allowed[np.argsort(-self.lengths[allowed], kind="stable")].tolist():
            text = self.text(token)
            if not any(other.startswith(text) for other in texts):
                found.append(token)
                texts.append(text)
        return found

    def _of_each_byte(self, allowed: NDArray[np.intp]) -> list[int]:
        """The shortest token for each first byte, if there are few of them, else of some bytes."""
        shortest = allowed[np.argsort(self.lengths[allowed], kind="stable")]
        bytes_, index = np.unique(self.first[shortest], return_index=True)
        at = dict(zip(bytes_.tolist(), shortest[index].tolist(), strict=True))
        if len(at) <= _BRANCHES:
            return list(at.values())
        # In the middle of a character only some bytes continue it.
        return [at[byte] for byte in _TRIED if byte in at] or list(at.values())[:_BRANCHES]


class _Walk:
    """A copy of a matcher, and the tokens that it has consumed since."""

    def __init__(self, origin: Matcher) -> None:
        self._origin = origin
        self.matcher = origin.copy()
        self.path: list[int] = []

    def take(self, tokens: Sequence[int]) -> bool:
        """Follow tokens, if they may follow: a mask may be that of another state."""
        if self.matcher.allowed(tokens) < len(tokens):
            return False
        self.matcher.consume(tokens)
        self.path += tokens
        return True

    def back(self, count: int) -> None:
        """Take the last tokens back."""
        self.matcher.rollback(count)
        del self.path[len(self.path) - count :]

    def restart(self, dropped: int) -> None:
        """After an error, which makes a matcher useless: without the last tokens."""
        del self.path[len(self.path) - dropped :]
        self.matcher = self._origin.copy()
        self.matcher.consume(self.path)


class Search:
    """Finds short completions for the matchers of one vocabulary. Not thread-safe."""

    def __init__(self, shapes: TokenShapes, words: int) -> None:
        self._shapes = shapes
        self._mask = np.zeros(words, np.uint32)
        self._masks_left = math.inf
        self._hints: list[tuple[int, ...]] = []

    def shortest(
        self,
        matcher: Matcher,
        most_tokens: int,
        *,
        hints: Sequence[Sequence[int]] = (),
        masks: float = math.inf,
        states: int = _STATES,
        thorough: bool = True,
        known_rest: Callable[[Matcher], tuple[int, ...] | None] = lambda _: None,
    ) -> tuple[int, ...] | None:
        """At most ``most_tokens`` tokens that complete the text of ``matcher``, which is in the
        same state afterwards. None: none were found.

        ``hints``: sequences of tokens that may be needed, such as the literals of a pattern.
        ``masks``: the most masks that are computed. ``states``: the most states that are compared.
        ``thorough``: look for ways around dead ends too. ``known_rest``: tokens that complete the
        text of a matcher, if some are known.

        :raises SearchLimit: ``masks`` are not enough.
        :raises GrammarError: the grammar is too complex to follow.
        """
        if matcher.accepting:
            return ()
        self._masks_left = masks
        matcher.forced_bytes()  # those of others
        self._hints = [tuple(hint) for hint in hints]
        # One state at a time nearly always succeeds; several find ways around dead ends and loops.
        found = error = None
        try:
            found = self._one_by_one(_Walk(matcher), most_tokens, states, known_rest)
        except SearchLimit:
            raise
        except GrammarError as error_:
            error = error_
        if thorough and not found:
            found = self._beam(_Walk(matcher), most_tokens, states)
        if error is not None and found is None and DEAD_END not in str(error):
            raise error
        return found

    def mask(self, matcher: Matcher) -> Callable[[int], bool]:
        """Whether a token may follow."""
        matcher.mask(self._mask)
        mask = self._mask.copy()
        return lambda token: bool(int(mask[token >> 5]) >> (token & 31) & 1)

    def candidates(self, matcher: Matcher) -> list[int]:
        """The tokens worth trying, most promising first."""
        return self._shapes.candidates(self._allowed(matcher)[1])[0]

    def _one_by_one(
        self,
        walk: _Walk,
        most_tokens: int,
        states: int,
        known_rest: Callable[[Matcher], tuple[int, ...] | None],
    ) -> tuple[int, ...] | None:
        """Always the most promising token. Takes about 50 us a token, plus 30 us for each token
        that is compared."""
        path = walk.path
        seen: Counter[bytes] = Counter()
        visits: Counter[bytes] = Counter()
        last, repeats = b"", 0
        taken: Counter[tuple[int, ...]] = Counter()
        while len(path) < most_tokens and states > 0:
            matcher = walk.matcher
            forced = matcher.forced(most_tokens - len(path))
            self._count_forced(matcher)
            if forced:
                walk.take(forced)
                if matcher.accepting:
                    return tuple(path)
                if matcher.stopped:
                    return None
                continue
            key, allowed = self._allowed(matcher)
            visits[key] += 1
            repeats = repeats + 1 if key == last else 0
            last = key
            if repeats > _LOOPS and path[-1] in allowed:
                step: tuple[int, ...] = (path[-1],)  # long repetition: a minimum length
            else:
                ids, closes = self._shapes.candidates(allowed)
                steps: list[tuple[int, ...]] = [(token,) for token in ids]
                # A brace in a mail address closes nothing: the same states come again.
                if len(ids) > 1 and not (closes and visits[key] <= _VISITS):
                    steps += [one for one in self._hints if matcher.allowed(one) == len(one)]
                    states -= len(steps)
                    known = seen.copy()  # where all lead to alike states, the least taken comes
                    ranks = {}
                    for one in steps:
                        ranks[one] = (*self._looked_ahead(walk, one, known, seen), taken[one])
                    steps = sorted(ranks, key=lambda one: ranks[one])
                if not steps:
                    return None
                step = steps[0]
                taken[step] += 1
            if not walk.take(step):
                return None
            matcher = walk.matcher
            if matcher.accepting:
                return tuple(path)
            if matcher.stopped:
                return None
            if (rest := known_rest(matcher)) is not None:
                return (*path, *rest)
        return None

    def _looked_ahead(
        self, walk: _Walk, step: Sequence[int], known: Counter[bytes], seen: Counter[bytes]
    ) -> tuple[bool, int, int]:
        """The rank of some tokens by the states that are ``known``; adds theirs to ``seen``. The
        walk is in the same state afterwards."""
        if not walk.take(step):
            return _WORST
        try:
            rank = not walk.matcher.accepting, *self._rank(walk.matcher, step[-1], seen, known)
        except SearchLimit:
            raise
        except GrammarError:
            walk.restart(len(step))
            return _WORST
        walk.back(len(step))
        return rank

    def _beam(self, walk: _Walk, most_tokens: int, states: int) -> tuple[int, ...] | None:
        """The most promising states after each token."""
        # Only paths are kept: a copy of a matcher that was used for long takes megabytes.
        beam: list[tuple[int, ...]] = [()]
        seen: Counter[bytes] = Counter()
        for _ in range(most_tokens):
            ranked: list[tuple[tuple[int, int], tuple[int, ...]]] = []
            for path in beam:
                walk.take(path)
                ids, _ = self._shapes.candidates(self._allowed(walk.matcher)[1])
                states -= len(ids)
                if states < 0:
                    return None
                for token in ids:
                    if not walk.take((token,)):
                        continue
                    if walk.matcher.accepting:
                        return (*path, token)
                    try:
                        if not walk.matcher.stopped:
                            rank = self._rank(walk.matcher, token, seen)
                            ranked.append((rank, (*path, token)))
                    except SearchLimit:
                        raise
                    except GrammarError:
                        walk.restart(1)
                    else:
                        walk.back(1)
                walk.back(len(path))
            if not ranked:
                return None
            ranked.sort(key=operator.itemgetter(0))
            beam = [path for _, path in ranked[:_WIDTH]]
        return None

    def _rank(
        self,
        matcher: Matcher,
        token: int,
        seen: Counter[bytes],
        known: Counter[bytes] | None = None,
    ) -> tuple[int, int]:
        """Small for states that are new, as far as their masks say, and for long tokens. Adds the
        state to ``seen``; ``known``: the states that are not new, if they are others."""
        if matcher.stopped:
            return (0, 0)
        key, _ = self._allowed(matcher)
        seen[key] += 1
        return (seen if known is None else known)[key], -int(self._shapes.lengths[token])

    def _allowed(self, matcher: Matcher, again: bool = True) -> tuple[bytes, NDArray[np.intp]]:
        """The tokens that may follow, and a hash of their mask."""
        self._masks_left -= 1
        matcher.mask(self._mask)
        self._count_forced(matcher)
        bits = np.unpackbits(self._mask.view(np.uint8), bitorder="little")
        allowed = np.flatnonzero(bits[: len(self._shapes.lengths)])
        if again and len(allowed) and not matcher.allowed((int(allowed[0]),)):
            # The mask of another state (see Matcher): that of a following one takes its place.
            following = (one for one in self._shapes.bytes if matcher.allowed((one,)))
            if (token := next(following, None)) is not None:
                matcher.consume((token,))
                matcher.mask(self._mask)
                matcher.rollback(1)
                return self._allowed(matcher, again=False)
        key = hashlib.blake2b(self._mask.tobytes(), digest_size=16).digest()
        return key, allowed

    def _count_forced(self, matcher: Matcher) -> None:
        """:raises SearchLimit: the masks so far, and the forced texts, are too many."""
        self._masks_left -= matcher.forced_bytes() // _BYTES_OF_A_MASK
        if self._masks_left < 0:
            raise SearchLimit("it is too complex: a complete text needs too many steps of a search")
