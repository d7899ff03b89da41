"""Mixture-of-experts operators in plain torch; :mod:`sdk.kernels.moe` defines them."""

from __future__ import annotations

import torch
from torch import Tensor

from sdk.kernels.backend import Problem
from sdk.kernels.routes import Routes


class Route:
    """See :meth:`sdk.kernels.moe.MoEOps.route`."""

    name = "reference.route"

    def reject(self, problem: Problem) -> str | None:
        return None

    def run(self, logits: Tensor, normalized: bool, chosen: Tensor, weights: Tensor) -> None:
        k = chosen.shape[1]
        best, order = logits.sort(dim=1, descending=True, stable=True)
        chosen.copy_(order[:, :k])
        parts = (best[:, :k] if normalized else best).softmax(dim=1)
        weights.copy_(parts[:, :k])


class Group:
    """Sorts the choices of all tokens by expert."""

    name = "reference.group"

    def reject(self, problem: Problem) -> str | None:
        return None

    def run(self, chosen: Tensor, routes: Routes) -> None:
        flat, count = chosen.reshape(-1).long(), routes.starts.shape[0] - 1
        order = flat.argsort(stable=True)
        routes.owners.copy_(flat[order])
        routes.tokens.copy_(order // chosen.shape[1])
        routes.places.view(-1)[order] = torch.arange(
            len(flat), dtype=torch.int32, device=flat.device
        )
        rows = torch.bincount(flat, minlength=count)
        routes.starts.zero_()
        routes.starts[1:] = rows.cumsum(0)
        active = rows.nonzero().reshape(-1)
        routes.active[: len(active)] = active.int()
        routes.active[count] = len(active)


class AddOwnersBias:
    """See :meth:`sdk.kernels.moe.MoEOps.add_owners_bias`."""

    name = "reference.add_owners_bias"

    def reject(self, problem: Problem) -> str | None:
        return None

    def run(self, x: Tensor, bias: Tensor, routes: Routes) -> None:
        x += bias[routes.owners.long()]


class Combine:
    """See :meth:`sdk.kernels.moe.MoEOps.combine`; adds in the order of rank."""

    name = "reference.combine"

    def reject(self, problem: Problem) -> str | None:
        return None

    def run(self, x: Tensor, routes: Routes, out: Tensor) -> None:
        out.zero_()
        for weight, place in zip(routes.weights.unbind(1), routes.places.unbind(1), strict=True):
            out += weight.unsqueeze(1) * x[place.long()]
