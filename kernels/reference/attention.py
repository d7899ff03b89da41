"""Paged attention in torch, tile by tile with an online softmax (Milakov & Gimelshein 2018).

Tiles have 16 queries and 64 keys, are aligned at position 0 and padded: every product has the same
shape, so a token's result does not depend on how its prompt was chunked. A masked key contributes
exactly 0 and rescales by exactly 1.

On a GPU in float64: the host may have let torch round float32 products there.
"""

from __future__ import annotations

from sdk.kernels.backend import Problem
from sdk.kernels.kv.pages import KVPages
from sdk.kernels.kv.tiers import page_tier
from sdk.kernels.lazy_torch import Tensor, torch
from sdk.kernels.operators.batch import AttentionBatch
from sdk.kernels.reference.page_codes import mixed, page_floats

QUERY_TILE = 16
KEY_TILE = 64


class Attention:
    """See :meth:`sdk.kernels.operators.ops.Ops.attention`."""

    name = "reference.attention"

    def reject(self, problem: Problem) -> str | None:
        return None

    def run(
        self,
        q: Tensor,
        pages: KVPages,
        batch: AttentionBatch,
        scale: float,
        window: int | None,
        softcap: float | None,
        sinks: Tensor | None,
        slopes: Tensor | None,
        out: Tensor,
        causal: bool = True,
        biases: Tensor | None = None,
        chunked: bool = False,
        ahead: Tensor | None = None,
    ) -> None:
        starts = batch.query_start.tolist()
        lengths = batch.context_len.tolist()
        wide = torch.float64 if q.is_cuda else torch.float32
        view = torch.empty(*q.shape[:2], out.shape[1] // q.shape[1], device=q.device)
        q = q.to(wide)
        for r, length in enumerate(lengths):
            width = out.shape[1] // q.shape[1]
            k, v = (x.to(wide) for x in _gather(pages, batch.page_table[r], length, width))
            first_position = length - (starts[r + 1] - starts[r])
            for begin in range(starts[r], starts[r + 1], QUERY_TILE):
                end = min(begin + QUERY_TILE, starts[r + 1])
                position = first_position + begin - starts[r]
                known = position + end - begin if causal else length
                ends = None
                if ahead is not None:
                    at = torch.arange(position, position + end - begin, device=q.device)
                    ends = (at + 1 + ahead[begin:end].clamp(min=0)).clamp(max=length)
                    known = int(ends.max())
                options = scale, window, softcap, sinks, slopes, causal, biases, chunked, ends
                view[begin:end] = _tile(q[begin:end], k, v, position, known, *options)
        mixes = pages.k_mixed if pages.latent else pages.v_mixed
        also = pages.head_dim if pages.latent else 0
        out.view(view.shape).copy_(mixed(view, also) if mixes else view)


def _gather(pages: KVPages, table: Tensor, length: int, value_dim: int) -> tuple[Tensor, Tensor]:
    """One request's keys and values, float32 ``[kv_heads, padded length, width]``."""
    count = -(-length // pages.page_size)
    padded = -(-length // KEY_TILE) * KEY_TILE
    ids = torch.tensor([page_tier(page) for page in table[:count].tolist()], device=table.device)
    shape = (count, pages.k.shape[1], pages.page_size)
    widths = pages.head_dim, value_dim
    sides = [torch.empty(*shape, width, device=table.device) for width in widths]
    for tier, part in enumerate(pages.tiers):
        here = ids[:, 0] == tier
        for x, floats in zip(sides, page_floats(part, ids[here, 1], value_dim), strict=True):
            x[here] = floats
    gathered = []
    for x in sides:
        x = x.transpose(0, 1)
        x = x.reshape(x.shape[0], -1, x.shape[3])[:, :length]
        gathered.append(torch.nn.functional.pad(x, (0, 0, 0, padded - length)))
    return gathered[0], gathered[1]


def _tile(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    position: int,
    known: int,
    scale: float,
    window: int | None,
    softcap: float | None,
    sinks: Tensor | None,
    slopes: Tensor | None,
    causal: bool,
    biases: Tensor | None,
    chunked: bool,
    ends: Tensor | None,
) -> Tensor:
    """Attention of up to 16 consecutive tokens, the first at ``position``, to the first ``known``
    tokens: ``[tokens, heads, value_dim]``. ``ends``: how many of them each token sees."""
    tokens, heads, head_dim = q.shape
    kv_heads = k.shape[0]
    group = heads // kv_heads
    q = torch.nn.functional.pad(q, (0, 0, 0, 0, 0, QUERY_TILE - tokens))
    # [kv_heads, group * 16, head_dim]: the query heads that share a key head are one product
    q = q.reshape(QUERY_TILE, kv_heads, group, head_dim).permute(1, 2, 0, 3)
    q = q.reshape(kv_heads, group * QUERY_TILE, head_dim)
    at = torch.arange(position, position + QUERY_TILE, device=q.device).repeat(group).unsqueeze(1)
    best = torch.full((kv_heads, group * QUERY_TILE, 1), float("-inf"), device=q.device)
    total = torch.zeros_like(best)
    if sinks is not None:
        best = sinks.to(torch.float32).reshape(kv_heads, group, 1, 1)
        best = best.expand(-1, -1, QUERY_TILE, -1).reshape(kv_heads, group * QUERY_TILE, 1)
        total = torch.ones_like(best)
    if slopes is not None:
        slopes = slopes.to(q.dtype).reshape(kv_heads, group, 1, 1)
        slopes = slopes.expand(-1, -1, QUERY_TILE, -1).reshape(kv_heads, group * QUERY_TILE, 1)
    result = q.new_zeros(*q.shape[:2], v.shape[2])
    for begin in range(0, known, KEY_TILE):
        keys = torch.arange(begin, begin + KEY_TILE, device=q.device)
        hidden = (keys > at) if causal else (keys >= known)
        if ends is not None:
            rows = torch.nn.functional.pad(ends, (0, QUERY_TILE - tokens)).repeat(group)
            hidden = keys >= rows.unsqueeze(1)
        if window is not None:
            far = (keys - at).abs() >= window
            hidden = hidden | ((keys < at // window * window) if chunked else far)
        score = torch.bmm(q, k[:, begin : begin + KEY_TILE].transpose(1, 2)) * scale
        if softcap is not None:
            score = torch.tanh(score / softcap) * softcap
        if slopes is not None:
            score = score + slopes * -(keys - at).abs().to(q.dtype)
        if biases is not None:
            score = score + _by_distance(biases, keys - at, kv_heads).to(q.dtype)
        score = score.masked_fill(hidden, float("-inf"))
        peak = torch.maximum(best, score.amax(dim=-1, keepdim=True))
        safe = peak.masked_fill(peak == float("-inf"), 0.0)
        weight = torch.exp(score - safe)
        shrink = torch.exp(best - safe)
        total = total * shrink + weight.sum(dim=-1, keepdim=True)
        result = result * shrink + torch.bmm(weight, v[:, begin : begin + KEY_TILE])
        best = peak
    result = (result / total).reshape(kv_heads, group, QUERY_TILE, -1)
    return result.permute(2, 0, 1, 3).reshape(QUERY_TILE, heads, -1)[:tokens]


def _by_distance(biases: Tensor, distance: Tensor, kv_heads: int) -> Tensor:
    """Biases ``[heads, 2 * reach + 1]`` of scores ``[kv_heads, group * 16, keys]``; ``distance``
    ``[group * 16, keys]``: the key's position minus the query's."""
    heads, reach = biases.shape[0], biases.shape[1] // 2
    own = torch.arange(heads, device=biases.device).view(kv_heads, -1)
    head = own.repeat_interleave(QUERY_TILE, dim=1).unsqueeze(2)
    return biases[head, distance.clamp(-reach, reach) + reach]
