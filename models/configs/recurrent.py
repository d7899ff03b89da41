"""The sizes of a recurrent mixer, which a config says.

This module imports no layers, because configs and architectures, which layers are built from, name
its type.
"""

from __future__ import annotations

from typing import Any, Protocol

from sdk.quant.caches import StateCache


class RecurrentSpec(Protocol):
    """The sizes of a recurrent mixer, of all ranks together: see :mod:`sdk.models.mixers.mixer`."""

    @property
    def name(self) -> str:
        """The mixer's name in a layer."""

    @property
    def step_width(self) -> int:
        """Numbers of a token in the tensors that the mixer has in a recorded step: what enters its
        operators, and their results."""

    def cache(self, ranks: int = 1) -> StateCache:
        """What one of ``ranks`` ranks keeps for one sequence.

        :raises AlignmentError: its heads cannot be divided over the ranks.
        """

    def mixer(self, source: Any, path: str, *, reduce: bool) -> Any:
        """The :class:`~sdk.models.mixers.mixer.Mixer` of a layer. ``source``: a
        :class:`~sdk.models.source.Source`. Without ``reduce`` a rank's result is its part of the
        sum over ranks."""
