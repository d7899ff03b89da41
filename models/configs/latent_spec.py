"""The widths of multi-head latent attention."""

from __future__ import annotations

from typing import NamedTuple


class LatentSpec(NamedTuple):
    """The widths of latent attention (DeepSeek-AI, "DeepSeek-V2", 2024, table 8).

    ``rank``: of the latent of keys and values. ``query_rank``: of that of queries; ``None``:
    queries are multiplied from the input. A head's query has ``still`` dimensions and ``turning``
    ones, which rotate; its value has ``value``. ``adjacent_pairs``: see
    :class:`~sdk.models.architecture.LayerRules`. ``chosen``: each token attends to so many, which
    an indexer chooses: to all in a context that is no longer.
    """

    query_rank: int | None
    rank: int
    still: int
    turning: int
    value: int
    adjacent_pairs: bool = True
    chosen: int | None = None

    @property
    def query(self) -> int:
        """Features of a head's query."""
        return self.still + self.turning

    @property
    def key(self) -> int:
        """Features of what a token keeps."""
        return self.rank + self.turning
