"""PLaMo 2's tokenizer: of all ways to divide a text into tokens the one with the largest sum of
scores.

Scores are compared in steps of 0.0001. A character may also become the tokens of its bytes, for
``_BYTES``; at each place a longer token wins over a shorter one with the same sum. A byte order
mark before the text is left out. Tokens spell a space as it is.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from sdk.loaders.tokenizer.metadata import Metadata
from sdk.loaders.tokenizer.portions import PORTION, check_count, fewest_tokens

_STEPS = 1e4
#: What a character costs that becomes bytes, and the score of a token that is never used, in steps.
_BYTES, _NEVER = 10_000_000, -20_000_000


class LargestSum:
    """Encodes with one vocabulary.

    ``pieces``: spelling -> id of tokens that text may become. ``scores``: by id, those that are no
    numbers are of tokens that text does not become. ``byte_ids``: the token of each byte.

    :raises CheckpointError: a byte has no token, so that there are texts without tokens.
    """

    def __init__(
        self,
        meta: Metadata,
        pieces: Mapping[str, int],
        scores: NDArray[np.generic],
        byte_ids: Sequence[int | None],
    ) -> None:
        self._byte_ids = [token for token in byte_ids if token is not None]
        if None in byte_ids:
            lacks = f"none for byte {byte_ids.index(None)}"
            raise meta.error("tokenizer.ggml.tokens", "a token <0x00> to <0xFF> for each", lacks)
        self._pieces = pieces
        steps = _steps(scores.astype(np.float64) * _STEPS)
        #: What a token costs, by spelling, and the id; a beginning of a token alone is ``None``.
        self._known: dict[str, tuple[int, int] | None] = {}
        for piece, token in pieces.items():
            for end in range(1, len(piece)):
                self._known.setdefault(piece[:end], None)
            used = steps[token] > _NEVER
            self._known[piece] = (-steps[token], token) if used else self._known.get(piece)

    def encode(self, text: str, stop_after: int | None = None) -> list[int]:
        """Token ids of ``text``.

        :raises TooManyTokens: there are more than ``stop_after``.
        """
        text = text.removeprefix("\ufeff")
        if len(text) > PORTION and stop_after is not None:
            check_count(fewest_tokens(text, self._pieces, complete=True), stop_after)
        tokens = self._best(text)
        ids: list[int] = []
        at = 0
        while at < len(text):
            length, token = tokens[at]
            if token is None:
                ids += [self._byte_ids[byte] for byte in text[at].encode("utf-8", "replace")]
            else:
                ids.append(token)
            check_count(len(ids), stop_after)
            at += length
        return ids

    def _best(self, text: str) -> list[tuple[int, int | None]]:
        """For each place the length and id of the first token of the best way from there on."""
        size, known = len(text), self._known
        costs = [0] * (size + 1)
        best: list[tuple[int, int | None]] = [(1, None)] * size
        for at in range(size - 1, -1, -1):
            lowest = _BYTES + costs[at + 1]
            first: tuple[int, int | None] = (1, None)
            end = at + 1
            while end <= size and (piece := text[at:end]) in known:
                found = known[piece]
                if found is not None and (cost := found[0] + costs[end]) <= lowest:
                    lowest, first = cost, (end - at, found[1])
                end += 1
            costs[at], best[at] = lowest, first
        return best


def _steps(values: NDArray[np.float64]) -> list[int]:
    """Rounded, halves away from zero; NaN and infinities become ``_NEVER``."""
    whole = np.sign(values) * np.floor(np.abs(values) + 0.5)
    return np.where(np.isfinite(values), whole, _NEVER).astype(np.int64).tolist()  # type: ignore[no-any-return]
