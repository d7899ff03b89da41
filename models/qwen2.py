"""Qwen 2 and 2.5: Llama with biases on q, k and v; the upper layers may slide."""

from __future__ import annotations

from sdk.models import llama


class Model(llama.Model):
    """A :class:`sdk.models.decoder.CausalLM`."""
