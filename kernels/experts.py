"""The operators of mixtures of experts: a router chooses k of many matrices for each token.

Every token has one row for each of its experts. The rows of a step are brought into the order of
their experts once (:meth:`ExpertOps.route`), so that an expert has its rows side by side: its
product is an ordinary one, and activations and biases go over all rows alike. ``combine`` brings
them back. A row's result does not depend on which other rows its expert has.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from sdk.kernels.checks import expect, expect_floats
from sdk.kernels.errors import KernelError

if TYPE_CHECKING:
    from sdk.kernels.ops import BoundLinear


@dataclass(frozen=True, slots=True)
class Routes:
    """Which experts the T tokens of a step go to; k each, so that there are R = T * k rows.

    ``weights`` float32 ``[T, k]``; all others int32. ``places [T, k]``: the row of a token's j-th
    expert. By row, in the order of the experts: ``tokens [R]`` and ``owners [R]``, whose row it is
    and which expert's. Expert e has the rows ``starts[e] : starts[e + 1]``, ``starts [E + 1]``;
    ``active [E + 1]`` lists the experts that have any, and ends with their number.
    """

    weights: Tensor
    places: Tensor
    tokens: Tensor
    owners: Tensor
    starts: Tensor
    active: Tensor

    def parts(self, x: Tensor, by_token: bool) -> Iterator[tuple[int, slice, Tensor]]:
        """Each expert that has rows, which they are, and their rows of x.

        x is ``[T, K]`` (``by_token``) or ``[R, K]`` in the order of the experts. Looks at the
        numbers, so it cannot be recorded.
        """
        if by_token:
            x = x[self.tokens.long()]
        starts = self.starts.tolist()
        for expert in self.active[: int(self.active[-1])].tolist():
            rows = slice(starts[expert], starts[expert + 1])
            yield expert, rows, x[rows]


@dataclass(frozen=True, slots=True)
class BoundExperts:
    """The weights of all experts of a layer, of one shape and format, in the hands of a kernel."""

    implementation: Any
    packed: Any
    count: int
    shape: tuple[int, int]
    ops: ExpertOps

    def matmul(self, x: Tensor, routes: Routes, *, by_token: bool) -> Tensor:
        """``[R, N]`` in the order of the experts, of x ``[T, K]`` (``by_token``) or ``[R, K]``.

        Of the activations' type (``Ops.activations``).
        """
        tokens, rows = routes.weights.shape[0], routes.tokens.shape[0]
        short = self.ops.activations
        expect_floats("experts x", x, short, tokens if by_token else rows, self.shape[1])
        expect("experts starts", routes.starts, torch.int32, self.count + 1)
        out = self.ops.empty(rows, self.shape[0], dtype=short)
        if rows:
            self.implementation.matmul_routed(self.packed, x.contiguous(), routes, by_token, out)
        return out


class ExpertOps:
    """The part of :class:`sdk.kernels.ops.Ops` that only mixtures of experts need."""

    activations: torch.dtype

    def empty(self, *shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
        raise NotImplementedError

    def _kernel(self, op: str, **fields: Any) -> Any:
        raise NotImplementedError

    def group(self, experts: Sequence[BoundLinear]) -> BoundExperts | None:
        """The weights of a layer's experts as one; None where they are not of one kind."""
        first = experts[0]
        if len({expert.problem for expert in experts}) != 1:
            return None
        implementation = first.choice.implementation
        packed = implementation.group([expert.packed for expert in experts])
        if packed is None:
            return None
        return BoundExperts(implementation, packed, len(experts), first.shape, self)

    def route(self, logits: Tensor, k: int, *, normalized: bool) -> Routes:
        """The k experts with the highest of ``logits [T, E]`` for each token, the first of equals.

        Their weights are a softmax over the k logits (``normalized``), or what the k have of the
        softmax over all.
        """
        expect("route logits", logits, torch.float32, None, None)
        tokens, count = logits.shape
        if not 1 <= k <= count:
            raise KernelError(f"route: expected 1 to {count} experts per token, found {k}")

        weights, chosen = self.empty(tokens, k), self._integers(tokens, k)
        routes = self._empty_routes(weights, count)
        if tokens:
            self._kernel("route").run(logits.contiguous(), normalized, chosen, weights)
            self._kernel("group").run(chosen, routes)
        return routes

    def routes(self, chosen: Tensor, weights: Tensor, count: int) -> Routes:
        """The routes of a router of somebody else's: ``chosen`` and ``weights [T, k]``.

        ``count``: how many experts there are. Looks at the numbers, so it cannot be recorded.

        :raises KernelError: an expert outside ``0..count - 1``.
        """
        if chosen.numel() and not 0 <= int(chosen.min()) <= int(chosen.max()) < count:
            raise KernelError(
                f"routes: expected experts in 0..{count - 1}, "
                f"found {int(chosen.min())} to {int(chosen.max())}"
            )
        routes = self._empty_routes(weights.to(torch.float32).contiguous(), count)
        if chosen.numel():
            self._kernel("group").run(chosen.to(torch.int32).contiguous(), routes)
        return routes

    def _integers(self, *shape: int) -> Tensor:
        return self.empty(*shape).view(torch.int32)

    def _empty_routes(self, weights: Tensor, count: int) -> Routes:
        tokens, k = weights.shape
        rows = tokens * k
        return Routes(
            weights,
            self._integers(tokens, k),
            self._integers(rows),
            self._integers(rows),
            self._integers(count + 1),
            self._integers(count + 1),
        )

    def add_owners_bias(self, x: Tensor, bias: Tensor, routes: Routes) -> Tensor:
        """``x[r] += bias[routes.owners[r]]``: ``x [R, N]``, ``bias [E, N]``; returns x."""
        expect_floats("add_owners_bias x", x, self.activations, routes.owners.shape[0], None)
        count = routes.starts.shape[0] - 1
        expect("add_owners_bias bias", bias, torch.float32, count, x.shape[1])
        if x.numel():
            self._kernel("add_owners_bias").run(x, bias, routes)
        return x

    def combine(self, x: Tensor, routes: Routes) -> Tensor:
        """The rows ``x [R, N]`` of each token times their weights, summed: float32 ``[T, N]``."""
        expect_floats("combine x", x, self.activations, routes.tokens.shape[0], None)
        out = self.empty(routes.weights.shape[0], x.shape[1])
        if out.numel():
            self._kernel("combine").run(x, routes, out)
        return out
