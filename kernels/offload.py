"""What an engine is told of weights that are not to stay in the memory of their device."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class Offload:
    """Packed weights stay in memory while they fit into ``stays`` bytes, in the order in which they
    are packed; the others lie in ``file``.

    ``file``: open for reading and writing, without a name, with ``size`` bytes of room; whoever
    takes this closes it.
    """

    stays: int
    size: int
    file: Any
