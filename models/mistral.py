"""Mistral: Llama with a sliding window (``config.windows``). Jiang et al., "Mistral 7B" (2023)."""

from __future__ import annotations

from sdk.models import llama


class Model(llama.Model):
    """A :class:`sdk.models.decoder.CausalLM`."""
