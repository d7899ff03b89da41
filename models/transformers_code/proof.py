"""Runs a model of transformers' code on a few tokens before anybody else does.

Every layer must attend through our pages, and a recorded step must give what the same step gives
operation by operation. What was noted then is compared with what is noted for the engine's step.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor

from sdk.kernels.errors import CaptureError
from sdk.kernels.kv.kv_types import KV_TYPES
from sdk.kernels.kv.pages import KVPages
from sdk.kernels.operators.batch import AttentionBatch
from sdk.kernels.operators.ops import Ops
from sdk.models.configs.config import ModelConfig
from sdk.quant.errors import UnsupportedError

#: Tokens of the recorded step: no size of a model, so that none is taken for it.
_MOST = 11
#: Steps that are compared: one token, several, all.
_STEPS = (1, 4, _MOST)
#: Of logits. The same operations run in both; a sum may be in another order.
_TOLERANCE = 1e-4


class Proven(Protocol):
    """What is run: :class:`sdk.models.transformers_code.backend.HFModel`."""

    config: ModelConfig

    @property
    def ops(self) -> Ops: ...

    @property
    def layers_run(self) -> int: ...

    def __call__(self, inputs: Tensor, batch: AttentionBatch, kv: Sequence[KVPages]) -> Tensor: ...

    def logits(self, hidden: Tensor) -> Tensor: ...


class _Step:
    """A step of one request on pages of one token each."""

    def __init__(self, model: Proven, tokens: int) -> None:
        c, device = model.config, model.ops.device
        shape = (_MOST, c.num_kv_heads, 1, c.head_dim)
        kind = KV_TYPES["float32"]
        self.pages: Sequence[KVPages] = [
            KVPages(
                torch.zeros(shape, device=device), torch.zeros(shape, device=device), kind, kind
            )
            for _ in range(c.num_layers)
        ]
        self.ids = (torch.arange(tokens, device=device) * 7 + 3) % c.vocab_size
        self.last = torch.tensor([tokens - 1], device=device)
        positions = torch.arange(tokens, device=device)
        ends = [0, tokens]
        self.batch = AttentionBatch(
            positions,
            torch.tensor(ends, dtype=torch.int32, device=device),
            torch.tensor(ends[1:], dtype=torch.int32, device=device),
            torch.arange(_MOST, dtype=torch.int32, device=device)[None],
            positions.clone(),
            1,
            tokens,
            tokens,
        )

    def shorten(self, tokens: int) -> None:
        """Let the buffers say that the request has this many tokens."""
        self.batch.query_start[1] = self.batch.context_len[0] = tokens
        self.last[0] = tokens - 1

    def run(self, model: Proven) -> Tensor:
        """The logits of the last token."""
        hidden = model(self.ids, self.batch, self.pages)
        return model.logits(model.ops.select_rows(hidden, self.last))


def prove_attention(model: Proven) -> None:
    """Check that every layer attends through the pages.

    :raises UnsupportedError: one does not, or transformers' code fails on our tensors.
    """
    c = model.config
    try:
        _Step(model, 1).run(model)
    except (AttributeError, LookupError, TypeError, ValueError, RuntimeError) as error:
        raise UnsupportedError(
            f"model_type {c.model_type!r}: transformers' code fails on our pages: {error}"
        ) from error
    if model.layers_run != c.num_layers:
        raise UnsupportedError(
            f"model_type {c.model_type!r}: expected {c.num_layers} layers to attend through "
            f"the pages, found {model.layers_run}: its attention cannot be replaced"
        )


def unrecorded_reason(model: Proven) -> str | None:
    """Record a step and compare it with the same steps, operation by operation.

    Returns why the model's steps cannot be recorded; ``None`` if they can.
    """
    recorded = _Step(model, _MOST)
    with torch.inference_mode():
        try:
            graph = model.ops.recording.capture(
                lambda: recorded.run(model), tokens=_MOST, outputs=1, requests=1
            )
        except CaptureError as error:
            return str(error)
        for tokens in _STEPS:
            expected = _Step(model, tokens).run(model)
            recorded.shorten(tokens)
            graph.replay(tokens=tokens, outputs=1, requests=1)
            wrong = float((graph.result - expected).abs().max())
            if not wrong <= _TOLERANCE * float(expected.abs().max()):
                return (
                    f"model_type {model.config.model_type!r}: a recorded step of {tokens} tokens "
                    f"gives other logits, by {wrong:.2g}"
                )
    return None
