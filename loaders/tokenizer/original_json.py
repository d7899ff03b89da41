"""The original tokenizer.json of a GGUF file, if there is one: it is the better source.

It may be next to the file or be stored under ``tokenizer.huggingface.json``. It is used only if its
tokens match the file's vocabulary, because a folder of downloads may hold another model's.
"""

from __future__ import annotations

import logging
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sdk.loaders.folders.folder_file import folder_file
from sdk.loaders.tokenizer.base import TokenizerFacts
from sdk.loaders.tokenizer.metadata import Metadata
from sdk.loaders.tokenizer.vocab import NORMAL, Vocabulary
from sdk.quant.errors import CheckpointError

if TYPE_CHECKING:
    from sdk.loaders.tokenizer.hf import JsonTokenizer

_LOG = logging.getLogger("sdk")
_KEY = "tokenizer.huggingface.json"
_SAMPLES = 509  # a prime, so that the sample does not follow the structure of the vocabulary


def tokenizer_json_for(
    meta: Metadata, vocabulary: Vocabulary, facts: TokenizerFacts, add_bos: bool | None
) -> JsonTokenizer | None:
    """The tokenizer of that file or key, or None (with a warning in the log if it is unusable).

    ``add_bos``: whether a text begins with BOS; None leaves it to that file.
    """
    sources: list[tuple[str, str | Path]] = []
    try:
        original = folder_file(Path(meta.file).parent, "tokenizer.json")
        if original is not None:
            sources.append((str(original), original))
    except CheckpointError as error:
        _LOG.warning("%s; not used", error)
    stored = meta.text(_KEY)
    if stored is not None:
        sources.append((f"{meta.file}: {_KEY}", stored))
    if not sources:
        return None
    from sdk.loaders.tokenizer.hf import JsonTokenizer
    from sdk.loaders.tokenizer.json_parts import load_tokenizer_json

    for where, source in sources:
        try:
            backend = load_tokenizer_json(source, where)
            if not _same_vocabulary(backend, vocabulary):
                _LOG.warning("%s has another vocabulary than %s; not used", where, meta.file)
                continue
            added = backend.get_added_tokens_decoder()
            special = facts.special_ids | {i for i, token in added.items() if token.special}
            better = replace(facts, special_ids=special, warnings=())
            return JsonTokenizer(backend, better, where, add_bos=add_bos, chat_bos=bool(add_bos))
        except CheckpointError as error:
            _LOG.warning("%s; not used", error)
    return None


def _same_vocabulary(backend: Any, vocabulary: Vocabulary) -> bool:
    count = len(vocabulary.tokens)
    size = backend.get_vocab_size(with_added_tokens=True)
    if not 0 < size <= count:
        return False
    normal = [i for i in range(0, size, max(1, size // _SAMPLES)) if vocabulary.kinds[i] == NORMAL]
    spelled = backend.id_to_token
    return bool(normal) and all(spelled(i) == vocabulary.tokens[i] for i in normal)
