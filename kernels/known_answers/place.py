"""Where a known-answer case runs, and its numbers: see ``cases.py``."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from sdk.kernels.backend import Problem
from sdk.kernels.operators.routes import TILE_ROWS, Routes, tiles_at

#: What a case returns: the name of a result, its values, and the allowed distance.
Found = list[tuple[str, Tensor, float]]
#: A case: the kernel, where it runs, its problem, and what it will run on.
Case = Callable[[Any, "Place", Problem, Sequence[Any]], Found]
#: Of products whose operands may be rounded to bfloat16 once more, on cards that multiply nothing
#: else: 2^-8 for each of the two, and for what is written.
PRODUCT = 2.0**-5


@dataclass(frozen=True)
class Place:
    """``rounded``: the activations' type, to which inputs are rounded everywhere; ``short``: the
    type in which this place has them, float32 for the reference."""

    device: torch.device
    short: torch.dtype
    rounded: torch.dtype

    def on_host(self) -> Place:
        """The same in float32 on the CPU."""
        return replace(self, device=torch.device("cpu"), short=torch.float32)

    def floats(self, *shape: int, seed: int, mean: float = 0.0) -> Tensor:
        """float32, of a normal distribution."""
        random = torch.Generator().manual_seed(seed)
        return (torch.randn(shape, generator=random) + mean).to(self.device)

    def rows(self, *shape: int, seed: int, mean: float = 0.0) -> Tensor:
        """The same as activations."""
        random = torch.Generator().manual_seed(seed)
        values = (torch.randn(shape, generator=random) + mean).to(self.rounded)
        return values.to(self.device, self.short)

    def integers(self, values: Sequence[int], dtype: torch.dtype) -> Tensor:
        return torch.tensor(values, dtype=dtype).to(self.device)

    def nan(self, *shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
        return torch.full(shape, math.nan, dtype=dtype, device=self.device)

    def given(self, dtype: torch.dtype) -> torch.dtype:
        """The type that a result of this type has here."""
        return dtype if dtype == torch.float32 else self.short

    def limit(self, dtype: torch.dtype) -> float:
        """The allowed distance of numbers that a kernel computes in float32 and writes rounded:
        see ``cases.py``."""
        return max(4 * torch.finfo(dtype).eps, 2.0**-12)


def empty_routes(place: Place, tokens: int, experts: int, k: int) -> Routes:
    """Weights, and numbers that belong to no row."""

    def unset(*shape: int) -> Tensor:
        return torch.full(shape, -1, dtype=torch.int32, device=place.device)

    rows = tokens * k
    return Routes(
        place.floats(tokens, k, seed=9).abs(),
        unset(tokens, k),
        unset(rows),
        unset(rows),
        unset(experts + 1),
        unset(experts + 1),
        tiles=unset(tiles_at(rows, experts, TILE_ROWS[-1] + 1), 2),
    )


def routes_on(device: torch.device, routes: Routes) -> Routes:
    """A copy on the device."""
    names = ("weights", "places", "tokens", "owners", "starts", "active", "tiles")
    moved: dict[str, Any] = {name: getattr(routes, name).to(device) for name in names}
    return replace(routes, **moved)
