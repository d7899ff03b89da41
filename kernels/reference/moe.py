"""Mixture-of-experts operators in plain torch; :mod:`sdk.kernels.operators.moe` defines them."""

from __future__ import annotations

from sdk.kernels.backend import Problem
from sdk.kernels.groups import CollectiveGroup
from sdk.kernels.lazy_torch import Tensor, torch
from sdk.kernels.operators.route_rule import RouteRule
from sdk.kernels.operators.routes import TILE_ROWS, RankTokens, Routes, tiles_at


class Route:
    """See :meth:`sdk.kernels.operators.moe.MoEOps.route`."""

    name = "reference.route"

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
        self._route(logits, rule, bias, chosen, weights)
        if factors is not None:
            weights.mul_(factors[chosen.long()])

    def _route(
        self,
        logits: Tensor,
        rule: RouteRule,
        bias: Tensor | None,
        chosen: Tensor,
        weights: Tensor,
    ) -> None:
        k = chosen.shape[1]
        if rule.gate == "sparse_mixer":
            _sparse_mixer(logits, rule, chosen, weights)
            weights.copy_(_normalized(weights, rule) if rule.normalized else weights)
            weights.mul_(rule.scale)
            return
        scores = _scores(logits, rule)
        # Without a bias logits are in the order of scores, which round more of them to one value.
        selection = logits if bias is None and rule.groups == 1 else scores.float()
        selection = selection if bias is None else selection + bias
        if rule.groups > 1:
            selection = selection.masked_fill(~_of_best_groups(selection, rule), float("-inf"))
        order = selection.sort(dim=1, descending=True, stable=True)[1][:, :k]
        chosen.copy_(order)
        if rule.gate == "softmax" and rule.normalized and not rule.epsilon and not rule.least:
            parts = logits.gather(1, order).softmax(dim=1)
        else:
            parts = scores.gather(1, order)
            parts = _normalized(parts, rule) if rule.normalized else parts
        weights.copy_(parts * rule.scale)


def _scores(logits: Tensor, rule: RouteRule) -> Tensor:
    """In float64: in float32 torch gives an element other bits at the end of a tensor."""
    logits = logits.double()
    if rule.gate == "softmax":
        return logits.softmax(dim=1)
    if rule.gate == "sigmoid":
        return logits.sigmoid()
    return torch.nn.functional.softplus(logits).sqrt()


def _normalized(parts: Tensor, rule: RouteRule) -> Tensor:
    return parts / (parts.sum(dim=1, keepdim=True) + rule.epsilon).clamp(min=rule.least)


def _of_best_groups(selection: Tensor, rule: RouteRule) -> Tensor:
    """Which experts are in one of the best groups: bool ``[T, E]``."""
    groups = selection.view(len(selection), rule.groups, -1)
    best = groups.sort(dim=2, descending=True)[0][:, :, : rule.group_best].sum(dim=2)
    order = best.sort(dim=1, descending=True, stable=True)[1][:, : rule.groups_used]
    kept = torch.zeros_like(best, dtype=torch.bool).scatter(1, order, True)
    return kept.repeat_interleave(groups.shape[2], dim=1)


def _sparse_mixer(logits: Tensor, rule: RouteRule, chosen: Tensor, weights: Tensor) -> None:
    left = logits.clone()
    chosen.copy_(logits.sort(dim=1, descending=True, stable=True)[1][:, : chosen.shape[1]])
    for j in range(chosen.shape[1]):
        expert = chosen[:, j : j + 1].long()
        best = logits.gather(1, expert)
        far = (best - logits) / logits.abs().clamp(min=best) > 2 * rule.jitter
        shares = left.masked_fill(far, float("-inf")).softmax(dim=1)
        weights[:, j : j + 1] = shares.gather(1, expert)
        left.scatter_(1, expert, float("-inf"))


class GroupByExpert:
    """Sorts the choices of all tokens by expert."""

    name = "reference.group"
    writes_tiles = True

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
        _write_counts(torch.bincount(flat, minlength=count), routes)


class GroupRanks:
    """Assigns the choices to ranks, and sorts those of this one's experts."""

    name = "reference.group_ranks"
    writes_tiles = False

    def reject(self, problem: Problem) -> str | None:
        return None

    def run(self, chosen: Tensor, routes: Routes) -> None:
        own = routes.experts
        assert own is not None and routes.servers is not None
        served = routes.servers.view(-1)
        here: list[int] = []
        for row, expert in enumerate(chosen.reshape(-1).tolist()):
            first, end = own.first[expert : expert + 2].tolist()
            served[row] = own.ranks[first + int(own.load[expert]) % (end - first)]
            own.load[expert] += 1
            here.append(int(own.local[expert]) if served[row] == own.rank else -1)
        numbers = torch.tensor(here, dtype=torch.int32)
        rows = (numbers >= 0).nonzero().reshape(-1)
        order = rows[numbers[rows].argsort(stable=True)]
        counts = torch.bincount(numbers[rows].long(), minlength=own.count)
        routes.owners[: len(order)] = numbers[order]
        routes.tokens[: len(order)] = (order // chosen.shape[1]).int()
        routes.places.fill_(-1)
        routes.places.view(-1)[order] = torch.arange(len(order), dtype=torch.int32)
        _write_counts(counts, routes)


def _write_counts(counts: Tensor, routes: Routes) -> None:
    """``starts``, ``active`` and ``tiles``, from the number of rows of each expert."""
    routes.starts.zero_()
    routes.starts[1:] = counts.cumsum(0)
    active = counts.nonzero().reshape(-1)
    routes.active[: len(active)] = active.int()
    routes.active[-1] = len(active)
    if routes.tiles is None:
        return
    for size in TILE_ROWS:
        tiles = (counts + size - 1) // size
        experts = torch.arange(len(counts), device=counts.device).repeat_interleave(tiles)
        before = (tiles.cumsum(0) - tiles)[experts]
        within = torch.arange(len(experts), device=counts.device) - before
        at = tiles_at(len(routes.owners), len(counts), size)
        routes.tiles[at, 0] = len(experts)
        found = routes.tiles[at + 1 : at + 1 + len(experts)]
        found[:, 0] = experts.int()
        found[:, 1] = routes.starts[experts] + within.int() * size


class AddOwnersBias:
    """See :meth:`sdk.kernels.operators.moe.MoEOps.add_owners_bias`."""

    name = "reference.add_owners_bias"

    def reject(self, problem: Problem) -> str | None:
        return None

    def run(self, x: Tensor, bias: Tensor, routes: Routes) -> None:
        rows = slice(None if routes.used is None else int(routes.used))
        x[rows] += bias[routes.owners[rows].long()]


class Combine:
    """See :meth:`sdk.kernels.operators.moe.MoEOps.combine`; adds in the order of rank."""

    name = "reference.combine"

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
        out.zero_()
        for weight, place in zip(routes.weights.unbind(1), routes.places.unbind(1), strict=True):
            out += weight.unsqueeze(1) * x[place.long()]
        _add_shared(out, shared, gate)


class CombineRanks:
    """The same where every rank has whole experts."""

    name = "reference.combine_ranks"

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
        experts, own = routes.experts, slice(None)
        if (tokens := experts.tokens) is not None:
            own = slice(*tokens.starts[tokens.rank : tokens.rank + 2].tolist())
        where = routes.weights, routes.places, routes.servers
        combine_ranks(experts.group, x, *where, out, shared, gate, own=own)


def _add_shared(out: Tensor, shared: Tensor | None, gate: Tensor | None) -> None:
    if shared is not None:
        out += shared if gate is None else gate.double().sigmoid().float() * shared


def combine_ranks(
    group: CollectiveGroup,
    x: Tensor,
    weights: Tensor,
    places: Tensor,
    servers: Tensor,
    out: Tensor,
    shared: Tensor | None = None,
    gate: Tensor | None = None,
    *,
    own: slice = slice(None),
) -> None:
    """Add up the rows of each token: ``places`` has those of this rank, ``servers`` the ranks.

    ``own``: the tokens that ``out`` has.
    """
    places, servers = places.long(), servers.long()
    mine = torch.where((places >= 0).unsqueeze(2), x[places.clamp(min=0)], 0.0)
    sent = torch.stack(group.all_gather(mine))  # [ranks, T, k, N]
    tokens = torch.arange(len(servers))[own]
    out.zero_()
    for j, weight in enumerate(weights[own].unbind(1)):
        out += weight.unsqueeze(1) * sent[servers[own, j], tokens, j]
    _add_shared(out, shared, gate)


class GatherRanks:
    """See :meth:`sdk.kernels.operators.moe.MoEOps.gather`."""

    name = "reference.gather_ranks"

    def reject(self, problem: Problem) -> str | None:
        return None

    def run(self, x: Tensor, tokens: RankTokens, out: Tensor) -> None:
        counts = tokens.starts.diff().tolist()
        padded = torch.nn.functional.pad(x, (0, 0, 0, max(counts) - len(x)))
        parts = tokens.group.all_gather(padded)
        out.copy_(torch.cat([part[:count] for part, count in zip(parts, counts, strict=True)]))
