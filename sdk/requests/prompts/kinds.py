"""Prompts that are more than a text: conversations, a prefix with a suffix, and embeddings."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields
from hashlib import blake2b
from typing import TYPE_CHECKING, Any, TypeAlias, TypeVar

from sdk.api.errors import RequestError
from sdk.api.flags import check_flags
from sdk.api.near_misses import unknown_keyword
from sdk.api.params import SamplingParams
from sdk.kernels.dataclass import dataclass
from sdk.quant.safe_repr import safe_repr
from sdk.quant.tokenizer import FimTokens, Tokenizer, TooManyTokens
from sdk.requests.prompts.images import IMAGE_PARTS

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from sdk.tools import Tool, ToolFormat

Message = Mapping[str, Any]
T = TypeVar("T")
#: Float32 ``[tokens, hidden_size]``.
Embeds: TypeAlias = "NDArray[np.float32]"

#: Variables that every chat template gets; ``chat_template_kwargs`` adds others.
_TEMPLATE_ARGUMENTS = frozenset(
    {"messages", "tools", "chat_template", "add_generation_prompt", "continue_final_message"}
)
ONLY_ONE = (
    "add_generation_prompt and continue_final_message cannot both be True: the first opens a new "
    "turn, the second continues the last message; pass only one of them"
)
#: Limits below which prompts are tokenized in the caller's thread, even in an event loop: a few ms.
SHORT_TEXT = 4096  # characters
SHORT_CONTEXT = 1024  # tokens
#: Roles whose messages stay when the oldest turns of a conversation are dropped.
_STAYS = ("system", "developer")


def check_salt(salt: object) -> None:
    """:raises RequestError: a ``cache_salt`` is not a text, or empty."""
    if salt is not None and (not isinstance(salt, str) or not salt):
        raise RequestError(f"cache_salt: expected a non-empty string, found {safe_repr(salt)}")


def is_small(value: object) -> bool:
    """Whether plain data has at most ``SHORT_TEXT`` characters and values; reads no more."""
    left, waiting = SHORT_TEXT, [value]
    while waiting and left >= 0:
        item = waiting.pop()
        left -= 1
        if type(item) is str:
            left -= len(item)
        elif type(item) is dict:
            if item.get("type") in IMAGE_PARTS or "multi_modal_data" in item:
                return False  # to decode an image takes longer than its path or URL shows
            left -= len(item)
            waiting.extend(item.values() if left >= 0 else ())
        elif type(item) is list or type(item) is tuple:
            left -= len(item)
            if left >= 0 and item and type(item[0]) is not int:  # not token ids
                waiting.extend(item)
        elif item is not None and not isinstance(item, int | float):
            return False
    return left >= 0


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatOptions:
    """How a conversation is rendered; the keyword arguments of ``LLM.chat``.

    ``cache_salt``: its prefix is shared only with prompts of the same salt.
    """

    add_generation_prompt: bool = True
    continue_final_message: bool = False
    chat_template: str | None = None
    tools: Sequence[Tool] | None = None
    tool_choice: str | Mapping[str, Any] = "auto"
    parallel_tool_calls: bool = True
    tool_format: str | None = None
    chat_template_kwargs: Mapping[str, Any] | None = None
    cache_salt: str | None = None

    @classmethod
    def of(cls, method: str, given: Mapping[str, Any]) -> ChatOptions:
        """The options among a method's keywords. :raises TypeError: a keyword is unknown.

        :raises RequestError: a value has the wrong type.
        """
        known = sorted(field.name for field in fields(cls))
        for name in given:
            if name not in known:
                raise unknown_keyword(method, name, given[name], known)
        if (tools := given.get("tools")) is not None:
            from sdk.tools import tools_of  # with the first tools

            given = {**given, "tools": tools_of(tools)}
        options = cls(**given)
        options._check()
        if options.continue_final_message and given.get("add_generation_prompt"):
            raise RequestError(ONLY_ONE)
        return options

    def _check(self) -> None:
        template, variables = self.chat_template, self.chat_template_kwargs
        check_flags(
            add_generation_prompt=self.add_generation_prompt,
            continue_final_message=self.continue_final_message,
            parallel_tool_calls=self.parallel_tool_calls,
        )
        if template is not None and not isinstance(template, str):
            raise RequestError(
                "chat_template: expected the source or the name of a template, found "
                f"{safe_repr(template)}"
            )
        check_salt(self.cache_salt)
        if self.tools or self.tool_choice != "auto" or self.tool_format is not None:
            from sdk.tools import format_named, tool_choice_of

            tool_choice_of(self.tool_choice, self.tools or ())
        if self.tool_format is not None:
            format_named(self.tool_format)
        if variables is None:
            return
        if not isinstance(variables, Mapping) or not all(isinstance(k, str) for k in variables):
            raise RequestError(
                "chat_template_kwargs: expected a dict with names as keys, found "
                f"{safe_repr(variables)}"
            )
        reserved = sorted(_TEMPLATE_ARGUMENTS & variables.keys())
        if reserved:
            raise RequestError(
                f"chat_template_kwargs: {', '.join(reserved)} cannot be set here; pass it as a "
                "separate argument"
            )


def special_tokens_of(tokenizer: Tokenizer) -> dict[str, int]:
    """The spellings and ids of a model's control tokens."""
    named = {
        tokenizer.id_to_token(token) or "": token
        for token in sorted(tokenizer.special_ids | tokenizer.eos_token_ids)
    }
    return {name: token for name, token in named.items() if name}


def tool_format_of(options: ChatOptions, template: str | None, tokenizer: Tokenizer) -> ToolFormat:
    """How tool calls are written: as the options, the chat template or the control tokens say, or
    else as Hermes does."""
    from sdk.tools import format_named, format_of

    if options.tool_format is not None:
        return format_named(options.tool_format)
    return format_of(template, special_tokens_of(tokenizer)) or format_named("hermes")


class Turns:
    """A conversation cut into turns: a user's messages with their answer.

    System messages belong to no turn. The last turn is never dropped.
    """

    def __init__(self, messages: Sequence[Message]) -> None:
        self._turns: list[int | None] = []  # the turn of each message; None: never dropped
        turn, before = 0, None
        for message in messages:
            role = message["role"]
            if role in _STAYS:
                self._turns.append(None)
                continue
            if role == "user" and before not in (None, "user"):
                turn += 1
            self._turns.append(turn)
            before = role
        #: The number of turns that can be dropped.
        self.droppable = turn

    def without(self, count: int) -> list[int]:
        """The indices of the messages without the ``count`` oldest turns."""
        return [i for i, turn in enumerate(self._turns) if turn is None or turn >= count]

    def newest(self, encode: Callable[[list[int]], T]) -> T:
        """What ``encode`` makes of the indices that :meth:`without` gives, with as few turns
        dropped as it accepts. The whole conversation is too long.

        A bisection finds it: 10 renderings for 1,000 turns.

        :raises TooManyTokens: it does not accept the last turn either.
        """
        low, high = 0, self.droppable  # low does not fit
        best = encode(self.without(high))
        while high - low > 1:
            middle = (low + high) // 2
            try:
                best = encode(self.without(middle))
                high = middle
            except TooManyTokens:
                low = middle
        return best


def fim_tokens_of(tokenizer: Tokenizer, suffix_first: bool | None) -> FimTokens:
    """The model's tokens. :raises RequestError: it has none, or not for this order."""
    fim = tokenizer.fim_tokens
    if fim is None:
        raise RequestError(
            "suffix: the model's vocabulary has no fill-in-the-middle tokens (such as "
            "<|fim_prefix|>, <|fim_suffix|> and <|fim_middle|>); use a code model that was trained "
            "with them, or leave the suffix out"
        )
    if fim.middle is None and suffix_first is False:
        raise RequestError(
            "suffix_first: expected True or nothing for this model, found False; it has no token "
            "between suffix and middle, so the suffix comes first"
        )
    return fim


def fim_prompt(
    tokenizer: Tokenizer,
    prefix: Sequence[int],
    suffix: Sequence[int],
    suffix_first: bool | None,
    keep: int | None,
) -> list[int]:
    """BOS and the tokens of a prompt, in the order of the model's training unless one is given.

    ``keep``: the most tokens. The prefix keeps its last tokens and the suffix its first ones, at
    least a quarter of the room if it is that long (as in llama.cpp).
    """
    fim = fim_tokens_of(tokenizer, suffix_first)
    bos = tokenizer.bos_token_id
    start = [bos] if bos is not None and tokenizer.encode("")[:1] == [bos] else []
    middle = [] if fim.middle is None else [fim.middle]
    if keep is not None:
        room = max(0, keep - len(start) - 2 - len(middle))
        taken = min(len(suffix), max(room // 4, room - len(prefix)))
        suffix = suffix[:taken]
        prefix = prefix[max(0, len(prefix) - (room - taken)) :]
    if not (fim.suffix_first if suffix_first is None else suffix_first):
        return [*start, fim.prefix, *prefix, fim.suffix, *suffix, *middle]
    if fim.prefix_token_first:
        return [*start, fim.prefix, fim.suffix, *suffix, *middle, *prefix]
    return [*start, fim.suffix, *suffix, fim.prefix, *prefix, *middle]


def read_embeds(value: Any, hidden_size: int) -> Embeds:
    """A float32 copy of a tensor or an array ``[T, hidden_size]`` of floats.

    :raises RequestError: it has another type or shape, or a number that is not finite.
    """
    import numpy as np  # options of chats, which the command line names, need none

    if hasattr(value, "detach"):  # a torch tensor; numpy has no bfloat16
        value = value.detach().cpu()
        value = value.float().numpy() if value.is_floating_point() else value.numpy()
    if not isinstance(value, np.ndarray) or value.dtype.kind != "f":
        kind = f"an array of {value.dtype}" if hasattr(value, "dtype") else safe_repr(value)
        raise RequestError(
            f"prompt_embeds: expected a torch tensor or a numpy array of floats, found {kind}"
        )
    if value.ndim != 2 or value.shape[1] != hidden_size or not value.shape[0]:
        raise RequestError(
            f"prompt_embeds: expected shape [tokens, {hidden_size}] (the model's hidden size) with "
            f"at least one token, found {list(value.shape)}"
        )
    with np.errstate(over="ignore"):  # a float64 beyond float32 becomes infinite: see below
        embeds: Embeds = np.array(value, np.float32, order="C")
    if not np.isfinite(embeds).all():
        row = int(np.flatnonzero(~np.isfinite(embeds).all(axis=1))[0])
        raise RequestError(f"prompt_embeds[{row}]: expected finite float32 numbers, found others")
    return embeds


def embeds_salt(embeds: Embeds, salt: str | None) -> str:
    """A cache salt for these embeddings only: their placeholder token ids are all the same."""
    return f"{blake2b(embeds.tobytes()).hexdigest()}{'' if salt is None else ' ' + salt}"


def check_params(params: SamplingParams, has_negative: bool) -> None:
    """:raises RequestError: a parameter reads the prompt's tokens, and there are none."""
    if params.prompt_logprobs is not None:
        raise RequestError("prompt_logprobs: prompt_embeds have no tokens to score; leave it out")
    if params.token_healing:
        raise RequestError("token_healing: prompt_embeds have no tokens to take; leave it out")
    if params.guidance_scale != 1.0 and not has_negative:
        raise RequestError(
            "guidance_scale: prompt_embeds have no last token to use as the negative prompt; pass "
            "a negative_prompt"
        )
