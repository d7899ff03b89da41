"""Tokenizers: text <-> token ids, read from a GGUF file's metadata or a Hugging Face folder.

See ``from_gguf`` and ``from_folder``. A model needs one of them, so neither is imported here.
"""
