"""What the known answers of a card's operators are tried with, one case for each kind."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from sdk.engine.rank.kv_cache import KVCache
from sdk.kernels.backend import Problem
from sdk.kernels.known_answers.check import KnownAnswers
from sdk.kernels.known_answers.file import AnswerFile
from sdk.kernels.kv.pages import KVPages
from sdk.kernels.operators.head_norms import HeadNorms, QueryScale
from sdk.kernels.operators.low_rank import Shape
from sdk.kernels.operators.norm import Norm
from sdk.kernels.operators.ops import Ops
from sdk.kernels.operators.rounding import Rounding
from sdk.kernels.operators.route_rule import SOFTMAX, RouteRule
from sdk.kernels.weights.layouts import ActivationScheme
from sdk.quant.caches import AttentionCache
from sdk.quant.spec import KVSpec

MACHINE = {"card": "a card that is not here", "driver": "1"}


def card_ops() -> Ops:
    """The kernels of a card, interpreted, before the reference."""
    return Ops("cpu", num_threads=1, backends=("gpu", "reference"), activations="bfloat16")


def answers_of(ops: Ops, folder: Path | None = None) -> KnownAnswers:
    file = None if folder is None else AnswerFile(folder, MACHINE)
    ops.context.answers = KnownAnswers(ops.context, file)
    return ops.context.answers


def pages(dtype: str, head_dim: int = 64, kv_heads: int = 2, size: int = 16) -> KVPages:
    """The second of three layers' pages, as a card has them."""
    spec = KVSpec(num_layers=3, kv_heads=kv_heads, head_dim=head_dim, page_size=size, dtype=dtype)
    return KVCache(spec, 2, keys_transposed=False).layers[1]


def rows(width: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    return torch.zeros(2, width, dtype=dtype)


def heads(count: int, head_dim: int = 64, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    """Rows of a fused projection."""
    return torch.zeros(2, (count + 4) * head_dim, dtype=dtype)[:, : count * head_dim].view(
        2, count, head_dim
    )


def attention(
    dtype: str, both: bool = False, biased: bool = False, ahead: bool = False, **changed: Any
) -> tuple[str, Sequence[Any], dict[str, Any]]:
    own = pages(dtype, **changed)
    slopes = torch.zeros(4) if biased else None
    like = [heads(4, own.head_dim), own, 0.2, None, None, None, slopes, True, not both, False]
    like.append(ahead)
    return "attention", like, {"head_dim": own.head_dim, "kv_dtype": own.dtype}


def rope(
    dtype: str, norms: bool = False, more: bool = False
) -> tuple[str, Sequence[Any], dict[str, Any]]:
    """``more``: norms after the rotation, one of values, and a scale by position."""
    own, norm = pages(dtype), Norm(torch.ones(64), 1e-6)
    parts = heads(4), heads(2), heads(2)
    like = (
        *parts,
        torch.zeros(2, 32),
        own,
        HeadNorms(norm, norm, norm if more else None, more) if norms else None,
        QueryScale(0.1, 16384) if more else None,
    )
    return "rope_and_cache", like, {"head_dim": 64, "kv_dtype": own.dtype}


def latent_pages(dtype: str) -> KVPages:
    caches = (AttentionCache(1, 96, 64, latent=True),) * 3
    spec = KVSpec(3, 1, 96, 16, dtype, caches)
    return KVCache(spec, 2, keys_transposed=False).layers[1]


def latent(dtype: str, op: str) -> tuple[str, Sequence[Any], dict[str, Any]]:
    """Attention over latent pages, and their write."""
    own, q = latent_pages(dtype), heads(4, 96)
    fields = {"head_dim": 96, "value_dim": 64, "kv_dtype": own.dtype}
    if op == "attention":
        like = (q, own, 0.2, None, None, None, None, False, True, False, False)
        return op, like, {**fields, "format": "latent"}
    return op, (q, heads(1), torch.zeros(2, 16), own, QueryScale(0.1, 16384)), fields


def norm_of(*shape: int, biased: bool = False, centred: bool = False) -> Norm:
    weight = torch.ones(shape)
    return Norm(weight, 1e-5, weight.clone() if biased else None, centred)


def slots(*shape: int) -> Tensor:
    return torch.zeros(2, *shape)


def delta(
    decay: Tensor, eps: float | None = 1e-6, *, tiled: bool = False
) -> tuple[str, Sequence[Any], dict[str, Any]]:
    like = heads(2, 32), heads(2, 32), heads(4, 24), decay, slots(4, 32, 24), eps, tiled
    return "gated_delta", like, {"head_dim": 32, "format": "rows" if decay.dim() == 3 else ""}


def rwkv(first: tuple[Tensor, Tensor] | None) -> tuple[str, Sequence[Any], dict[str, Any]]:
    one, wide = heads(4, 24), slots(4, 24)
    like = one, one, one, wide, wide, first, slots(4, 24, 24)
    return "rwkv", like, {"head_dim": 24, "format": "first" * (first is not None)}


CODES = ActivationScheme("int")


F32, BF16 = torch.float32, torch.bfloat16


#: name -> operator, what it will run on, fields of its problem.
CASES: dict[str, Callable[[], tuple[str, Sequence[Any], dict[str, Any]]]] = {
    "norm": lambda: ("norm", (rows(200), norm_of(200), BF16, None), {}),
    "norm-wide": lambda: ("norm", (rows(96, F32), norm_of(96), F32, None), {}),
    "norm-heads": lambda: ("norm", (heads(3), norm_of(3, 64, centred=True), BF16, None), {}),
    "norm-unweighted": lambda: ("norm", (rows(96), Norm(None, 1e-5), BF16, None), {}),
    "add_norm": lambda: ("add_norm", (rows(200), norm_of(200), BF16, None), {}),
    "add_norm-layer": lambda: (
        "add_norm",
        (rows(200), norm_of(200, biased=True, centred=True), BF16, None),
        {},
    ),
    "add_norm-codes": lambda: (
        "add_norm",
        (rows(200), norm_of(200), BF16, Rounding(CODES, torch.int8, 256, 1)),
        {"inputs": str(CODES)},
    ),
    "gated_activation": lambda: ("gated_activation", (rows(300),), {"format": "silu"}),
    "gated_activation-gelu": lambda: ("gated_activation", (rows(300),), {"format": "gelu_tanh"}),
    "activation": lambda: ("activation", (rows(300),), {"format": "relu2"}),
    "activation-xielu": lambda: ("activation", (rows(300),), {"format": "xielu"}),
    "zeros": lambda: ("zeros", (rows(70, F32),), {}),
    "add": lambda: ("add", (rows(70),), {}),
    "add_bias": lambda: ("add_bias", (rows(70),), {}),
    "scale": lambda: ("scale", (rows(70, F32),), {}),
    "softcap": lambda: ("softcap", (rows(70, F32),), {}),
    "clamp": lambda: ("clamp", (rows(70),), {}),
    "select_rows": lambda: ("select_rows", (rows(70, F32),), {}),
    "take_columns": lambda: ("take_columns", (rows(70),), {}),
    "attention-latent": lambda: latent("float16", "attention"),
    "attention-latent-int8": lambda: latent("int8", "attention"),
    "latent_rope": lambda: latent("fp8", "latent_rope_and_cache"),
    "rope_angles": lambda: ("rope_angles", (torch.ones(32), None, None), {}),
    "rope_angles-axes": lambda: (
        "rope_angles",
        (torch.ones(32), torch.zeros(32, dtype=torch.int32), None),
        {},
    ),
    "rope_angles-shifts": lambda: (
        "rope_angles",
        (torch.ones(32), *torch.zeros(2, 32, dtype=torch.int32)),
        {},
    ),
    "place_rows": lambda: ("place_rows", (rows(70, F32),), {}),
    "find_places": lambda: ("find_places", (16,), {}),
    **{
        f"rope_and_cache-{t}": (lambda t=t: rope(t))
        for t in ("float16", "bfloat16", "int8", "fp8", "int4")
    },
    "rope_and_cache-norms": lambda: rope("float16", norms=True),
    "rope_and_cache-more": lambda: rope("bfloat16", norms=True, more=True),
    "gate": lambda: ("gate", (rows(96), rows(96)), {"format": "sigmoid"}),
    "gate-heads": lambda: ("gate", (rows(96), rows(3)), {"format": "softplus"}),
    **{
        f"attention-{t}": (lambda t=t: attention(t))
        for t in ("float32", "float16", "bfloat16", "int8", "fp8", "int4", "k8v4")
    },
    "attention-both-ways": lambda: attention("float16", both=True),
    "attention-ahead": lambda: attention("float16", ahead=True),
    "attention-biased": lambda: attention("float16", biased=True),
    "route": lambda: ("route", (rows(8, F32), 2, SOFTMAX, None), {}),
    "route-sigmoid": lambda: (
        "route",
        (rows(8, F32), 2, RouteRule("sigmoid", groups=2, scale=2.5), torch.ones(8)),
        {"format": "sigmoid bias groups"},
    ),
    "group": lambda: ("group", (torch.zeros(2, 2, dtype=torch.int32), 8), {}),
    "add_owners_bias": lambda: ("add_owners_bias", (rows(70), 8, 2), {}),
    "combine": lambda: ("combine", (rows(70), 8, 2, None, None), {}),
    "combine-gated": lambda: (
        "combine",
        (rows(70), 8, 2, rows(70, F32), rows(1, F32)),
        {"format": "gated"},
    ),
    "low_rank": lambda: ("low_rank", (Shape(4, 200, 132, 2, 16), torch.bfloat16), {}),
    "low_rank-ids": lambda: (
        "low_rank",
        (Shape(4, 50, 70, 1, 8, of_ids=True), torch.bfloat16),
        {},
    ),
    "sample": lambda: ("sample", (rows(9000, F32),), {}),
    "causal_conv": lambda: (
        "causal_conv",
        (rows(70), torch.zeros(70, 4), rows(70, F32)[0], slots(3, 70), "silu", None, None),
        {},
    ),
    "causal_conv-gated": lambda: (
        "causal_conv",
        (rows(70), torch.zeros(70, 3), None, slots(2, 70), None, rows(70), rows(70)),
        {"format": "before after"},
    ),
    "causal_conv-several": lambda: (
        "causal_conv",
        (rows(70), torch.zeros(3, 70, 2), None, slots(1, 70), None, None, None),
        {},
    ),
    "rwkv": lambda: rwkv(None),
    "rwkv-first": lambda: rwkv((heads(4, 24), slots(4, 24))),
    "gated_delta": lambda: delta(slots(4)),
    "gated_delta-rows": lambda: delta(slots(4, 32), eps=None, tiled=True),
    "ssd": lambda: (
        "ssd",
        (heads(4, 24), heads(2, 32), rows(4, F32)[0], slots(4, 24, 32)),
        {"head_dim": 32},
    ),
    "selective_scan": lambda: (
        "selective_scan",
        (rows(70), rows(16), rows(70, F32)[0], slots(70, 16)),
        {"head_dim": 16},
    ),
    "rates": lambda: (
        "rates",
        (rows(70), "softplus", rows(70, F32)[0], rows(7, F32)[0], (0.01, 8.0)),
        {"format": "softplus"},
    ),
    "rates-tanh": lambda: (
        "rates",
        (rows(70), "tanh", None, None, None),
        {"format": "tanh"},
    ),
    "rates-sigmoid": lambda: (
        "rates",
        (rows(70), "sigmoid", None, None, None),
        {"format": "sigmoid"},
    ),
    "gated_norm": lambda: (
        "gated_norm",
        (heads(3), heads(3), norm_of(64), "silu", False),
        {"format": "silu"},
    ),
    "gated_norm-first": lambda: (
        "gated_norm",
        (heads(3), heads(3), norm_of(3, 64), "silu", True),
        {"format": "silu first"},
    ),
}


def tried(ops: Ops, name: str) -> tuple[Any, str | None]:
    """The first kernel of the operator, and why it must not run."""
    op, like, about = CASES[name]()
    problem = Problem(op, **about)
    kernels = ops.context.backends[0].implementations(op)
    kernel = next(one for one in kernels if one.reject(problem) is None)
    answers = ops.context.answers
    assert answers is not None
    return kernel, answers.reason(kernel, problem, like)
