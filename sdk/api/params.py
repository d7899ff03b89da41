"""``SamplingParams``: the parameters of one request, checked when they are constructed.

Names and defaults are those of vLLM, with three deliberate differences: ``max_tokens=None`` means
"up to the end of the context" (not 16), ``temperature`` is used as it is however small (only 0 is
greedy), and llama.cpp's samplers (typical, DRY, XTC, mirostat) are ordinary parameters. A value out
of range raises :class:`~sdk.api.errors.RequestError` with the parameter, the value and the allowed
range; an unknown keyword raises ``TypeError`` with the closest known one.
"""

from __future__ import annotations

import enum
import inspect
import itertools
import math
import operator
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from sdk.api.errors import RequestError, SdkError
from sdk.api.stop_regex import MAX_PATTERN_LEN, StopRegex
from sdk.api.structured_params import StructuredOutputsParams, structure_of
from sdk.kernels.dataclass import dataclass
from sdk.quant.safe_repr import is_value_error, lone_surrogate, safe_message, safe_repr

#: Limits, so that one request cannot exhaust the process. Error messages name them.
MAX_N = 64
MAX_LOGPROBS = 1024  # more than this: -1, the whole vocabulary
MAX_TOKEN_ID = 2**31 - 1
MAX_STOP_STRINGS = 64
MAX_STOP_LENGTH = 1024
MAX_TOKEN_LIST = 4096  # stop_token_ids, logprob_token_ids, logit_bias
MAX_ALLOWED_IDS = 2**20
MAX_BAD_WORDS = 1024
MAX_BAD_WORD_LENGTH = 256
MAX_BANNED_STRINGS = 1024
MAX_BANNED_LENGTH = 256
MAX_BANNED_CHARACTERS = 2**16  # of all strings together: 15 MB while the request runs
MAX_PROCESSORS = 16
MAX_TENANT_LENGTH = 256
_INT31 = 2**31 - 1

#: ``(output_token_ids, logits_row [V] float32) -> logits_row``, called for every sampled position.
LogitsProcessor = Callable[[Sequence[int], Any], Any]


class RequestOutputKind(enum.Enum):
    """What a stream yields: all text so far each time, only new text, or only the last output."""

    CUMULATIVE = 0
    DELTA = 1
    FINAL_ONLY = 2


@dataclass(frozen=True)
class _Range:
    """Allowed numbers of one field; ``open_low`` excludes ``low`` itself."""

    low: float
    high: float
    open_low: bool = False
    optional: bool = False  # None allowed
    also: tuple[float, ...] = ()  # special values outside the range

    def __contains__(self, value: float) -> bool:
        if value in self.also:
            return True
        return (self.low < value if self.open_low else self.low <= value) and value <= self.high

    def __str__(self) -> str:
        text = f"in {'(' if self.open_low else '['}{self.low}, {self.high}]"
        if self.low == self.high:
            text = f"equal to {self.low}"
        text += "".join(f" or {value}" for value in self.also)
        return text + (" or None" if self.optional else "")


_INTEGERS = {
    "n": _Range(1, MAX_N),
    "best_of": _Range(1, MAX_N, optional=True),
    "top_k": _Range(1, _INT31, also=(0, -1)),
    "seed": _Range(-(2**63), 2**64 - 1, optional=True),
    "max_tokens": _Range(1, _INT31, optional=True),
    "min_tokens": _Range(0, _INT31),
    "logprobs": _Range(0, MAX_LOGPROBS, optional=True, also=(-1,)),
    "prompt_logprobs": _Range(0, MAX_LOGPROBS, optional=True, also=(-1,)),
    "truncate_prompt_tokens": _Range(1, _INT31, optional=True, also=(-1,)),
    "dry_allowed_length": _Range(0, _INT31),
    "dry_penalty_last_n": _Range(0, _INT31, also=(-1,)),
    "mirostat_mode": _Range(0, 0, also=(2,)),
    "no_repeat_ngram_size": _Range(0, 1024),
    "thinking_token_budget": _Range(0, _INT31, optional=True),
    "priority": _Range(-(2**31), _INT31),
    "kv_min_bits": _Range(4, 4, optional=True, also=(8, 16)),
}
_FLOATS = {
    "presence_penalty": _Range(-2, 2),
    "frequency_penalty": _Range(-2, 2),
    "repetition_penalty": _Range(0.01, 100),
    "temperature": _Range(0, 1e6),
    "top_p": _Range(0, 1, open_low=True),
    "min_p": _Range(0, 1),
    "typical_p": _Range(0, 1, open_low=True),
    "dry_multiplier": _Range(0, 100),
    "dry_base": _Range(1, 100),
    "xtc_probability": _Range(0, 1),
    "xtc_threshold": _Range(0, 1),
    "mirostat_tau": _Range(0, 100),
    "mirostat_eta": _Range(0, 1),
    "deadline": _Range(0, 1e9, open_low=True, optional=True),
    "guidance_scale": _Range(0, 1e3),
}
_TOKEN_ID = _Range(0, MAX_TOKEN_ID)
_BOOLEANS = (
    "ignore_eos",
    "token_healing",
    "detokenize",
    "skip_special_tokens",
    "spaces_between_special_tokens",
    "include_stop_str_in_output",
)
_TOKEN_LISTS = {
    "stop_token_ids": MAX_TOKEN_LIST,
    "logprob_token_ids": MAX_TOKEN_LIST,
    "allowed_token_ids": MAX_ALLOWED_IDS,
}
_STRING_LISTS = {
    "stop": (MAX_STOP_STRINGS, MAX_STOP_LENGTH),
    "bad_words": (MAX_BAD_WORDS, MAX_BAD_WORD_LENGTH),
    "banned_strings": (MAX_BANNED_STRINGS, MAX_BANNED_LENGTH),
    "dry_sequence_breakers": (MAX_STOP_STRINGS, MAX_STOP_LENGTH),
}


@dataclass(frozen=True, kw_only=True)
class SamplingParams:
    """How one request is sampled, when it stops, what it returns. :meth:`clone` changes a copy.

    **Answers.** Generates ``best_of`` answers (``None``: ``n``) and returns the best ``n``.

    **Logits.** ``repetition_penalty`` counts prompt and output, ``presence_penalty`` and
    ``frequency_penalty`` only the output. ``logit_bias`` maps token ids to addends in [-100, 100].
    ``allowed_token_ids`` forbids all other ids; ``bad_words`` are never completed; ``min_tokens``
    forbids EOS and ``stop_token_ids`` before that many tokens. ``no_repeat_ngram_size``
    forbids repeating an n-gram of that size; ``dry_*`` penalizes continuing a repetition.
    ``logits_processors`` are called as ``f(output_token_ids, logits_row) -> logits_row``, with a
    float32 tensor of torch; an exception in one fails only this request. One that keeps something
    for each answer has a method ``for_answer(prompt_token_ids)``, which returns the function.
    ``thinking_token_budget`` forces the end of thinking.

    ``banned_strings`` never appear in the text, however tokens split them: the answer goes back to
    the token in which the string began, which is forbidden there. Text that may be the beginning
    of one is held back.

    ``token_healing`` takes the last tokens of the prompt away if longer tokens begin with their
    text, and the answer must begin with that text; ``text`` does not repeat it.

    **Guidance.** With a ``guidance_scale`` other than 1 the answer also continues a negative
    prompt (the prompt dict's ``negative_prompt``; default: the prompt's last token), and before
    all changes above ``log p = log p_negative + guidance_scale * (log p_own - log p_negative)``,
    up to a constant (classifier-free guidance, arXiv 2306.17806). This doubles the work and the
    KV pages, and takes two of ``max_num_seqs``.

    **Choice.** ``temperature`` 0 is greedy. ``top_k`` 0 and -1, ``top_p`` 1, ``min_p`` 0,
    ``typical_p`` 1, ``xtc_probability`` 0 and ``mirostat_mode`` 0 are off; ``mirostat_mode=2``
    replaces the other truncations. ``seed`` (-1 is ``None``) makes the answer repeatable whatever
    else is in the batch.

    **Stopping.** ``stop`` (one or more strings), ``stop_token_ids``, ``stop_regex``, ``max_tokens``
    (``None``: to the end of the context), EOS unless ``ignore_eos``, ``deadline`` in seconds after
    arrival (finish reason ``"deadline"``; the partial answer is returned).

    **Scheduling.** ``tenant``: who the request is for, a name of 1 to 256 characters; requests
    without one are one tenant together. ``priority``: smaller runs first, under the policy
    ``"priority"``.

    **Memory.** ``kv_min_bits`` 16, 8 or 4: the fewest bits of its keys and values under a
    ``kv_policy``.

    **Returned.** ``logprobs=k`` returns the k best tokens and the chosen one, ``prompt_logprobs``
    the same for the prompt; -1 means the whole vocabulary, ``logprob_token_ids`` adds given ids.
    They are natural logarithms of the model's own distribution, before any of the changes above
    except guidance. ``truncate_prompt_tokens`` keeps the last tokens of a prompt: that many, or
    with -1 as many as leave room for ``max_tokens`` (``None``: for a quarter of the context);
    conversations lose whole turns.

    **Structure.** ``structured_outputs`` (:class:`StructuredOutputsParams`, or a dict of its
    fields): the answer follows a JSON schema, a regular expression, a grammar or one of some
    choices. It is complete even if ``max_tokens`` is small; a request whose shortest answer is
    longer is rejected. It ends where the structure is complete, whatever ``min_tokens`` and
    ``ignore_eos`` say. ``guided_decoding`` is its older name.
    """

    n: int = 1
    best_of: int | None = None
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    typical_p: float = 1.0
    seed: int | None = None
    stop: str | Sequence[str] | None = ()
    stop_token_ids: Sequence[int] | None = ()
    stop_regex: str | None = None
    ignore_eos: bool = False
    max_tokens: int | None = None
    min_tokens: int = 0
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    logprob_token_ids: Sequence[int] | None = None
    token_healing: bool = False
    detokenize: bool = True
    skip_special_tokens: bool = True
    spaces_between_special_tokens: bool = True
    include_stop_str_in_output: bool = False
    truncate_prompt_tokens: int | None = None
    output_kind: RequestOutputKind = RequestOutputKind.CUMULATIVE
    structured_outputs: StructuredOutputsParams | Mapping[str, Any] | None = None
    guided_decoding: StructuredOutputsParams | Mapping[str, Any] | None = None
    logit_bias: Mapping[int, float] | None = None
    allowed_token_ids: Sequence[int] | None = None
    bad_words: Sequence[str] | None = ()
    banned_strings: Sequence[str] | None = ()
    logits_processors: Sequence[LogitsProcessor] | None = ()
    dry_multiplier: float = 0.0
    dry_base: float = 1.75
    dry_allowed_length: int = 2
    dry_penalty_last_n: int = -1
    dry_sequence_breakers: Sequence[str] | None = ("\n", ":", '"', "*")
    xtc_probability: float = 0.0
    xtc_threshold: float = 0.1
    mirostat_mode: int = 0
    mirostat_tau: float = 5.0
    mirostat_eta: float = 0.1
    no_repeat_ngram_size: int = 0
    guidance_scale: float = 1.0
    thinking_token_budget: int | None = None
    priority: int = 0
    tenant: str | None = None
    deadline: float | None = None
    kv_min_bits: int | None = None
    extra_args: Mapping[str, Any] | None = None

    def __new__(cls, *args: Any, **kwargs: Any) -> SamplingParams:
        """Reject unknown keywords and name the closest known one, unlike a plain dataclass."""
        known = cls.__dataclass_fields__
        if args and not kwargs.keys() & known.keys():
            raise TypeError(
                "SamplingParams takes keywords only, such as SamplingParams(max_tokens=64, "
                f"temperature=0); found {safe_repr(args[0])}"
            )
        for name in kwargs:
            if name not in known:
                from sdk.api.near_misses import unknown_parameter

                raise unknown_parameter(name, known)
        return object.__new__(cls)

    def __post_init__(self) -> None:
        self._checked(_CHECKS)

    def _checked(self, names: Iterable[str]) -> None:
        """Check the fields ``names``, and those that depend on each other."""
        try:
            for name in names:
                object.__setattr__(self, name, _CHECKS[name](name, getattr(self, name)))
            self._check_together()
        except SdkError:
            raise
        except Exception as error:
            if not is_value_error(error):
                raise
            raise RequestError(
                f"a sampling parameter cannot be read: {safe_message(error)}"
            ) from error

    def _check_together(self) -> None:
        """Check fields that depend on each other."""
        if self.best_of is not None and self.best_of < self.n:
            raise _invalid("best_of", self.best_of, f"[n, {MAX_N}] with n = {self.n}")
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise _invalid("min_tokens", self.min_tokens, f"[0, max_tokens = {self.max_tokens}]")
        if self.structured_outputs is not None and self.guided_decoding is not None:
            raise RequestError(
                "guided_decoding is the older name of structured_outputs; pass one of them"
            )
        if self.structure is not None and self.token_healing:
            raise RequestError(
                "token_healing cannot be combined with structured_outputs: the first would begin "
                "the answer with the end of the prompt; pass one of them"
            )
        if not self.detokenize and (self.stop or self.stop_regex or self.banned_strings):
            allowed = "True when stop, stop_regex or banned_strings is given"
            raise _invalid("detokenize", False, allowed)

    def __getstate__(self) -> dict[str, object]:
        """What differs from the defaults, which the class has: each rank and replica gets 60 bytes
        for a request instead of 1,100.
        """
        kind = type(self)
        return {k: v for k, v in self.__dict__.items() if v is not getattr(kind, k, self)}

    @property
    def greedy(self) -> bool:
        """Whether the best token is always taken, without random numbers."""
        return self.temperature == 0.0

    @property
    def structure(self) -> StructuredOutputsParams | None:
        """The structure that the answer must have."""
        found = self.structured_outputs or self.guided_decoding
        assert found is None or isinstance(found, StructuredOutputsParams)
        return found

    @property
    def num_answers(self) -> int:
        """The number of answers to generate (``best_of``, or ``n``)."""
        return self.n if self.best_of is None else self.best_of

    def clone(self, **changes: Any) -> SamplingParams:
        """A copy with ``changes`` applied and checked.

        Other fields are shared and not checked again: checking a million ``allowed_token_ids``
        took 0.3 s for each of ``n`` answers.
        """
        copy = SamplingParams.__new__(SamplingParams, **changes)
        copy.__dict__.update(self.__dict__)
        copy.__dict__.update(changes)
        copy._checked(changes)
        return copy

    def with_seed(self, seed: int) -> SamplingParams:
        """These parameters if they have a seed, else a copy with ``seed`` modulo 2**64."""
        return self if self.seed is not None else self.clone(seed=seed & (2**64 - 1))

    @classmethod
    def from_optional(cls, **values: Any) -> SamplingParams:
        """Construct from optional values: ``None`` means the default.

        String keys of ``logit_bias``, which JSON produces, become token ids again.
        """
        given = {name: value for name, value in values.items() if value is not None}
        bias = given.get("logit_bias")
        if isinstance(bias, Mapping):
            given["logit_bias"] = {
                int(key) if isinstance(key, str) and _is_id(key) else key: value
                for key, value in bias.items()
            }
        return cls(**given)


def _is_id(key: str) -> bool:
    """Whether a string is a token id. (Python rejects integers of more than 4,300 digits.)"""
    return key.isdecimal() and len(key) <= len(str(MAX_TOKEN_ID))


def _fields_shown() -> inspect.Signature:
    """The signature of the fields; ``inspect`` would find ``__new__(*args, **kwargs)``."""
    made = inspect.signature(SamplingParams.__init__)
    own = [p for p in made.parameters.values() if p.name != "self"]
    return made.replace(parameters=own, return_annotation=inspect.Signature.empty)


SamplingParams.__signature__ = _fields_shown()  # type: ignore[attr-defined]


def _invalid(name: str, value: object, allowed: str) -> RequestError:
    return RequestError(f"{name} must be {allowed}, got {safe_repr(value)}")


def _to_float(value: Any) -> float:
    if isinstance(value, str | bytes):  # float("0.5") would work
        raise TypeError
    return float(value)


def _exact(value: Any) -> int:
    """A plain integer: a subclass could compare differently."""
    return int.__pos__(operator.index(value))


def _number(name: str, value: Any, allowed: _Range, convert: Callable[[Any], Any]) -> Any:
    if value is None and allowed.optional:
        return None
    kind = "an integer" if convert is _exact else "a number"
    try:
        if isinstance(value, bool):
            raise TypeError
        number = convert(value)
    except Exception as error:
        if not is_value_error(error):
            raise
        raise _invalid(name, value, f"{kind} {allowed}") from None
    if number not in allowed or not math.isfinite(number):
        raise _invalid(name, value, f"{kind} {allowed}")
    return number


def _integer(name: str, value: Any) -> int | None:
    number: int | None = _number(name, value, _INTEGERS[name], _exact)
    return None if name == "seed" and number == -1 else number  # vLLM's spelling of "no seed"


def _float(name: str, value: Any) -> float | None:
    number: float | None = _number(name, value, _FLOATS[name], _to_float)
    return number


def _boolean(name: str, value: Any) -> bool:
    if not isinstance(value, bool):
        raise _invalid(name, value, "True or False")
    return value


def _output_kind(name: str, value: Any) -> RequestOutputKind:
    if not isinstance(value, RequestOutputKind):
        raise _invalid(name, value, "a RequestOutputKind")
    return value


def _items(name: str, values: Any, what: str, limit: int) -> tuple[Any, ...]:
    """All items; reads at most one more than ``limit``, however many there are."""
    try:
        items = tuple(itertools.islice(values, limit + 1))
    except Exception as error:
        if not is_value_error(error):
            raise
        raise _invalid(name, values, f"a list of {what}") from None
    if len(items) > limit:
        raise RequestError(f"{name} must hold at most {limit} {what}, got more")
    return items


def _sequence(name: str, value: Any, what: str, limit: int) -> tuple[Any, ...]:
    if isinstance(value, str | bytes | Mapping):
        raise _invalid(name, value, f"a list of {what}")
    return _items(name, value, what, limit)


def _token_id(name: str, value: Any) -> int:
    return int(_number(name, value, _TOKEN_ID, _exact))


def _token_ids(name: str, value: Any) -> tuple[int, ...] | None:
    if value is None:
        return () if name == "stop_token_ids" else None
    items = _sequence(name, value, "token ids", _TOKEN_LISTS[name])
    if name == "allowed_token_ids" and not items:
        raise _invalid(name, [], "None or at least one token id")
    # Plain integers are checked all at once: one by one a million of them take 0.3 s.
    if set(map(type, items)) == {int} and min(items) >= 0 and max(items) <= MAX_TOKEN_ID:
        return items
    return tuple(_token_id(name, item) for item in items)


def _strings(name: str, value: Any) -> tuple[str, ...]:
    if value is None:
        return ()
    if isinstance(value, str) and name == "stop":
        value = (value,)
    count, length = _STRING_LISTS[name]
    items = _sequence(name, value, "strings", count)
    if not all(isinstance(item, str) for item in items):
        wrong = next(item for item in items if not isinstance(item, str))
        raise _invalid(name, wrong, "a list of non-empty strings")
    texts = tuple(str.__str__(item) for item in items)  # plain strings, not subclasses
    for text in texts:
        if not text:
            raise _invalid(name, text, "a list of non-empty strings")
        if len(text) > length:
            raise RequestError(f"{name}: a string has at most {length} characters, got {len(text)}")
        if (half := lone_surrogate(text)) is not None:
            raise RequestError(f"{name}: expected Unicode text, found the lone surrogate {half}")
    if name == "banned_strings" and (total := sum(map(len, texts))) > MAX_BANNED_CHARACTERS:
        raise RequestError(
            f"{name}: expected at most {MAX_BANNED_CHARACTERS} characters in all, got {total}"
        )
    return texts


def _logit_bias(name: str, value: Any) -> dict[int, float] | None:
    if value is None:
        return None
    if not isinstance(value, Mapping):
        raise _invalid(name, value, "a mapping of token id to number")
    entries = _items(name, value.items(), "entries", MAX_TOKEN_LIST)
    allowed = _Range(-100, 100)
    return {_token_id(name, key): _number(name, bias, allowed, _to_float) for key, bias in entries}


def _processors(name: str, value: Any) -> tuple[LogitsProcessor, ...]:
    if value is None:
        return ()
    items = _sequence(name, value, "callables", MAX_PROCESSORS)
    for item in items:
        if not callable(item):
            raise _invalid(name, item, "a list of callables")
    return items


def _regex(name: str, value: Any) -> str | None:
    """Compiled to reject a bad pattern here; the request compiles it again for its answers."""
    if value is None:
        return None
    if not isinstance(value, str):
        raise _invalid(name, value, f"a pattern of 1 to {MAX_PATTERN_LEN} characters")
    return StopRegex(str.__str__(value)).pattern


def _tenant(name: str, value: Any) -> str | None:
    if value is None:
        return None
    if not isinstance(value, str) or not 0 < len(value) <= MAX_TENANT_LENGTH:
        raise _invalid(name, value, f"None or a name of 1 to {MAX_TENANT_LENGTH} characters")
    return str.__str__(value)  # a plain string: it is a key of dicts


def _extra_args(name: str, value: Any) -> dict[str, Any] | None:
    if value is None:
        return None
    if not isinstance(value, Mapping):
        raise _invalid(name, value, "a mapping or None")
    return dict(_items(name, value.items(), "entries", MAX_TOKEN_LIST))


#: Field -> ``f(name, value)``, which returns the value to store or raises RequestError.
_CHECKS: dict[str, Callable[[str, Any], Any]] = {
    **dict.fromkeys(_INTEGERS, _integer),
    **dict.fromkeys(_FLOATS, _float),
    **dict.fromkeys(_BOOLEANS, _boolean),
    **dict.fromkeys(_TOKEN_LISTS, _token_ids),
    **dict.fromkeys(_STRING_LISTS, _strings),
    "output_kind": _output_kind,
    "logit_bias": _logit_bias,
    "logits_processors": _processors,
    "stop_regex": _regex,
    "tenant": _tenant,
    "extra_args": _extra_args,
    "structured_outputs": structure_of,
    "guided_decoding": structure_of,
}
