"""The classification head of an encoder, as an architecture states it."""

from __future__ import annotations

from typing import NamedTuple


class HeadRules(NamedTuple):
    """The classification head of an encoder, by the names of its tensors.

    ``dense``: names of the layer before the output; of a head over tokens only if ``on_tokens``.
    ``out``: the output. ``activation`` and ``pooling`` may name a config key instead, after ``=``.
    """

    dense: tuple[str, ...]
    out: tuple[str, ...] = ("classifier",)
    activation: str = "Tanh"
    norm: tuple[str, ...] = ()
    pooling: str = "cls"
    on_tokens: bool = False
    #: llama.cpp's activation for the architecture, and the one of its files without token types.
    gguf_activation: str = "Tanh"
    gguf_untyped: str | None = None
    #: What a config may say of the pooling, first what one without the key means. "bos" is "cls";
    #: "late": the mean is that of the logits of each token.
    poolings: tuple[str, ...] = ("cls", "mean")
