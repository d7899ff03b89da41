"""How responses show single tokens: their bytes, names that are all different, and their places."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from sdk.api.logprobs import Logprobs
from sdk.text.detokenizer import IncrementalDetokenizer
from sdk.tokenizer import LLMTokenizer


class TokenNames:
    """Names of tokens: their text, or ``bytes:\\xf0\\x9f`` for a part of a character, as OpenAI
    spells it."""

    def __init__(self, tokenizer: LLMTokenizer) -> None:
        self._tokenizer = tokenizer

    def data(self, token: int) -> list[int]:
        """The bytes of a token; joined, those of an answer are its text."""
        return list(self._tokenizer.decode_bytes([token]))

    def __getitem__(self, token: int) -> str:
        data = self._tokenizer.decode_bytes([token])
        try:
            return data.decode("utf-8")
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in data)

    def best(self, row: Logprobs, chosen: int) -> dict[str, float]:
        """The entries of a row by name. The chosen token has its name for itself; of other tokens
        with the same text, the second one is called ``token_id:17``, as in vLLM."""
        taken = self[chosen]
        found: dict[str, float] = {}
        for token, entry in row.entries():
            name = self[token]
            if name in found or (name == taken and token != chosen):
                name = f"token_id:{token}"
            found[name] = entry.logprob
        return found


class Places:
    """Where the tokens of a text begin, in characters of that text.

    A token in the middle of a character begins where the character does.
    """

    def __init__(
        self,
        tokenizer: LLMTokenizer,
        start: int = 0,
        before: Sequence[int] = (),
        *,
        skip_special_tokens: bool = True,
    ) -> None:
        """``before``: the tokens before the first one, whose text has ``start`` characters."""
        self._length = start
        self._tokenizer = tokenizer
        self._detokenizer = IncrementalDetokenizer(
            tokenizer.inner, prompt_token_ids=before, skip_special_tokens=skip_special_tokens
        )

    def following(self, tokens: Iterable[int]) -> list[int]:
        """The places of the next tokens."""
        found: list[int] = []
        for token in tokens:
            waits = self._detokenizer.waits
            text = self._detokenizer.push(token)
            broken = waits and text.startswith("\ufffd") and not self._goes_on(token)
            found.append(self._length + broken)  # U+FFFD stands for the tokens before
            self._length += len(text)
        return found

    def _goes_on(self, token: int) -> bool:
        """Whether a token begins in the middle of a character."""
        return 0x80 <= next(iter(self._tokenizer.decode_bytes([token])), 0) < 0xC0


def places_in_prompt(tokenizer: LLMTokenizer, tokens: Sequence[int], text: str) -> list[int]:
    """The places of a prompt's tokens in its text, which may lack the BOS that was put before."""
    bos = tokenizer.bos_token_id
    hidden = bos is not None and tokens[:1] == [bos] and not text.startswith(_spelled(tokenizer))
    places = Places(tokenizer, skip_special_tokens=False)
    shown = places.following(tokens[1:] if hidden else tokens)
    return [0, *shown] if hidden else shown


def _spelled(tokenizer: LLMTokenizer) -> str:
    """BOS as text; a prompt that begins with it has that text."""
    bos = tokenizer.bos_token_id
    return "\0" if bos is None else tokenizer.decode([bos]) or "\0"
