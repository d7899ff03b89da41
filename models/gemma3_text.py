"""Gemma 3, the text part: Gemma 2 with q/k norms and two rotary embeddings, no soft caps.

Five of six layers slide and turn with a base of 10,000, every sixth sees everything and turns with
1,000,000. "Gemma 3 Technical Report" (2025); transformers' modeling_gemma3.py.
"""

from __future__ import annotations

from sdk.models.decoder import Decoder, HeadNormAttention
from sdk.models.gemma2 import Gemma2Layer


class Gemma3Attention(HeadNormAttention):
    plus_one = True


class Gemma3Layer(Gemma2Layer):
    attention_type = Gemma3Attention


class Model(Decoder):
    """A :class:`sdk.models.decoder.CausalLM`."""

    layer = Gemma3Layer
    norm_plus_one = True
