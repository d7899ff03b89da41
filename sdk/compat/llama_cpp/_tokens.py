"""What a ``Llama`` knows about tokens."""

from __future__ import annotations

from collections.abc import Sequence

from sdk import LLM
from sdk.compat.llama_cpp.llama_tokenizer import LlamaTokenizer


class LlamaTokens:
    """The methods of ``Llama`` about tokens; ``llm`` has the tokenizer."""

    llm: LLM

    def tokenizer(self) -> LlamaTokenizer:
        """The model's tokenizer."""
        return LlamaTokenizer(self)

    def tokenize(self, text: bytes, add_bos: bool = True, special: bool = False) -> list[int]:
        """The tokens of UTF-8 text; ``special=True`` reads control tokens in it."""
        return self.tokenizer().tokenize(text, add_bos, special)

    def detokenize(
        self, tokens: Sequence[int], prev_tokens: Sequence[int] | None = None, special: bool = False
    ) -> bytes:
        """The bytes of tokens, without control tokens unless ``special``."""
        return self.tokenizer().detokenize(tokens, prev_tokens, special)

    def token_eos(self) -> int:
        """The end-of-text token, or -1."""
        return _or_none(self.llm.get_tokenizer().eos_token_id)

    def token_bos(self) -> int:
        """The beginning-of-text token, or -1."""
        return _or_none(self.llm.get_tokenizer().bos_token_id)

    def token_nl(self) -> int:
        """The token of a line feed."""
        return self.tokenize(b"\n", add_bos=False)[-1]


def _or_none(token: int | None) -> int:
    return -1 if token is None else token
