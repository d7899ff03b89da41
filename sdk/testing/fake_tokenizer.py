"""A tokenizer without a file: a token is a word with the spaces before it, or a mark."""

from __future__ import annotations

import re
import threading
from collections.abc import Iterator
from typing import Any

from sdk.loaders.tokenizer.base import TextTokenizer, TokenizerFacts, well_formed
from sdk.quant.tokenizer import TooManyTokens

_SPECIAL = ("<|end|>", "<|system|>", "<|user|>", "<|assistant|>", "<|tool|>")
END = 0
_FIRST_BYTE = len(_SPECIAL)

#: Words beyond this number are encoded as bytes.
VOCAB_SIZE = 1 << 16
#: Long words are cut, so that text without spaces has more than one token.
_WORD = re.compile(r"\s*\w{1,12}|\s*[^\w\s]|\s+")
#: The token of images, for a model that reads them.
IMAGE = "<image>"
#: The config of such a model: a LLaVA 1.5 that reads 28 by 28 pixels.
IMAGE_MODEL: dict[str, Any] = {
    "model_type": "llava",
    "text_config": {"hidden_size": 1},
    "vision_config": {
        "model_type": "clip_vision_model",
        "image_size": 28,
        "patch_size": 14,
        "hidden_size": 1,
        "intermediate_size": 1,
        "num_attention_heads": 1,
        "num_hidden_layers": 2,
    },
}
_TEMPLATE = (
    "{% if tools %}<|system|>{{ tools | tojson }}<|end|>{% endif %}"
    "{% for m in messages %}<|{{ m.role }}|>{{ m.content or '' }}"
    "{% if m.tool_calls %}{{ m.tool_calls | tojson }}{% endif %}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)


class FakeTokenizer(TextTokenizer):
    """See :class:`sdk.quant.tokenizer.Tokenizer`. Words get their ids when they are first used."""

    def __init__(self, *, images: bool = False) -> None:
        image = (len(_SPECIAL) + 256,) if images else ()
        special = frozenset((*range(len(_SPECIAL)), *image))
        names = {"eos_token": _SPECIAL[END]}
        super().__init__(TokenizerFacts(None, frozenset({END}), special, _TEMPLATE, {}, names))
        self._lock = threading.Lock()
        self._texts = [text.encode() for text in _SPECIAL]
        self._texts += [bytes([byte]) for byte in range(256)]
        self._ids: dict[str, int] = {text: token_id for token_id, text in enumerate(_SPECIAL)}
        if images:
            self._ids[IMAGE] = len(self._texts)
            self._texts.append(IMAGE.encode())
        self._control = re.compile("|".join(map(re.escape, self._ids)))

    @property
    def vocab_size(self) -> int:
        return VOCAB_SIZE

    def encode(
        self,
        text: str,
        add_special_tokens: bool = True,
        parse_special: bool = True,
        *,
        stop_after: int | None = None,
    ) -> list[int]:
        text = well_formed(text)
        return self._bounded(
            self._mixed(text, None) if parse_special else self._words(text), stop_after
        )

    def encode_continued(self, text: str, *, stop_after: int | None = None) -> list[int]:
        return self.encode(text, False, False, stop_after=stop_after)

    def _encode_rendered(self, text: str, breaker: str | None, stop_after: int | None) -> list[int]:
        return self._bounded(self._mixed(well_formed(text), breaker), stop_after)

    def _bounded(self, ids: Iterator[int], stop_after: int | None) -> list[int]:
        found: list[int] = []
        for token_id in ids:
            found.append(token_id)
            if stop_after is not None and len(found) > stop_after:
                raise TooManyTokens(len(found))
        return found

    def _mixed(self, text: str, breaker: str | None) -> Iterator[int]:
        """The ids of a text with control tokens; ``breaker``: see ``_encode_rendered``."""
        end = 0
        for found in self._control.finditer(text):
            yield from self._words(_without(text[end : found.start()], breaker))
            yield self._ids[found[0]]
            end = found.end()
        yield from self._words(_without(text[end:], breaker))

    def _words(self, text: str) -> Iterator[int]:
        for found in _WORD.finditer(text):
            yield from self._word(found[0])

    def _word(self, word: str) -> list[int]:
        data = word.encode()
        if len(data) == 1:
            return [_FIRST_BYTE + data[0]]
        with self._lock:
            token_id = self._ids.get(word)
            if token_id is None and len(self._texts) < VOCAB_SIZE:
                token_id = self._ids[word] = len(self._texts)
                self._texts.append(data)
        return [_FIRST_BYTE + byte for byte in data] if token_id is None else [token_id]

    def id_to_bytes(self, token_id: int) -> bytes:
        return self._texts[token_id] if 0 <= token_id < len(self._texts) else b""

    def token_to_id(self, token: str) -> int | None:
        data = token.encode("utf-8", "replace")
        return _FIRST_BYTE + data[0] if len(data) == 1 else self._ids.get(token)

    def id_to_token(self, token_id: int) -> str | None:
        if not 0 <= token_id < len(self._texts):
            return None
        return self._texts[token_id].decode("utf-8", "replace")


def _without(text: str, breaker: str | None) -> str:
    return text if breaker is None else text.replace(breaker, "")
