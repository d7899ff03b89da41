"""Tokenizers: text <-> token ids, read from a GGUF file's metadata or a Hugging Face folder.

The two are ``from_gguf`` and ``from_folder``; a model needs one, so neither is imported here.
"""
