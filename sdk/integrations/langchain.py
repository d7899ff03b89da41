"""LangChain's chat model, embeddings and reranker on an :class:`sdk.LLM` in this process.

``pip install langchain-core``. Chains that run at the same time, in threads or tasks, share the
steps of the engine. ``docs/guides/frameworks.md`` shows it.
"""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from operator import itemgetter
from os import PathLike
from pathlib import Path
from typing import Any, Literal

from sdk import LLM, RequestError, SamplingParams, StructuredOutputsParams
from sdk.api.outputs import CompletionOutput, RequestOutput
from sdk.integrations.schemas import closed
from sdk.integrations.vectors import Vectors, check_llm
from sdk.kernels.packages import needed_for
from sdk.requests.prompts.kinds import ChatOptions
from sdk.serving.openai.responses import Responses

with needed_for("sdk.integrations.langchain needs"):
    from langchain_core.callbacks import (
        AsyncCallbackManagerForLLMRun,
        CallbackManagerForLLMRun,
        Callbacks,
    )
    from langchain_core.documents import BaseDocumentCompressor, Document
    from langchain_core.embeddings import Embeddings
    from langchain_core.language_models import BaseChatModel, LanguageModelInput
    from langchain_core.messages import (
        AIMessage,
        AIMessageChunk,
        BaseMessage,
        InvalidToolCall,
        ToolCall,
        convert_to_openai_messages,
    )
    from langchain_core.messages.ai import UsageMetadata
    from langchain_core.messages.tool import tool_call_chunk
    from langchain_core.output_parsers import JsonOutputParser, PydanticOutputParser
    from langchain_core.outputs import ChatGeneration, ChatGenerationChunk, ChatResult
    from langchain_core.runnables import Runnable, RunnableMap, RunnablePassthrough
    from langchain_core.utils.function_calling import convert_to_json_schema, convert_to_openai_tool
    from langchain_core.utils.pydantic import is_basemodel_subclass
    from pydantic import ConfigDict, Field, PrivateAttr, model_validator

#: Fields of the chat model that are fields of ``SamplingParams``.
_SAMPLING = ("temperature", "top_p", "top_k", "max_tokens", "seed", "n")
#: Keyword arguments of a call that ``LLM.chat`` takes.
_TEMPLATE = (
    *("tools", "tool_choice", "parallel_tool_calls", "tool_format", "lora_request", "priority"),
    *("chat_template", "chat_template_kwargs", "cache_salt"),
)


class ChatEmbedLM(BaseChatModel):
    """A chat model on an ``llm``, or on the ``model`` that it opens itself.

    ``temperature``, ``top_p``, ``top_k``, ``max_tokens``, ``seed``, ``n``, ``stop``, and in
    ``sampling`` any other field of :class:`sdk.SamplingParams`: ``None`` means the model's own
    default. A call may give them anew, as well as LangChain's ``tools`` and ``tool_choice``, the
    keyword arguments of ``LLM.chat``, and as ``model`` the name of a LoRA adapter. ``options``:
    those of ``LLM``, with ``model``.

    Calls of tools fit their schemas, and :meth:`with_structured_output` constrains the answer.

    :raises RequestError: from a call, for what the model or the engine cannot do.
    """

    model_config = ConfigDict(arbitrary_types_allowed=True, extra="forbid")

    llm: Any = Field(default=None, exclude=True, repr=False)
    model: str | PathLike[str] | None = None
    options: dict[str, Any] = Field(default_factory=dict)
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    max_tokens: int | None = None
    seed: int | None = None
    n: int | None = None
    stop: list[str] | str | None = None
    sampling: dict[str, Any] = Field(default_factory=dict)
    #: Whether ``invoke`` streams too, for callbacks of single tokens; ``None``: LangChain decides.
    streaming: bool | None = None
    _owned: bool = PrivateAttr(default=False)

    @model_validator(mode="after")
    def _open(self) -> ChatEmbedLM:
        if (self.llm is None) == (self.model is None):
            raise ValueError("expected either llm=LLM(...) or model=PATH, found both or neither")
        if self.llm is None:
            assert self.model is not None
            self.llm, self._owned = LLM(self.model, **self.options), True
        elif self.options:
            raise ValueError("options: apply to model=PATH alone; this llm is already open")
        check_llm(self.llm)
        return self

    def close(self) -> None:
        """Close the engine, if it was opened here."""
        if self._owned:
            self.llm.close()

    @property
    def _llm_type(self) -> str:
        return "embedlm"

    @property
    def _identifying_params(self) -> dict[str, Any]:
        own = {name: getattr(self, name) for name in (*_SAMPLING, "stop")}
        return {"model": self._model_name, **own, **self.sampling}

    @property
    def _model_name(self) -> str:
        return Path(self.llm.config.model).name

    def _get_ls_params(self, stop: list[str] | None = None, **kwargs: Any) -> Any:
        found = super()._get_ls_params(stop=stop, **kwargs)
        found["ls_provider"] = "embedlm"
        found["ls_model_name"] = kwargs.get("model") or self._model_name
        return found

    # ---- tokens ---------------------------------------------------------------------------------

    def get_token_ids(self, text: str) -> list[int]:
        """The ids of a text, without special tokens."""
        ids: list[int] = self.llm.get_tokenizer().encode(text, add_special_tokens=False)
        return ids

    def get_num_tokens_from_messages(
        self, messages: Sequence[BaseMessage], tools: Sequence[Any] | None = None
    ) -> int:
        """The tokens of the prompt that the messages become.

        Of a conversation that is too long, or of a part that the model's template refuses, such as
        ``trim_messages`` asks about, those of the texts alone.
        """
        described = [_closed(convert_to_openai_tool(tool)) for tool in tools or ()]
        conversation = convert_to_openai_messages(list(messages))
        try:
            options = ChatOptions.of("get_num_tokens_from_messages", {"tools": described})
            read = self.llm._reader.read_chat(conversation, SamplingParams(), options)
            return len(read.token_ids)
        except RequestError:
            texts = [message.text for message in messages] + [json.dumps(one) for one in described]
            return sum(len(self.get_token_ids(text)) for text in texts)

    # ---- requests --------------------------------------------------------------------------------

    def _request(
        self, messages: Sequence[BaseMessage], stop: list[str] | None, given: Mapping[str, Any]
    ) -> tuple[list[dict[str, Any]], SamplingParams, dict[str, Any]]:
        """Conversation, parameters, and keyword arguments of ``LLM.chat``."""
        if not messages:
            raise RequestError("messages: expected at least one, found none")
        own = {name: getattr(self, name) for name in _SAMPLING}
        fields = {**own, "stop": self.stop, **self.sampling}
        fields |= {name: value for name, value in given.items() if name not in _TEMPLATE}
        fields.pop("ls_structured_output_format", None)  # for LangSmith
        if stop is not None:
            fields["stop"] = stop
        fields = {name: value for name, value in fields.items() if value is not None}
        defaults = self.llm.get_default_sampling_params()
        template = {name: given[name] for name in _TEMPLATE if given.get(name) is not None}
        template.setdefault("tools", ())  # then answers are messages
        name = fields.pop("model", None)
        if name not in (None, self._model_name):
            template["lora_request"] = name
        conversation = convert_to_openai_messages(list(messages))
        return conversation, defaults.clone(**fields), template

    def _streamed(
        self, messages: Sequence[BaseMessage], stop: list[str] | None, given: Mapping[str, Any]
    ) -> tuple[list[dict[str, Any]], SamplingParams, dict[str, Any]]:
        """:meth:`_request` for a stream."""
        found = self._request(messages, stop, given)
        if found[1].n != 1:
            raise RequestError(
                f"n: a stream has one answer, found {found[1].n}; use generate for several"
            )
        return found

    def _generate(
        self,
        messages: list[BaseMessage],
        stop: list[str] | None = None,
        run_manager: CallbackManagerForLLMRun | None = None,
        **kwargs: Any,
    ) -> ChatResult:
        conversation, params, template = self._request(messages, stop, kwargs)
        [output] = self.llm.chat(conversation, params, use_tqdm=False, **template)
        return self._result(output, params)

    async def _agenerate(
        self,
        messages: list[BaseMessage],
        stop: list[str] | None = None,
        run_manager: AsyncCallbackManagerForLLMRun | None = None,
        **kwargs: Any,
    ) -> ChatResult:
        conversation, params, template = self._request(messages, stop, kwargs)
        [output] = await self.llm.achat(conversation, params, **template)
        return self._result(output, params)

    def _stream(
        self,
        messages: list[BaseMessage],
        stop: list[str] | None = None,
        run_manager: CallbackManagerForLLMRun | None = None,
        **kwargs: Any,
    ) -> Iterator[ChatGenerationChunk]:
        conversation, params, template = self._streamed(messages, stop, kwargs)
        generated = 0
        for output in self.llm.stream(conversation, params, **template):
            generated += len(output.outputs[0].token_ids)
            chunk = self._chunk(output, generated, params)
            if run_manager is not None:
                run_manager.on_llm_new_token(chunk.text, chunk=chunk)
            yield chunk

    async def _astream(
        self,
        messages: list[BaseMessage],
        stop: list[str] | None = None,
        run_manager: AsyncCallbackManagerForLLMRun | None = None,
        **kwargs: Any,
    ) -> AsyncIterator[ChatGenerationChunk]:
        conversation, params, template = self._streamed(messages, stop, kwargs)
        generated = 0
        async for output in self.llm.astream(conversation, params, **template):
            generated += len(output.outputs[0].token_ids)
            chunk = self._chunk(output, generated, params)
            if run_manager is not None:
                await run_manager.on_llm_new_token(chunk.text, chunk=chunk)
            yield chunk

    # ---- answers ---------------------------------------------------------------------------------

    def _facts(self, answer: CompletionOutput) -> dict[str, Any]:
        return {
            "finish_reason": answer.finish_reason,
            "stop_reason": answer.stop_reason,
            "model_name": self._model_name,
            "model_provider": "embedlm",
        }

    def _logprobs(self, answer: CompletionOutput, params: SamplingParams) -> dict[str, Any]:
        """``logprobs`` in the form of OpenAI's API, if they were asked for."""
        if not answer.logprobs:
            return {}
        top = params.logprobs
        made = Responses("", "", lambda _: None, self.llm.get_tokenizer(), top).logprobs(answer)
        assert made is not None
        return {"logprobs": made.model_dump()}

    def _result(self, output: Any, params: SamplingParams) -> ChatResult:
        usage = _usage(output, sum(len(answer.token_ids) for answer in output.outputs))
        found = []
        for answer in output.outputs:
            message = answer.message
            valid = [call for call in message.tool_calls if call.error is None]
            invalid = [call for call in message.tool_calls if call.error is not None]
            reply = AIMessage(
                content=message.content,
                additional_kwargs=_reasoning(message.reasoning),
                tool_calls=[
                    ToolCall(name=call.name, args=json.loads(call.arguments), id=call.id)
                    for call in valid
                ],
                invalid_tool_calls=[
                    InvalidToolCall(
                        type="invalid_tool_call",
                        name=call.name,
                        args=call.arguments,
                        id=call.id,
                        error=call.error,
                    )
                    for call in invalid
                ],
                response_metadata={**self._facts(answer), **self._logprobs(answer, params)},
                usage_metadata=usage,
            )
            found.append(ChatGeneration(message=reply, generation_info=self._facts(answer)))
        return ChatResult(generations=found, llm_output={"model_name": self._model_name})

    def _chunk(self, output: Any, generated: int, params: SamplingParams) -> ChatGenerationChunk:
        """What is new in the answer; the last chunk has the usage too: ``generated`` tokens."""
        [answer] = output.outputs
        delta = answer.delta
        message = AIMessageChunk(
            content=delta.content,
            additional_kwargs=_reasoning(delta.reasoning),
            tool_call_chunks=[
                tool_call_chunk(name=one.name, args=one.arguments, id=one.id, index=one.index)
                for one in delta.tool_calls
            ],
            response_metadata=self._logprobs(answer, params),
        )
        if output.finished:
            message.response_metadata |= self._facts(answer)
            message.usage_metadata = _usage(output, generated)
            message.chunk_position = "last"
        return ChatGenerationChunk(message=message)

    # ---- tools and structured output -------------------------------------------------------------

    def bind_tools(
        self,
        tools: Sequence[dict[str, Any] | type | Callable[..., Any] | Any],
        *,
        tool_choice: str | bool | dict[str, Any] | None = None,
        **kwargs: Any,
    ) -> Runnable[LanguageModelInput, AIMessage]:
        """The model with tools. ``tool_choice``: a name, ``"any"`` (or ``"required"``, ``True``: at
        least one call), ``"auto"``, ``"none"``."""
        bound = {**kwargs, "tools": [_closed(convert_to_openai_tool(tool)) for tool in tools]}
        if tool_choice in ("any", True):
            tool_choice = "required"
        if tool_choice:
            bound["tool_choice"] = tool_choice
        return self.bind(**bound)

    def with_structured_output(
        self,
        schema: dict[str, Any] | type,
        *,
        method: Literal["json_schema", "function_calling", "json_mode"] = "json_schema",
        include_raw: bool = False,
        **kwargs: Any,
    ) -> Runnable[LanguageModelInput, Any]:
        """Answers as values of ``schema``: a pydantic model, a ``TypedDict`` or a JSON schema.

        The answer is constrained to it while it is generated, with no keys that it does not
        name unless it says ``additionalProperties``. So only an answer that
        ``max_tokens`` cuts off cannot be parsed. ``function_calling``: as the arguments of a call.
        ``json_mode``: any JSON object. ``strict``: answers always are.
        """
        kwargs.pop("strict", None)
        if method == "function_calling":
            return super().with_structured_output(schema, include_raw=include_raw, **kwargs)
        if kwargs:
            raise ValueError(f"with_structured_output: unknown arguments {sorted(kwargs)}")
        if method == "json_schema":
            structure = StructuredOutputsParams(json=closed(convert_to_json_schema(schema)))
        elif method == "json_mode":
            structure = StructuredOutputsParams(json_object=True)
        else:
            raise ValueError(
                "method: expected 'json_schema', 'function_calling' or 'json_mode', found "
                f"{method!r}"
            )
        shown = {"kwargs": {"method": method}, "schema": schema}
        model = self.bind(structured_outputs=structure, ls_structured_output_format=shown)
        parser: Any = JsonOutputParser()
        if isinstance(schema, type) and is_basemodel_subclass(schema):
            parser = PydanticOutputParser(pydantic_object=schema)
        if not include_raw:
            return model | parser
        parsed = RunnablePassthrough.assign(
            parsed=itemgetter("raw") | parser, parsing_error=lambda _: None
        )
        failed = RunnablePassthrough.assign(parsed=lambda _: None)
        return RunnableMap(raw=model) | parsed.with_fallbacks(
            [failed], exception_key="parsing_error"
        )


def _closed(tool: dict[str, Any]) -> dict[str, Any]:
    """The tool without arguments that it does not name, which a JSON schema allows by default."""
    function = tool["function"]
    parameters = closed({"properties": {}, **function.get("parameters", {"type": "object"})})
    return {**tool, "function": {**function, "parameters": parameters}}


def _reasoning(text: str) -> dict[str, Any]:
    return {"reasoning_content": text} if text else {}


def _usage(output: RequestOutput, generated: int) -> UsageMetadata:
    prompt = len(output.prompt_token_ids)
    return UsageMetadata(
        input_tokens=prompt,
        output_tokens=generated,
        total_tokens=prompt + generated,
        input_token_details={"cache_read": output.num_cached_tokens or 0},
    )


class EmbedLMEmbeddings(Embeddings):
    """Embeddings of an :class:`sdk.LLM` with an embedding model.

    ``query_prompt``, ``document_prompt``: names of prompts of a sentence-transformers folder
    (``"query"``). ``dimensions``: see :meth:`sdk.LLM.embed`. Texts longer than the context lose
    their end.
    """

    def __init__(
        self,
        llm: LLM,
        *,
        query_prompt: str | None = None,
        document_prompt: str | None = None,
        dimensions: int | None = None,
    ) -> None:
        self.llm = llm
        self._vectors = Vectors(llm, query_prompt, document_prompt, dimensions)

    def embed_documents(self, texts: list[str]) -> list[list[float]]:
        """One vector for each text."""
        return self._vectors.of_documents(texts)

    def embed_query(self, text: str) -> list[float]:
        """The vector of a query."""
        return self._vectors.of_query(text)

    async def aembed_documents(self, texts: list[str]) -> list[list[float]]:
        """:meth:`embed_documents` for an event loop."""
        return await self._vectors.aof_documents(texts)

    async def aembed_query(self, text: str) -> list[float]:
        """:meth:`embed_query` for an event loop."""
        return await self._vectors.aof_query(text)


class EmbedLMReranker(BaseDocumentCompressor):
    """Keeps the ``top_n`` documents that match a query best, best first.

    Their metadata get ``relevance_score``. See :meth:`sdk.LLM.rerank` about models.
    """

    model_config = ConfigDict(arbitrary_types_allowed=True, extra="forbid")

    llm: Any = Field(exclude=True, repr=False)
    top_n: int | None = 3

    @model_validator(mode="after")
    def _check(self) -> EmbedLMReranker:
        check_llm(self.llm)
        return self

    def compress_documents(
        self, documents: Sequence[Document], query: str, callbacks: Callbacks | None = None
    ) -> Sequence[Document]:
        """The best documents."""
        texts = [one.page_content for one in documents]
        if not texts:
            return []
        return _ranked(documents, self.llm.rerank(query, texts, self.top_n))

    async def acompress_documents(
        self, documents: Sequence[Document], query: str, callbacks: Callbacks | None = None
    ) -> Sequence[Document]:
        """:meth:`compress_documents` for an event loop."""
        texts = [one.page_content for one in documents]
        if not texts:
            return []
        return _ranked(documents, await self.llm.arerank(query, texts, self.top_n))


def _ranked(documents: Sequence[Document], ranks: Sequence[Any]) -> list[Document]:
    found = []
    for rank in ranks:
        document = documents[rank.index]
        facts = {**document.metadata, "relevance_score": rank.relevance_score}
        found.append(Document(page_content=document.page_content, metadata=facts, id=document.id))
    return found
