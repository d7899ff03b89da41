"""The formats of answers that callers ask for: values of a type, or messages with tool calls."""

from __future__ import annotations

import importlib.util
import json
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any, Literal, Protocol

from sdk.api.errors import RequestError
from sdk.api.lora import LoRALike
from sdk.api.outputs import CompletionOutput, RequestOutput
from sdk.api.params import RequestOutputKind, SamplingParams
from sdk.api.schemas import is_pydantic, load
from sdk.api.structured_params import StructuredOutputsParams
from sdk.quant.tokenizer import Tokenizer
from sdk.requests.prompts.kinds import ChatOptions, Message, special_tokens_of, tool_format_of
from sdk.requests.prompts.reader import Prompt
from sdk.requests.typed_outputs import (
    MessageAnswer,
    MessageOutput,
    MessageReader,
    ParsedAnswer,
    ParsedOutput,
    with_answers,
)
from sdk.tools import (
    AssistantMessage,
    MessageParser,
    ToolRun,
    arun_tools,
    grammar_for,
    reasoning_of,
    run_tools,
    tool_choice_of,
)
from sdk.tools.definitions import ToolLike

#: Makes of one output of a request what its caller asked for.
Formatter = Callable[[RequestOutput], RequestOutput]


class AnswerFormat(Protocol):
    """How one call wants its answers."""

    def params(self, params: SamplingParams, prompt: Prompt) -> SamplingParams:
        """The parameters with which a prompt is answered."""

    def formatter(self, params: SamplingParams, prompt: Prompt) -> Formatter:
        """For the outputs of one request, in their order."""


class TypedAnswers:
    """``returns=``: values of a Python type, or of a JSON schema (then as parsed JSON)."""

    def __init__(self, kind: Any) -> None:
        self._structure = StructuredOutputsParams(json=kind)
        self._kind = kind
        self._changed: tuple[SamplingParams, SamplingParams] | None = None

    def params(self, params: SamplingParams, prompt: Prompt) -> SamplingParams:
        if params.structure is not None:
            raise RequestError("returns has its own structure; leave structured_outputs out")
        if not params.detokenize:
            raise RequestError("returns needs the text of the answer; leave detokenize=False out")
        if self._changed is None or self._changed[0] is not params:  # usually one for all prompts
            self._changed = params, params.clone(structured_outputs=self._structure)
        return self._changed[1]

    def formatter(self, params: SamplingParams, prompt: Prompt) -> Formatter:
        texts = _Texts(params)

        def show(output: RequestOutput) -> RequestOutput:
            answers = [ParsedAnswer.of(one, texts.whole(one), self._load) for one in output.outputs]
            shown: RequestOutput = with_answers(ParsedOutput, output, answers)
            return shown

        return show

    def _load(self, text: str) -> Any:
        if is_pydantic(self._kind):
            return self._kind.model_validate_json(text)
        value = json.loads(text)
        return value if isinstance(self._kind, str | Mapping) else load(self._kind, value)


class ToolTurns:
    """The chats of one ``run_tools``, and their keyword arguments."""

    def __init__(
        self,
        tools: Sequence[ToolLike],
        choice: str | Mapping[str, Any],
        params: SamplingParams | None,
        template: Mapping[str, Any],
        lora: LoRALike | None = None,
    ) -> None:
        self._first = {"tool_choice": choice}
        how = {"tools": tools, "sampling_params": params, "lora_request": lora}
        self._always = {**template, **how}
        self._tools = tools

    def run(
        self,
        chat: Callable[..., Sequence[Any]],
        messages: Sequence[Message],
        max_turns: int,
        on_error: Literal["message", "raise"],
    ) -> ToolRun:
        """``chat``: ``LLM.chat``."""

        def answer(conversation: list[dict[str, Any]]) -> AssistantMessage:
            message: AssistantMessage = chat(conversation, **self._next())[0].message
            return message

        return run_tools(answer, messages, self._tools, max_turns, on_error=on_error)

    async def arun(
        self,
        chat: Callable[..., Awaitable[Sequence[Any]]],
        messages: Sequence[Message],
        max_turns: int,
        on_error: Literal["message", "raise"],
    ) -> ToolRun:
        """``chat``: ``LLM.achat``."""

        async def answer(conversation: list[dict[str, Any]]) -> AssistantMessage:
            [output] = await chat(conversation, **self._next())
            message: AssistantMessage = output.message
            return message

        return await arun_tools(answer, messages, self._tools, max_turns, on_error=on_error)

    def _next(self) -> dict[str, Any]:
        """``tool_choice`` holds for the first answer: "required" would never end."""
        first, self._first = self._first, {}
        return {**self._always, **first}


class _Texts:
    """The whole texts of a request's answers, from outputs that may hold only what is new."""

    def __init__(self, params: SamplingParams) -> None:
        self._delta = params.output_kind is RequestOutputKind.DELTA
        self._texts: dict[int, str] = {}

    def whole(self, answer: CompletionOutput) -> str:
        before = self._texts.get(answer.index, "") if self._delta else ""
        self._texts[answer.index] = before + answer.text
        return self._texts[answer.index]

    def new(self, answer: CompletionOutput) -> str:
        """What is new in an answer."""
        before = "" if self._delta else self._texts.get(answer.index, "")
        return self.whole(answer)[len(before) :] if not self._delta else answer.text


class ToolUse:
    """``tools=``: messages with tool calls, constrained to the tools' parameters.

    ``template``: the source of the chat template.
    """

    def __init__(self, options: ChatOptions, template: str | None, tokenizer: Tokenizer) -> None:
        self._tools = options.tools or ()
        self._parallel = options.parallel_tool_calls
        self._choice = tool_choice_of(options.tool_choice, self._tools)
        self._special_tokens = special_tokens_of(tokenizer)
        self._format = tool_format_of(options, template, tokenizer)
        self._reasoning = reasoning_of(template, self._special_tokens)
        #: The engine keeps the reasoning apart if its marks are tokens.
        marks = ("<think>", "</think>")
        self._reasons_by_token = all(tokenizer.token_to_id(mark) is not None for mark in marks)

    def params(self, params: SamplingParams, prompt: Prompt) -> SamplingParams:
        if not params.detokenize:
            raise RequestError("tools need the text of the answer; leave detokenize=False out")
        changed = params.clone(skip_special_tokens=False)
        free = self._choice.mode == "auto" and importlib.util.find_spec("llguidance") is None
        if self._choice.mode == "none" or not self._tools or free:
            return changed
        if params.structure is not None:
            raise RequestError(
                "tools and structured_outputs cannot be combined; pass tool_choice='none' to get "
                "an answer with that structure"
            )
        reasoning = None if self._reasons_by_token else self._reasoning
        grammar = grammar_for(
            self._tools,
            self._choice,
            self._format,
            self._parallel,
            reasoning=reasoning,
            prompt_opens_reasoning=reasoning is not None and self._opened(prompt),
            special_tokens=self._special_tokens,
        )
        return changed.clone(structured_outputs=StructuredOutputsParams(grammar=grammar))

    def formatter(self, params: SamplingParams, prompt: Prompt) -> Formatter:
        texts = _Texts(params)
        readers: dict[int, MessageReader] = {}

        def show(output: RequestOutput) -> RequestOutput:
            answers = []
            for one in output.outputs:
                reader = readers.get(one.index)
                if reader is None:
                    reader = readers[one.index] = MessageReader(self._parser(prompt))
                number = reader.add(texts.new(one), ends=one.finished)
                answers.append(MessageAnswer.of(one, reader, number))
            shown: RequestOutput = with_answers(MessageOutput, output, answers)
            return shown

        return show

    def _opened(self, prompt: Prompt) -> bool:
        return self._reasoning is not None and self._reasoning.opened_by(prompt.text or "")

    def _parser(self, prompt: Prompt) -> MessageParser:
        tools = () if self._choice.mode == "none" else self._tools
        return MessageParser(self._format, self._reasoning, tools, self._opened(prompt))
