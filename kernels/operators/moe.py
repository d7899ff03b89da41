"""The operators of a mixture of experts (MoE): a router selects k of many experts for each token.

A token has one row for each of its experts. :meth:`MoEOps.route` sorts the rows of a step by expert
once, so that the rows of an expert are contiguous: its product is an ordinary one, and activations
and biases run over all rows at once. :meth:`MoEOps.combine` sums the rows of each token again. The
result of a row does not depend on the other rows of its expert.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from sdk.kernels.context import Context
from sdk.kernels.errors import KernelError
from sdk.kernels.lazy_torch import Tensor, torch
from sdk.kernels.operators.checks import expect, expect_floats
from sdk.kernels.operators.route_rule import GATES, MAX_SCORED, SOFTMAX, RouteRule
from sdk.kernels.operators.routes import TILE_ROWS, RankExperts, RankTokens, Routes, tiles_at
from sdk.kernels.weights.bound import BoundExperts, BoundLinear


class MoEOps:
    """``Ops.moe``: routing, and what else only a mixture of experts needs."""

    def __init__(self, context: Context) -> None:
        self._context = context

    def group(self, experts: Sequence[BoundLinear]) -> BoundExperts | None:
        """The weights of a layer's experts as one; ``None`` if formats or shapes differ."""
        first = experts[0]
        if len({expert.problem for expert in experts}) != 1:
            return None
        implementation = first.choice.implementation
        packed = implementation.group([expert.packed for expert in experts])
        if packed is None:
            return None
        bound = BoundExperts(implementation, packed, len(experts), first.shape, self._context)
        answers = self._context.answers
        if answers is not None and implementation.name.startswith("gpu."):
            from sdk.kernels.known_answers.experts import experts_reason

            if (why := experts_reason(answers, experts, bound)) is not None:
                answers.declined[f"{implementation.name} of experts"] = why
                return None
        return bound

    def route(
        self,
        logits: Tensor,
        k: int,
        rule: RouteRule = SOFTMAX,
        *,
        bias: Tensor | None = None,
        experts: RankExperts | None = None,
        factors: Tensor | None = None,
    ) -> Routes:
        """The k experts of each token by ``logits [T, E]``, and their weights, both by ``rule``.

        ``bias`` float32 ``[E]``: of the choice. ``factors`` float32 ``[E]``: the weight of an
        expert is multiplied by its own, last. ``experts``: which rank has which (on a CPU only).
        Every rank must make the same calls with the same logits.
        """
        expect("route logits", logits, torch.float32, None, None)
        tokens, count = logits.shape
        if not 1 <= k <= count:
            raise KernelError(f"route: expected 1 to {count} experts per token, found {k}")
        if bias is not None:
            expect("route bias", bias, torch.float32, count)
        if factors is not None:
            expect("route factors", factors, torch.float32, count)
        _check_rule(rule, k, count, biased=bias is not None)

        weights, chosen = self._context.empty(tokens, k), self._integers(tokens, k)
        name = "group" if experts is None else "group_ranks"
        operator = self._context.kernel(name, (chosen, count))
        routes = self._empty_routes(
            weights, count if experts is None else experts.count, tiles=operator.writes_tiles
        )
        if experts is not None:
            expect("route experts", experts.load, torch.int64, count)
            routes = replace(routes, experts=experts, servers=self._integers(tokens, k))
        if tokens:
            parts = [rule.gate, *["bias"] * (bias is not None), *["groups"] * (rule.groups > 1)]
            like = (logits, k, rule, bias, factors)
            kernel = self._context.kernel("route", like, format=" ".join(parts))
            kernel.run(logits.contiguous(), rule, bias, chosen, weights, factors)
            operator.run(chosen, routes)
        return routes

    def expect(
        self,
        group: BoundExperts,
        logits: Tensor,
        k: int,
        rule: RouteRule,
        *,
        bias: Tensor | None = None,
    ) -> None:
        """Have experts read that the ``logits [T, E]`` of a guess choose: see :meth:`route`.

        Nothing depends on it but time. Only if ``group`` :attr:`~BoundExperts.reads_ahead`.
        """
        tokens = logits.shape[0]
        if not tokens:
            return
        weights, chosen = self._context.empty(tokens, k), self._integers(tokens, k)
        parts = [rule.gate, *["bias"] * (bias is not None), *["groups"] * (rule.groups > 1)]
        kernel = self._context.kernel(
            "route", (logits, k, rule, bias, None), format=" ".join(parts)
        )
        kernel.run(logits.contiguous(), rule, bias, chosen, weights, None)
        group.expect(chosen)

    def routes(self, chosen: Tensor, weights: Tensor, count: int) -> Routes:
        """The routes of an external router: ``chosen`` and ``weights [T, k]``.

        ``count``: the number of experts.

        :raises KernelError: an expert outside ``0..count - 1``. A step that is being recorded has
            no values yet; there such an expert becomes the nearest, because memory is read by it.
        """
        if self._context.capture_pool is not None:
            chosen = chosen.clamp(0, count - 1)
        elif chosen.numel() and not 0 <= int(chosen.min()) <= int(chosen.max()) < count:
            raise KernelError(
                f"routes: expected experts in 0..{count - 1}, "
                f"found {int(chosen.min())} to {int(chosen.max())}"
            )
        chosen = chosen.to(torch.int32).contiguous()
        operator = self._context.kernel("group", (chosen, count))
        weights = weights.to(torch.float32).contiguous()
        routes = self._empty_routes(weights, count, tiles=operator.writes_tiles)
        if chosen.numel():
            operator.run(chosen, routes)
        return routes

    def _integers(self, *shape: int) -> Tensor:
        return self._context.empty(*shape).view(torch.int32)

    def _empty_routes(self, weights: Tensor, count: int, *, tiles: bool) -> Routes:
        tokens, k = weights.shape
        rows = tokens * k
        room = tiles_at(rows, count, TILE_ROWS[-1] + 1) if tiles else 0
        return Routes(
            weights,
            self._integers(tokens, k),
            self._integers(rows),
            self._integers(rows),
            self._integers(count + 1),
            self._integers(count + 1),
            tiles=self._integers(room, 2) if tiles else None,
        )

    def add_owners_bias(self, x: Tensor, bias: Tensor, routes: Routes) -> Tensor:
        """``x[r] += bias[routes.owners[r]]``: ``x [R, N]``, ``bias [E, N]``; returns x."""
        expect_floats(
            "add_owners_bias x", x, self._context.activations, routes.owners.shape[0], None
        )
        count = routes.starts.shape[0] - 1
        expect("add_owners_bias bias", bias, torch.float32, count, x.shape[1])
        if x.numel():
            like = (x, count, routes.weights.shape[1])
            self._context.kernel("add_owners_bias", like).run(x, bias, routes)
        return x

    def combine(
        self,
        x: Tensor,
        routes: Routes,
        shared: Tensor | None = None,
        gate: Tensor | None = None,
    ) -> Tensor:
        """The weighted sum of each token's rows of ``x [R, N]``: float32 ``[T, N]``.

        ``shared`` float32 ``[T, N]``: added last; times ``sigmoid(gate)``, float32 ``[T, 1]``.
        Rows at other ranks are fetched from them first, and all are added in the order of the
        token's experts, so that the bits are those of one rank with all experts. If ranks have
        tokens of their own, the result has only those of this one.
        """
        expect_floats("combine x", x, self._context.activations, routes.tokens.shape[0], None)
        own = routes.experts
        tokens = routes.weights.shape[0]
        ranks = None if own is None else own.tokens
        out = self._context.empty(tokens if ranks is None else self._own(ranks), x.shape[1])
        if shared is not None:
            expect("combine shared", shared, torch.float32, out.shape[0], x.shape[1])
            shared = shared.contiguous()
        if gate is not None:
            expect("combine gate", gate, torch.float32, out.shape[0], 1)
        if x.numel():
            operator = "combine" if own is None else "combine_ranks"
            like = (x, routes.starts.shape[0] - 1, routes.weights.shape[1], shared, gate)
            added = "" if shared is None else "shared" if gate is None else "gated"
            kernel = self._context.kernel(operator, like, format=added)
            kernel.run(x, routes, out, shared, gate)
        return out

    def gather(self, x: Tensor, tokens: RankTokens) -> Tensor:
        """The rows of all ranks, in rank order: ``x [own tokens, N]`` -> float32 ``[T, N]``.

        Every rank makes the same calls, also one without tokens. On a CPU only.
        """
        expect("gather x", x, torch.float32, self._own(tokens), None)
        out = self._context.empty(self._all(tokens), x.shape[1])
        if out.numel():
            self._context.kernel("gather_ranks").run(x.contiguous(), tokens, out)
        return out

    def _own(self, tokens: RankTokens) -> int:
        """The rows of this rank in a step; while one is recorded, the most."""
        if self._context.capture_pool is not None:
            return tokens.most // (tokens.starts.shape[0] - 1)
        first, end = tokens.starts[tokens.rank : tokens.rank + 2].tolist()
        return int(end - first)

    def _all(self, tokens: RankTokens) -> int:
        """The same of all ranks."""
        return tokens.most if self._context.capture_pool is not None else int(tokens.starts[-1])


def _check_rule(rule: RouteRule, k: int, count: int, *, biased: bool) -> None:
    """:raises KernelError: a rule that does not fit ``count`` experts."""
    if rule.gate not in GATES:
        raise KernelError(f"route: gate: expected one of {GATES}, found {rule.gate!r}")
    if rule.gate == "sparse_mixer" and (biased or rule.groups > 1):
        raise KernelError("route: sparse_mixer: expected neither a bias nor groups")
    if count > MAX_SCORED and (biased or rule not in (SOFTMAX, SOFTMAX._replace(normalized=False))):
        raise KernelError(
            f"route: expected at most {MAX_SCORED} experts with a gate, a bias or groups, found "
            f"{count}"
        )
    if rule.groups == 1:
        return
    if rule.groups < 1 or count % rule.groups:
        raise KernelError(f"route: groups: expected a divisor of {count}, found {rule.groups}")
    size = count // rule.groups
    if not 1 <= rule.groups_used <= rule.groups or rule.groups_used * size < k:
        raise KernelError(
            f"route: groups_used: expected 1 to {rule.groups} groups of {size} experts with "
            f"{k} together, found {rule.groups_used}"
        )
    if not 1 <= rule.group_best <= size:
        raise KernelError(
            f"route: group_best: expected 1 to {size} experts of a group, found {rule.group_best}"
        )
