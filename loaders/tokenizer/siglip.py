"""SigLIP's tokenizer (``spiece.model``): a Unigram model of T5's kind over texts in lower case and
without punctuation.

transformers' SiglipTokenizer runs the sentencepiece library, and so has no ``tokenizer.json``.
"""

from __future__ import annotations

import string
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from sdk.loaders.tokenizer.sentencepiece import read_sentencepiece
from sdk.loaders.tokenizer.spm import SPACE
from sdk.quant.errors import CheckpointError

#: ``tokenizer_class`` of folders with it.
SIGLIP = "SiglipTokenizer"
_UNIGRAM = 1  # TrainerSpec.ModelType
_UNKNOWN, _CONTROL = 2, 3  # SentencePiece.Type
#: What Python's regular expressions call white space, as characters: the tokenizers library takes
#: ``\x85`` in a pattern for a byte.
_SPACES = "[\t-\r\x1c- \x85\xa0\u1680\u2000-\u200a\u2028\u2029\u202f\u205f\u3000]+"


def siglip_tokenizer(file: Path, config: Mapping[str, Any]) -> Any:
    """A ``tokenizers.Tokenizer``. ``config``: tokenizer_config.json.

    :raises CheckpointError: the file is not such a model.
    """
    from tokenizers import (
        AddedToken,
        Regex,
        Tokenizer,
        decoders,
        models,
        normalizers,
        pre_tokenizers as pre,
        processors,
    )

    model = read_sentencepiece(file)
    unknown = [number for number, kind in enumerate(model.kinds) if kind == _UNKNOWN]
    end = config.get("eos_token", "</s>")
    end = end.get("content") if isinstance(end, Mapping) else end
    if model.trainer.get(3, 1) != _UNIGRAM or len(unknown) != 1 or end not in model.tokens:
        raise CheckpointError(
            f"{file}: expected a Unigram model with one unknown piece and {str(end)[:80]!r}, found "
            f"a model of type {model.trainer.get(3, 1)} with {len(unknown)} unknown pieces"
        )
    pieces = list(zip(model.tokens, model.scores, strict=True))
    found = Tokenizer(models.Unigram(pieces, unk_id=unknown[0], byte_fallback=False))
    charsmap = model.normalizer.get(2)
    marks = "".join(f"\\{mark}" for mark in string.punctuation)
    lower = (normalizers.Lowercase(),) if config.get("do_lower_case", True) else ()
    steps = [
        *lower,
        normalizers.Replace(Regex(f"[{marks}]"), ""),
        normalizers.Replace(Regex(_SPACES), " "),
        normalizers.Replace(SPACE, " "),
        *((normalizers.Precompiled(charsmap),) if charsmap else ()),
        normalizers.Strip(),
        normalizers.Replace(Regex(" {2,}"), " "),
    ]
    found.normalizer = normalizers.Sequence(steps)
    found.pre_tokenizer = pre.Metaspace(replacement=SPACE, prepend_scheme="always", split=False)
    found.decoder = decoders.Metaspace(replacement=SPACE, prepend_scheme="always")
    place = model.tokens.index(end)
    found.post_processor = processors.TemplateProcessing(
        single=f"$A {end}", pair=f"$A {end} $B {end}", special_tokens=[(end, place)]
    )
    special = [
        token
        for token, kind in zip(model.tokens, model.kinds, strict=True)
        if kind in (_UNKNOWN, _CONTROL)
    ]
    found.add_special_tokens([AddedToken(token, normalized=False) for token in special])
    return found
