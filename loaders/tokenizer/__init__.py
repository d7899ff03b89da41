"""Tokenizers: text <-> token ids, read from a GGUF file's metadata or a Hugging Face folder."""

from __future__ import annotations

from sdk.loaders.tokenizer.from_folder import tokenizer_from_folder
from sdk.loaders.tokenizer.from_gguf import tokenizer_from_gguf

__all__ = ["tokenizer_from_folder", "tokenizer_from_gguf"]
