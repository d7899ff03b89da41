"""Measures the mean key of every head, which 4-bit codes need not represent.

The keys of trained models are spread around a point far from zero, so most of a code's range would
go to the part that all keys share. Subtracting the same vector from all keys does not change
attention. SageAttention (Zhang et al. 2024) subtracts the mean of the current keys. Here a page is
written before the next key is known, so the mean is measured once, at load. KL divergence with int4
pages over 192 tokens: Gemma 3 270M 0.118 without a centre and 0.067 with one, SmolLM2 0.054 and
0.038. For int8 and fp8 the gain is below 0.001.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np

from sdk.engine.rank.kv_cache import KVCache
from sdk.kernels.kv.pages import KVPages
from sdk.kernels.lazy_torch import Tensor, torch
from sdk.kernels.operators.batch import AttentionBatch
from sdk.kernels.operators.states import LayerState, StateBatch
from sdk.models.decoder import CausalLM, Decoder
from sdk.quant.spec import KVSpec

_PAGE = 16
#: Tokens that are measured, in steps as small as any engine's; their ids are spread over the
#: vocabulary. Real text gives 0.061 instead of 0.067.
_TOKENS, _STEP, _STRIDE = 128, 16, 7919


def centre_keys(cache: KVCache, model: CausalLM) -> None:
    """Give the layers of ``cache`` whose key type is ``centred`` a centre, if attention allows it.

    On a CPU the bits are the same for any number of threads and any options of the engine. All
    ranks of a model must call it together.
    """
    spec = cache.spec
    lowest = spec.tiers[-1]
    # also if this stage has no such layer: the others need what it computes
    wanted = lowest.key_type.centred
    if not wanted or not isinstance(model, Decoder) or not model.shift_invariant:
        return
    pages = _run(model, spec)
    for i, (layer, seen) in enumerate(zip(cache.layers, pages, strict=True)):
        if isinstance(layer, KVPages) and lowest.parts(i)[0].type.centred:
            assert isinstance(seen, KVPages)
            cache.layers[i] = _with_centre(layer, _centre(seen))


def _with_centre(pages: KVPages, centre: Tensor) -> KVPages:
    """The pages with this centre, also in the lower tiers."""
    below = None if pages.next_tier is None else _with_centre(pages.next_tier, centre)
    return replace(pages, k_centre=centre, next_tier=below)


def _run(model: Decoder, spec: KVSpec) -> list[KVPages | LayerState]:
    """Float32 pages with the keys of the measured tokens, and their states."""
    exact = replace(spec, page_size=_PAGE, dtype="float32", windows=())
    device, transposed = model.ops.device, model.ops.keys_transposed
    cache = KVCache(exact, _TOKENS // _PAGE, device, num_states=2, keys_transposed=transposed)
    layers: Any = cache.layers
    has_states = any(isinstance(layer, LayerState) for layer in cache.layers)
    ids = torch.arange(1, _TOKENS + 1, device=device) * _STRIDE % model.config.vocab_size
    with torch.inference_mode():
        for begin in range(0, _TOKENS, _STEP):
            end = begin + _STEP
            positions = torch.arange(begin, end, device=device)
            batch = AttentionBatch(
                positions=positions,
                query_start=torch.tensor([0, _STEP], dtype=torch.int32, device=device),
                context_len=torch.tensor([end], dtype=torch.int32, device=device),
                page_table=torch.arange(_TOKENS // _PAGE, dtype=torch.int32, device=device)[None],
                slots=positions,
                page_size=_PAGE,
                max_query_len=_STEP,
                max_context_len=end,
                states=_states(-1 if not begin else 1, device) if has_states else None,
            )
            model(ids[begin:end], batch, layers)
    return cache.layers


def _states(initial: int, device: torch.device) -> StateBatch:
    """States go on from slot ``initial``, and to slot 1 after a step."""
    values = [initial], [0, 1], [_STEP - 1], [1]
    return StateBatch(*(torch.tensor(one, dtype=torch.int32, device=device) for one in values))


def _centre(pages: KVPages) -> Tensor:
    """The mean key of each head, float32 ``[kv_heads, head_dim]``."""
    keys = np.nan_to_num(pages.k.cpu().numpy().astype(np.float64), posinf=0.0, neginf=0.0)
    return torch.from_numpy(keys.mean(axis=(0, 2)).astype(np.float32)).to(pages.k.device)
