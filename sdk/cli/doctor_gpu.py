"""What `embedlm doctor` says of the kernels of a card, and of ``device="auto"``."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch

from sdk.api.config import EngineConfig
from sdk.engine.rank.kv_cache import KVCache
from sdk.kernels.errors import KernelError
from sdk.kernels.known_answers.check import known
from sdk.kernels.operators.low_rank import Shape
from sdk.kernels.operators.norm import Norm
from sdk.kernels.operators.ops import Ops
from sdk.kernels.operators.route_rule import SOFTMAX
from sdk.kernels.operators.state_ops import RATES
from sdk.loading.device import answers_folder, card_for
from sdk.quant.caches import AttentionCache
from sdk.quant.spec import KVSpec

#: Types of pages that are checked.
PAGES = ("float16", "int8", "fp8", "int4")
#: Widths of a small model: features, heads, heads of keys, dimensions of a head, vocabulary.
_WIDTH, _HEADS, _KV_HEADS, _HEAD_DIM, _VOCAB = 2048, 32, 8, 64, 32000


def what_is_known(device: str) -> tuple[str, bool]:
    """Known answers of a card in words, and whether they are fine."""
    answers = known(answers_folder(), torch.device(device)).values()
    wrong = [answer.reason for answer in answers if answer.reason]
    if wrong:
        return f"{len(wrong)} of {len(answers)} kernels must not run: {wrong[0]}", False
    if not answers:
        return "not checked yet: the first load does it, or `embedlm doctor --check-gpu`", True
    return f"{len(answers)} kernels right", True


def what_auto_takes() -> str:
    """Of ``device="auto"``, for options that rule nothing out."""
    asked, device = card_for(EngineConfig(model="a model"))
    if asked is None:
        return f"device='auto' takes the CPU: {device.reason}"
    return "device='auto' takes it if the model fits and all its kernels are right, else the CPU"


def check(device: str) -> Iterator[str]:
    """Check the operators of a usual decoder; yields each one that is wrong, with the reason."""
    from sdk.kernels.gpu import matrix_type

    dtype = str(matrix_type(device)).removeprefix("torch.")
    ops = Ops(device, num_threads=1, activations=dtype)
    try:
        with ops.entered(), torch.inference_mode():
            ops.check_answers(answers_folder())
            for op, like, fields in usual(ops):
                try:
                    ops.context.kernel(op, like, **fields)
                except KernelError as error:
                    yield str(error)
            answers = ops.context.answers
            assert answers is not None
            yield from answers.failures()
    finally:
        ops.close()


def usual(ops: Ops) -> Iterator[tuple[str, Sequence[Any], dict[str, Any]]]:
    """Operators of a llama, an encoder and a mixture of experts: name, what it runs on, its
    problem."""
    short, device = ops.activations, ops.device

    def rows(width: int, dtype: torch.dtype = short) -> torch.Tensor:
        return torch.zeros(2, width, dtype=dtype, device=device)

    weight = torch.ones(_WIDTH, device=device)
    wide = torch.float32
    for norm in (Norm(weight, 1e-5), Norm(weight, 1e-5, weight, centred=True)):
        for op in ("norm", "add_norm"):
            yield op, (rows(_WIDTH, wide), norm, short, None), {"format": norm.form}
    for kind in ("silu", "gelu_tanh"):
        yield "gated_activation", (rows(4 * _WIDTH),), {"format": kind}
    for kind in ("gelu_tanh", "relu2"):
        yield "activation", (rows(4 * _WIDTH),), {"format": kind}
    for op in (
        "zeros",
        "add",
        "add_bias",
        "scale",
        "softcap",
        "clamp",
        "select_rows",
        "take_columns",
    ):
        yield op, (rows(_WIDTH, wide),), {}
    yield "gate", (rows(_WIDTH), rows(_WIDTH)), {"format": "sigmoid"}
    yield "rope_angles", (torch.ones(_HEAD_DIM // 2, device=device), None, None), {}
    yield "place_rows", (rows(_WIDTH, wide),), {}
    yield "find_places", (16,), {}
    fused = rows((_HEADS + 2 * _KV_HEADS) * _HEAD_DIM).view(2, -1, _HEAD_DIM)
    q, k, v = fused.split_with_sizes([_HEADS, _KV_HEADS, _KV_HEADS], dim=1)
    cos = torch.zeros(2, _HEAD_DIM // 2, device=device)
    for name in PAGES:
        spec = KVSpec(
            num_layers=2, kv_heads=_KV_HEADS, head_dim=_HEAD_DIM, page_size=16, dtype=name
        )
        pages = KVCache(spec, 2, device, keys_transposed=ops.keys_transposed).pages[0]
        fields = {"head_dim": _HEAD_DIM, "kv_dtype": pages.dtype}
        yield "rope_and_cache", (q, k, v, cos, pages, None, None), fields
        more = (None, None, None, None, ops.shares_keys)  # window, softcap, sinks, slopes
        yield "attention", (q, pages, 0.125, *more, True, False, False), fields
        if name == "float16":
            both, ahead = (*more, False, False, False), (*more, True, False, True)
            yield "attention", (q, pages, 0.125, *both), fields | {"format": "both ways"}
            yield "attention", (q, pages, 0.125, *ahead), fields | {"format": "ahead"}
    yield from _latent(ops)
    yield "route", (rows(64, wide), 4, SOFTMAX, None), {"format": SOFTMAX.gate}
    yield "group", (torch.zeros(2, 4, dtype=torch.int32, device=device), 64), {}
    yield "add_owners_bias", (rows(_WIDTH), 64, 4), {}
    yield "combine", (rows(_WIDTH), 64, 4, None, None), {}
    factors = torch.float16 if short == wide else short
    yield "low_rank", (Shape(4, _WIDTH, _WIDTH, 2, 16), factors), {}
    yield "sample", (rows(_VOCAB, wide),), {}
    yield from _recurrent(ops)


def _latent(ops: Ops) -> Iterator[tuple[str, Sequence[Any], dict[str, Any]]]:
    """The same of latent attention with DeepSeek's widths."""
    key, values = 576, 512
    cache = AttentionCache(1, key, values, latent=True)
    spec = KVSpec(1, 1, key, 16, "float16", (cache,))
    pages = KVCache(spec, 2, ops.device, keys_transposed=ops.keys_transposed).pages[0]
    q = torch.zeros(2, 16, key, dtype=ops.activations, device=ops.device)
    latent, cos = q[:, :1, :values], torch.zeros(2, (key - values) // 2, device=ops.device)
    fields = {"head_dim": key, "value_dim": values, "kv_dtype": pages.dtype}
    yield "latent_rope_and_cache", (q, latent, cos, pages, None), fields
    more = (None, None, None, None, ops.shares_keys, True, False, False)
    yield "attention", (q, pages, 0.125, *more), fields | {"format": "latent"}


def _recurrent(ops: Ops) -> Iterator[tuple[str, Sequence[Any], dict[str, Any]]]:
    """The same of hybrids: a delta net beside a Mamba-2; of a Mamba-1 and an RWKV-7."""

    def heads(count: int, width: int, dtype: torch.dtype = ops.activations) -> torch.Tensor:
        return torch.zeros(2, count, width, dtype=dtype, device=ops.device)

    wide = torch.float32
    x, keys, few = heads(1, _WIDTH).view(2, -1), heads(4, 128), heads(8, 64)
    weight, tail = heads(_WIDTH // 2, 4, wide).view(-1, 4), heads(3, _WIDTH, wide)
    yield "causal_conv", (x, weight, weight[:, 0], tail, "silu", None, None), {}
    yield (
        "causal_conv",
        (x, weight[:, :3], None, tail[:, :2], None, x, x),
        {"format": "before after"},
    )
    state = heads(4 * 128, 128, wide).view(2, 4, 128, 128)
    for decay, form in ((heads(1, 4, wide)[:, 0], ""), (heads(4, 128, wide), "rows")):
        like = (keys, keys, keys, decay, state, 1e-6, False)
        yield "gated_delta", like, {"head_dim": 128, "format": form}
    several, shifted = heads(6 * 64, 2, wide)[0].view(6, 64, 2), heads(1, 64, wide)
    yield "causal_conv", (x[:, :64], several, None, shifted, None, None, None), {}
    small, rates = heads(4, 64), heads(4, 64, wide)
    state = heads(4 * 64, 64, wide).view(2, 4, 64, 64)
    for earlier, form in ((None, ""), ((small, rates), "first")):
        given = (small, small, small, rates, rates, earlier, state)
        yield "rwkv", given, {"head_dim": 64, "format": form}
    state = heads(8 * 64, 128, wide).view(2, 8, 64, 128)
    yield "ssd", (few, keys[:, :1], weight[:8, 0], state), {"head_dim": 128}
    channels = heads(64, 16, wide)
    yield (
        "selective_scan",
        (few.view(2, -1)[:, :64], few[:, 0, :16], weight[:64, 0], channels),
        {"head_dim": 16},
    )
    rate = x[:, :64]
    for kind in RATES:
        yield "rates", (rate, kind, weight[:64, 0], weight[:8, 0], None), {"format": kind}
    norm = Norm(weight.view(-1)[:128], 1e-6)
    for first, form in ((False, "silu"), (True, "silu first")):
        yield "gated_norm", (keys, keys, norm, "silu", first), {"format": form}
