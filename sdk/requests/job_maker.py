"""Turns the arguments of a call into jobs for the engine."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

from sdk.api.errors import RequestError
from sdk.api.params import SamplingParams
from sdk.api.structured_params import StructuredOutputsParams
from sdk.engine.job import Job
from sdk.engine.plan import LAST_TOKEN, Pooling, RequestKind, SequenceSpec
from sdk.engine.scheduling.results import ResultBudget
from sdk.kernels.host.torch_import import torch_module
from sdk.models.classifier import Classifier
from sdk.quant.once import Once
from sdk.quant.safe_repr import safe_repr
from sdk.requests.adapters import Adapters
from sdk.requests.prompts.kinds import ChatOptions
from sdk.requests.prompts.reader import (
    Prompt,
    PromptLike,
    PromptReader,
    as_conversations,
    as_list,
    as_request_error,
    is_conversation,
)
from sdk.sampling.resolved import ResolvedParams, resolve
from sdk.text.automaton import StringAutomaton
from sdk.text.banned import banned_strings
from sdk.text.stops import StopStrings, stop_strings

if TYPE_CHECKING:
    from sdk.requests.answer_formats import AnswerFormat
    from sdk.structured.compiler import Grammar, GrammarCompiler

MAX_PRIORITY = 2**31 - 1
MAX_ID_LENGTH = 256
T = TypeVar("T")
ParamsLike = SamplingParams | Sequence[SamplingParams] | None


def once_each(params: Sequence[SamplingParams], make: Callable[[SamplingParams], T]) -> list[T]:
    """``make`` of each; called once for all prompts that share their parameters."""
    made = {id(param): param for param in params}
    results = {key: make(param) for key, param in made.items()}
    return [results[id(param)] for param in params]


class PromptBatch(NamedTuple):
    """The prompts of one call with their parameters, and how their outputs are shown."""

    prompts: list[Prompt]
    params: list[SamplingParams]
    answer_format: AnswerFormat | None = None


def _not_params(given: object) -> RequestError:
    text = f"sampling_params: expected SamplingParams, found {safe_repr(given)}"
    if isinstance(given, Mapping):
        text += "; write SamplingParams(max_tokens=64, ...), or SamplingParams(**values) of a dict"
    return RequestError(text)


def _typed_answers(returns: Any) -> AnswerFormat | None:
    """What ``returns=`` asks for."""
    if returns is None:
        return None
    from sdk.requests.answer_formats import TypedAnswers  # with tools and schemas: 15 ms

    return TypedAnswers(returns)


def _batch(
    prompts: list[Prompt], params: list[SamplingParams], answer_format: AnswerFormat | None
) -> PromptBatch:
    if answer_format is not None:
        params = [
            answer_format.params(one, prompt) for one, prompt in zip(params, prompts, strict=True)
        ]
    return PromptBatch(prompts, params, answer_format)


class JobMaker:
    """Makes the jobs of one ``LLM``. ``default``: the parameters of a call without any."""

    def __init__(
        self,
        reader: PromptReader,
        default: SamplingParams,
        *,
        vocab_size: int,
        eos_token_ids: frozenset[int],
        max_model_len: int,
        results: ResultBudget,
        adapters: Adapters,
        classifier: Classifier | None = None,
        encoder: str | None = None,
        has_head: bool = True,
        closed_schemas: bool = False,
    ) -> None:
        """``encoder``: the kind of model, if it is one."""
        self._reader = reader
        self._default = default
        self._vocab_size = vocab_size
        self._eos_token_ids = eos_token_ids
        self._max_model_len = max_model_len
        self._results = results
        self.adapters = adapters
        self._closed_schemas = closed_schemas
        self._compiler = Once["GrammarCompiler"]()
        #: Called before the vocabulary is read for the first structure; raises if it must not be.
        self.before_structures: Callable[[], object] = lambda: None
        self._generates = classifier is None or classifier.generates
        self._encoder = encoder
        self._has_head = has_head
        self._ids = itertools.count()

    @property
    def generates(self) -> bool:
        """Whether the model continues texts."""
        return self._generates and self._has_head and self._encoder is None

    def check_generates(self) -> None:
        """:raises RequestError: the model does not continue texts; says what it does."""
        if self._encoder is not None:
            raise RequestError(
                f"this model ({self._encoder}) is an encoder: its tokens see those after them too, "
                "so it does not continue a text. It turns texts into vectors: use embed, encode, "
                "score or rerank, and with a classification head classify"
            )
        if not self._has_head:
            raise RequestError(
                "this checkpoint holds a model without a head (architectures: ...Model) and "
                "cannot generate; use embed, encode, score or rerank"
            )
        if not self._generates:
            raise RequestError(
                "this checkpoint was trained to classify (...ForSequenceClassification) and has no "
                "head that generates; use classify, score, rerank, encode or embed"
            )

    def params(self, given: ParamsLike, count: int) -> list[SamplingParams]:
        """The parameters of each of ``count`` prompts."""
        if given is None or isinstance(given, SamplingParams):
            return [given or self._default] * count
        with as_request_error("sampling_params"):
            if isinstance(given, Mapping):
                raise _not_params(given)
            if not isinstance(given, Sequence) or len(given) != count:
                found = len(given) if isinstance(given, Sequence) else safe_repr(given)
                raise RequestError(
                    f"sampling_params: expected one or one per prompt ({count}), found {found}"
                )
            params = list(itertools.islice(given, count))
            for item in params:
                if not isinstance(item, SamplingParams):
                    raise _not_params(item)
            return params

    def read(
        self,
        prompts: PromptLike | Sequence[PromptLike],
        given: ParamsLike,
        returns: Any = None,
        lora: Any = None,
    ) -> PromptBatch:
        """One or more prompts as token ids, each with its parameters and adapter."""
        items = as_list(prompts)
        params = self.params(given, len(items))
        read = [self._reader.read(p, q) for p, q in zip(items, params, strict=True)]
        read = self.adapted(read, lora)
        return _batch(read, params, _typed_answers(returns))

    def adapted(self, prompts: list[Prompt], lora: Any) -> list[Prompt]:
        """The prompts with the adapters that ``lora_request=`` asks for."""
        if lora is None and self.adapters.default is None:
            return prompts
        adapters = self.adapters.of(lora, len(prompts))
        return [replace(p, adapter=one) for p, one in zip(prompts, adapters, strict=True)]

    def read_chats(
        self,
        method: str,
        messages: Any,
        given: ParamsLike,
        template: Mapping[str, Any],
        returns: Any = None,
        lora: Any = None,
    ) -> PromptBatch:
        """One or more conversations through the chat template, each with its parameters."""
        self.check_generates()
        options = ChatOptions.of(method, template)
        chats = as_conversations(messages)
        params = self.params(given, len(chats))
        pairs = zip(chats, params, strict=True)
        read = self.adapted([self._reader.read_chat(c, q, options) for c, q in pairs], lora)
        return _batch(read, params, self._answer_format(options, returns))

    def read_one(
        self,
        method: str,
        prompt: Any,
        given: SamplingParams | None,
        template: Mapping[str, Any],
        returns: Any = None,
        lora: Any = None,
    ) -> PromptBatch:
        """One prompt or conversation."""
        self.check_generates()
        params = self.params(given, 1)
        read = [self._reader.read_one(method, prompt, params[0], template)]
        read = self.adapted(read, lora)
        return _batch(read, params, self._answer_format(ChatOptions.of(method, template), returns))

    def _answer_format(self, options: ChatOptions, returns: Any) -> AnswerFormat | None:
        """What a call wants of its answers; ``None``: plain outputs."""
        if options.tools is None:
            return _typed_answers(returns)
        if returns is not None:
            raise RequestError("returns and tools cannot be combined; pass one of them")
        tokenizer = self._reader.need_tokenizer("tools")
        from sdk.requests.answer_formats import ToolUse

        return ToolUse(options, self._reader.template_of(options), tokenizer)

    def read_mixed(
        self,
        method: str,
        prompts: Any,
        given: ParamsLike,
        template: Mapping[str, Any],
        lora: Any = None,
    ) -> PromptBatch:
        """Prompts and conversations, each with its parameters; ``template``: options of chats."""
        items: list[Any] = [prompts] if is_conversation(prompts) else as_list(prompts)
        params = self.params(given, len(items))
        options = ChatOptions.of(method, template)
        chats = [is_conversation(item) for item in items]
        if template and not any(chats):
            raise TypeError(f"{method}(): {', '.join(template)} apply only to a conversation")
        read = [
            self._reader.read_chat(item, param, options) if chat else self._reader.read(item, param)
            for item, param, chat in zip(items, params, chats, strict=True)
        ]
        read = self.adapted(read, lora)
        return _batch(read, params, self._answer_format(options, None))

    def make(
        self,
        prompts: Sequence[Prompt],
        params: Sequence[SamplingParams],
        *,
        priority: int | Sequence[int] | None = None,
        kind: RequestKind = "generate",
        pooling: Pooling | None = None,
        request_ids: str | Sequence[str] | None = None,
    ) -> list[Job]:
        """One job for each prompt, with the caller's id or a new one."""
        if kind == "generate":
            self.check_generates()
        names = self._names(request_ids, len(prompts))
        priorities = _priorities(priority, len(prompts))
        params = [_with_stops(q, p) for q, p in zip(params, prompts, strict=True)]
        now = time.monotonic()
        # Once for all prompts that share parameters, and in the caller's thread: a list of a
        # million token ids takes 0.1 s.
        read = once_each(params, self.compiled)
        return [
            Job(
                SequenceSpec(
                    request_id=name,
                    params=param,
                    kind=kind,
                    pooling=_with_texts(pooling, prompt),
                    resolved=_with_healing(resolved, prompt),
                    prompt_embeds=prompt.embeds,
                    images=prompt.images,
                ),
                prompt_token_ids=prompt.token_ids,
                prompt=prompt.text,
                priority=urgency,
                cache_salt=prompt.cache_salt,
                arrival_time=now,
                negative_prompt_token_ids=prompt.negative_token_ids,
                stops=stops,
                banned=banned,
                result_bytes=self._result_bytes(param, prompt, pooling),
                adapter=prompt.adapter,
            )
            for name, prompt, param, urgency, (resolved, stops, banned) in zip(
                names, prompts, params, priorities, read, strict=True
            )
        ]

    def _result_bytes(self, params: SamplingParams, prompt: Prompt, pooling: Pooling | None) -> int:
        """The most that a request may take outside of the planned memory."""
        budget, count = self._results, len(prompt.token_ids)
        embeds = (
            0 if prompt.embeds is None else budget.required_hidden_bytes("prompt_embeds", count)
        )
        if pooling is not None and pooling.mode == "token":
            return embeds + budget.required_hidden_bytes("pooling='token'", count)
        return embeds + budget.required_bytes(params, count, self._max_model_len)

    def _names(self, given: Any, count: int) -> list[str]:
        """Request ids. Ids with # are the LLM's own: #7, and #7#1 for a second answer."""
        if given is None:
            return [f"#{next(self._ids)}" for _ in range(count)]
        with as_request_error("request_id"):
            names = [given] if isinstance(given, str) else given
            if not isinstance(names, Sequence) or len(names) != count:
                found = len(names) if isinstance(names, Sequence) else safe_repr(names)
                raise RequestError(
                    f"request_id: expected one for each prompt ({count}), found {found}"
                )
            names = list(itertools.islice(names, count))
            for name in names:
                if not isinstance(name, str) or not 0 < len(name) <= MAX_ID_LENGTH or "#" in name:
                    raise RequestError(
                        f"request_id: expected strings of 1 to {MAX_ID_LENGTH} characters without "
                        f"#, found {safe_repr(name)}"
                    )
            if len(set(names)) < count:
                raise RequestError("request_id: expected different ids, found one twice")
            return names

    def compiled(
        self, params: SamplingParams
    ) -> tuple[ResolvedParams, StopStrings | None, StringAutomaton | None]:
        """What the engine needs besides the parameters.

        :raises RequestError: a token id, a string or a structure is not supported.
        """
        return self._resolve(params), stop_strings(params), banned_strings(params)

    def _resolve(self, params: SamplingParams) -> ResolvedParams:
        """The token ids of the strings in ``params``."""
        if params.logits_processors:
            torch_module("logits_processors")  # here, not in the middle of a step
        tokenizer = self._reader.tokenizer
        start = tokenizer.token_to_id("<think>") if tokenizer is not None else None
        end = tokenizer.token_to_id("</think>") if tokenizer is not None else None
        return resolve(
            params,
            tokenizer,
            self._vocab_size,
            eos_token_ids=self._eos_token_ids,
            think_start_id=start,
            think_end_id=end,
            grammar=None if params.structure is None else self._compile(params.structure),
        )

    def _compile(self, structure: StructuredOutputsParams) -> Grammar:
        """:raises RequestError: the structure is not supported."""
        if self._closed_schemas:
            structure = replace(structure, disable_additional_properties=True)
        return self._compiler(self._made_compiler).compile(structure)

    def _made_compiler(self) -> GrammarCompiler:
        tokenizer = self._reader.need_tokenizer("structured output")
        from sdk.structured.compiler import GrammarCompiler  # loaded with the first structure

        self.before_structures()
        ends = self._eos_token_ids | tokenizer.eos_token_ids
        return GrammarCompiler(tokenizer, self._vocab_size, ends)

    def close(self) -> None:
        """Drop the compiled structures."""
        self._compiler = Once["GrammarCompiler"]()


def _with_stops(params: SamplingParams, prompt: Prompt) -> SamplingParams:
    """The parameters with the tokens that end this prompt's answer."""
    if not prompt.stop_token_ids or params.ignore_eos:
        return params
    known = tuple(params.stop_token_ids or ())
    more = sorted(prompt.stop_token_ids.difference(known))
    return params.clone(stop_token_ids=(*known, *more))


def _with_healing(resolved: ResolvedParams, prompt: Prompt) -> ResolvedParams:
    return resolved if prompt.healing is None else replace(resolved, healing=prompt.healing)


def _with_texts(pooling: Pooling | None, prompt: Prompt) -> Pooling | None:
    if prompt.second_text is None:
        return pooling
    return (pooling or LAST_TOKEN)._replace(second_text=prompt.second_text)


def _priorities(given: Any, count: int) -> list[int | None]:
    """The priority of each of ``count`` prompts; None: that of the sampling parameters."""
    with as_request_error("priority"):
        if not isinstance(given, Sequence):
            given = [given] * count
        if len(given) != count:
            raise RequestError(f"priority: expected one or {count} numbers, found {len(given)}")
        priorities = list(itertools.islice(given, count))
        for item in priorities:
            number = isinstance(item, int) and not isinstance(item, bool)
            if item is not None and not (number and abs(item) <= MAX_PRIORITY):
                raise RequestError(
                    f"priority: expected integers from {-MAX_PRIORITY} to {MAX_PRIORITY}, found "
                    f"{safe_repr(item)}"
                )
        return priorities
