"""Mixture of experts (MoE): ``native/moe.hpp``; the products are in :mod:`.packed_linear`."""

from __future__ import annotations

from functools import partial

from sdk.kernels.backend import Problem
from sdk.kernels.cpu.elementwise import floats
from sdk.kernels.cpu.library import (
    BiasArgs,
    CombineArgs,
    CombineRanksArgs,
    GatherRanksArgs,
    GroupArgs,
    OpKind,
    RouteArgs,
)
from sdk.kernels.cpu.rank_group import SharedGroup
from sdk.kernels.cpu.runtime import NativeRuntime
from sdk.kernels.lazy_torch import Tensor
from sdk.kernels.operators.route_rule import GATES, RouteRule
from sdk.kernels.operators.routes import RankTokens, Routes
from sdk.kernels.reference.moe import combine_ranks


class Route:
    """See :meth:`sdk.kernels.operators.moe.MoEOps.route`."""

    name = "cpu.route"

    def __init__(self, runtime: NativeRuntime) -> None:
        self._runtime = runtime

    def reject(self, problem: Problem) -> str | None:
        return None

    def run(
        self,
        logits: Tensor,
        rule: RouteRule,
        bias: Tensor | None,
        chosen: Tensor,
        weights: Tensor,
        factors: Tensor | None = None,
    ) -> None:
        logits = floats(logits, "route logits")
        args = RouteArgs(
            logits.data_ptr(),
            None if bias is None else floats(bias, "route bias").data_ptr(),
            None if factors is None else floats(factors, "route factors").data_ptr(),
            chosen.data_ptr(),
            weights.data_ptr(),
            logits.shape[1],
            chosen.shape[1],
            GATES.index(rule.gate),
            rule.normalized,
            rule.groups,
            rule.groups_used,
            rule.group_best,
            rule.epsilon,
            rule.least,
            rule.scale,
            2 * rule.jitter,
        )
        self._runtime.run(OpKind.ROUTE, args, logits.shape[0], "route")


class GroupByExpert:
    """Sorts the choices of all tokens by expert, or those of this rank's experts."""

    name = "cpu.group"
    writes_tiles = False

    def __init__(self, runtime: NativeRuntime) -> None:
        self._runtime = runtime

    def reject(self, problem: Problem) -> str | None:
        return None

    def run(self, chosen: Tensor, routes: Routes) -> None:
        args = GroupArgs(
            chosen.data_ptr(),
            routes.places.data_ptr(),
            routes.tokens.data_ptr(),
            routes.owners.data_ptr(),
            routes.starts.data_ptr(),
            routes.active.data_ptr(),
            routes.starts.shape[0] - 1,
            k=chosen.shape[1],
        )
        if (own := routes.experts) is not None:
            assert routes.servers is not None
            args.first, args.ranks = own.first.data_ptr(), own.ranks.data_ptr()
            args.local, args.load = own.local.data_ptr(), own.load.data_ptr()
            args.servers, args.rank = routes.servers.data_ptr(), own.rank
        self._runtime.run(OpKind.GROUP, args, chosen.numel(), "group")


class AddOwnersBias:
    """See :meth:`sdk.kernels.operators.moe.MoEOps.add_owners_bias`."""

    name = "cpu.add_owners_bias"

    def __init__(self, runtime: NativeRuntime) -> None:
        self._runtime = runtime

    def reject(self, problem: Problem) -> str | None:
        return None

    def run(self, x: Tensor, bias: Tensor, routes: Routes) -> None:
        bias = floats(bias, "add_owners_bias bias")
        used = None if routes.used is None else routes.used.data_ptr()
        args = BiasArgs(x.data_ptr(), bias.data_ptr(), routes.owners.data_ptr(), used, x.shape[1])
        self._runtime.run(OpKind.BIAS, args, x.shape[0], "add_owners_bias")


class Combine:
    """See :meth:`sdk.kernels.operators.moe.MoEOps.combine`."""

    name = "cpu.combine"

    def __init__(self, runtime: NativeRuntime) -> None:
        self._runtime = runtime

    def reject(self, problem: Problem) -> str | None:
        return None

    def run(
        self,
        x: Tensor,
        routes: Routes,
        out: Tensor,
        shared: Tensor | None,
        gate: Tensor | None,
    ) -> None:
        args = _combine_args(floats(x, "combine x"), routes, out, shared, gate)
        self._runtime.run(OpKind.COMBINE, args, out.shape[0], "combine")


class CombineRanks:
    """The same where every rank has whole experts."""

    name = "cpu.combine_ranks"

    def __init__(self, runtime: NativeRuntime) -> None:
        self._runtime = runtime

    def reject(self, problem: Problem) -> str | None:
        return None

    def run(
        self,
        x: Tensor,
        routes: Routes,
        out: Tensor,
        shared: Tensor | None,
        gate: Tensor | None,
    ) -> None:
        assert routes.experts is not None and routes.servers is not None
        group = routes.experts.group
        if not isinstance(group, SharedGroup):
            assert routes.experts.tokens is None  # engines in lockstep share memory
            added = [one for one in (shared, gate) if one is not None]
            tensors = (x, routes.weights, routes.places, routes.servers, out, *added)
            self._runtime.call(partial(combine_ranks, group), tensors, self.name)
            return
        x = floats(x, "combine x")
        sums = _combine_args(x, routes, out, shared, gate)
        args = CombineRanksArgs(sums, group.handle, routes.servers.data_ptr())
        if (tokens := routes.experts.tokens) is not None:
            args.starts = tokens.starts.data_ptr()
        self._runtime.run(OpKind.COMBINE_RANKS, args, routes.weights.shape[0], "combine")


class GatherRanks:
    """See :meth:`sdk.kernels.operators.moe.MoEOps.gather`."""

    name = "cpu.gather_ranks"

    def __init__(self, runtime: NativeRuntime) -> None:
        self._runtime = runtime

    def reject(self, problem: Problem) -> str | None:
        return None

    def run(self, x: Tensor, tokens: RankTokens, out: Tensor) -> None:
        assert isinstance(tokens.group, SharedGroup)
        args = GatherRanksArgs(
            tokens.group.handle,
            x.data_ptr(),
            out.data_ptr(),
            tokens.starts.data_ptr(),
            out.shape[1],
        )
        self._runtime.run(OpKind.GATHER_RANKS, args, out.shape[0], "gather")


def _combine_args(
    x: Tensor, routes: Routes, out: Tensor, shared: Tensor | None, gate: Tensor | None
) -> CombineArgs:
    return CombineArgs(
        x.data_ptr(),
        routes.weights.data_ptr(),
        routes.places.data_ptr(),
        None if shared is None else floats(shared, "combine shared").data_ptr(),
        None if gate is None else floats(gate, "combine gate").data_ptr(),
        out.data_ptr(),
        out.shape[1],
        routes.weights.shape[1],
    )
