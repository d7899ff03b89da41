"""The token ids behind the strings of sampling parameters, computed once per request."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import field
from typing import TYPE_CHECKING, Protocol

from sdk.api.errors import RequestError
from sdk.api.params import SamplingParams
from sdk.kernels.dataclass import dataclass

if TYPE_CHECKING:
    from sdk.sampling.healing import Healing
    from sdk.sampling.rules import Rules
    from sdk.structured.compiler import Grammar


class Vocabulary(Protocol):
    """The part of a tokenizer that resolving needs."""

    @property
    def vocab_size(self) -> int: ...
    @property
    def eos_token_ids(self) -> frozenset[int]: ...
    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]: ...
    def id_to_bytes(self, token_id: int) -> bytes: ...


@dataclass(frozen=True, slots=True)
class ResolvedParams:
    """Token ids behind the strings of :class:`~sdk.api.params.SamplingParams`."""

    #: EOS (unless ``ignore_eos``) and ``stop_token_ids``: forbidden before ``min_tokens``.
    end_ids: tuple[int, ...] = ()
    #: Each bad word as the token sequences that may spell it.
    bad_words: tuple[tuple[int, ...], ...] = ()
    #: Tokens whose text contains a DRY sequence breaker.
    dry_breakers: frozenset[int] = frozenset()
    #: The tokens that start and end thinking; both or neither.
    think_start_id: int | None = None
    think_end_id: int | None = None
    #: The compiled structure of the answer.
    grammar: Grammar | None = field(default=None, compare=False, repr=False)
    #: These and the lists of the parameters, as arrays that all answers share.
    rules: Rules | None = field(default=None, compare=False, repr=False)
    #: How the answer must begin. It depends on the prompt too, unlike the other fields.
    healing: Healing | None = field(default=None, compare=False, repr=False)


def resolve(
    params: SamplingParams,
    tokenizer: Vocabulary | None,
    vocab_size: int,
    *,
    eos_token_ids: Iterable[int] = (),
    think_start_id: int | None = None,
    think_end_id: int | None = None,
    grammar: Grammar | None = None,
) -> ResolvedParams:
    """Resolve ``params``; ``tokenizer`` is None if none was loaded. ``grammar``: the compiled
    structure of ``params``.

    :raises RequestError: a token id outside of ``[0, vocab_size)``, strings without a tokenizer,
        or a thinking budget for a model without thinking tokens.
    """
    _check_ids(params, vocab_size)
    if tokenizer is None and (params.bad_words or params.dry_multiplier):
        name = "bad_words" if params.bad_words else "dry_multiplier"
        raise RequestError(
            f"{name} needs a tokenizer, and none was loaded; load the model with tokenizer=FOLDER"
        )
    if params.thinking_token_budget is not None and (
        think_start_id is None or think_end_id is None
    ):
        raise RequestError(
            f"thinking_token_budget={params.thinking_token_budget}: this model has no tokens that "
            "start and end thinking; leave it unset"
        )
    eos = set(eos_token_ids) | (set(tokenizer.eos_token_ids) if tokenizer else set())
    ends = set(params.stop_token_ids or ()) | (set() if params.ignore_eos else eos)
    words: tuple[tuple[int, ...], ...] = ()
    breakers: frozenset[int] = frozenset()
    if tokenizer is not None:
        words = _bad_words(params.bad_words or (), tokenizer)
        if params.dry_multiplier:
            breakers = _containing(params.dry_sequence_breakers or (), tokenizer)
    from sdk.sampling.rules import Rules  # imports numpy, which plans and parameters do not need

    end_ids = tuple(sorted(ends))
    rules = Rules(params, end_ids, words)
    return ResolvedParams(end_ids, words, breakers, think_start_id, think_end_id, grammar, rules)


def _check_ids(params: SamplingParams, vocab_size: int) -> None:
    for name in ("stop_token_ids", "allowed_token_ids", "logprob_token_ids", "logit_bias"):
        highest = max(getattr(params, name) or (0,))
        if highest >= vocab_size:
            raise RequestError(f"{name} must hold ids below {vocab_size}, got {highest}")


def _bad_words(words: Iterable[str], tokenizer: Vocabulary) -> tuple[tuple[int, ...], ...]:
    """Both spellings of each word: at the start of a text and after a space."""
    found: dict[tuple[int, ...], None] = {}
    for word in words:
        for text in (word, " " + word.lstrip()):
            ids = tuple(tokenizer.encode(text, add_special_tokens=False))
            if ids:
                found[ids] = None
    return tuple(found)


def _containing(texts: Iterable[str], tokenizer: Vocabulary) -> frozenset[int]:
    needles = [text.encode() for text in texts]
    pieces = ((i, tokenizer.id_to_bytes(i)) for i in range(tokenizer.vocab_size))
    return frozenset(i for i, piece in pieces if any(needle in piece for needle in needles))
