"""The methods of ``LLM`` that generate text: for threads, for event loops, and step by step."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, Literal, TypeVar, overload

from sdk.api.beam_search import BeamSearchOutput, BeamSearchParams
from sdk.api.lora import LoRALike, LoRAsLike
from sdk.api.near_misses import names_keywords
from sdk.api.outputs import RequestOutput
from sdk.api.params import SamplingParams
from sdk.requests.as_completed import AsCompleted
from sdk.requests.async_stream import AnswerStream
from sdk.requests.beam_searches import BeamSearches
from sdk.requests.job_maker import JobMaker, ParamsLike
from sdk.requests.job_runner import JobRunner, Stepping
from sdk.requests.prompts.kinds import Message
from sdk.requests.prompts.reader import PromptLike

if TYPE_CHECKING:  # tools and schemas: loaded with the first call that has some
    from sdk.requests.answer_formats import ToolTurns
    from sdk.requests.typed_outputs import MessageOutput, ParsedOutput
    from sdk.tools import ToolRun
    from sdk.tools.definitions import ToolLike

T = TypeVar("T")


class GenerationMethods:
    """``generate``, ``chat``, ``stream`` and the other methods of an :class:`sdk.LLM` that generate
    text.

    Here are their arguments, types and descriptions, as editors, type checkers and ``help`` show
    them; :class:`JobRunner`, :class:`BeamSearches` and :class:`Stepping` run them.
    """

    _job_maker: JobMaker
    _job_runner: JobRunner
    _beam_searches: BeamSearches
    _stepping: Stepping

    # ---- batches ---------------------------------------------------------------------------------

    @overload
    def generate(
        self,
        prompts: PromptLike | Sequence[PromptLike],
        sampling_params: ParamsLike = None,
        *,
        returns: None = None,
        lora_request: LoRAsLike = None,
        priority: int | Sequence[int] | None = None,
        use_tqdm: bool = True,
    ) -> list[RequestOutput]: ...
    @overload
    def generate(
        self,
        prompts: PromptLike | Sequence[PromptLike],
        sampling_params: ParamsLike = None,
        *,
        returns: type[T] | Mapping[str, Any],
        lora_request: LoRAsLike = None,
        priority: int | Sequence[int] | None = None,
        use_tqdm: bool = True,
    ) -> list[ParsedOutput[T]]: ...
    @names_keywords
    def generate(
        self,
        prompts: PromptLike | Sequence[PromptLike],
        sampling_params: ParamsLike = None,
        *,
        returns: Any = None,
        lora_request: LoRAsLike = None,
        priority: int | Sequence[int] | None = None,
        use_tqdm: bool = True,
    ) -> Any:
        """Complete all prompts and wait; returns one output per prompt, in their order.

        ``sampling_params``: one for all prompts or one for each (default: the model's own).
        ``returns``: a Python type or a JSON schema; ``output.parsed`` is then a value of it.
        Ctrl-C, or any exception raised here, aborts this call's requests and no others.

        :raises RequestError: before anything runs, if a prompt or a parameter is invalid.
        :raises EngineDeadError: a worker died.
        :raises EngineClosedError: during or after ``close``.
        """
        batch = self._job_maker.read(prompts, sampling_params, returns, lora_request)
        return self._job_runner.run("generate", batch, priority, use_tqdm)

    @overload
    def chat(
        self,
        messages: Sequence[Message] | Sequence[Sequence[Message]],
        sampling_params: ParamsLike = None,
        *,
        tools: Sequence[ToolLike],
        tool_choice: str | Mapping[str, Any] = "auto",
        lora_request: LoRAsLike = None,
        priority: int | Sequence[int] | None = None,
        use_tqdm: bool = True,
        **template: Any,
    ) -> list[MessageOutput]: ...
    @overload
    def chat(
        self,
        messages: Sequence[Message] | Sequence[Sequence[Message]],
        sampling_params: ParamsLike = None,
        *,
        returns: type[T] | Mapping[str, Any],
        lora_request: LoRAsLike = None,
        priority: int | Sequence[int] | None = None,
        use_tqdm: bool = True,
        **template: Any,
    ) -> list[ParsedOutput[T]]: ...
    @overload
    def chat(
        self,
        messages: Sequence[Message] | Sequence[Sequence[Message]],
        sampling_params: ParamsLike = None,
        *,
        lora_request: LoRAsLike = None,
        priority: int | Sequence[int] | None = None,
        use_tqdm: bool = True,
        **template: Any,
    ) -> list[RequestOutput]: ...
    def chat(
        self,
        messages: Sequence[Message] | Sequence[Sequence[Message]],
        sampling_params: ParamsLike = None,
        *,
        returns: Any = None,
        lora_request: LoRAsLike = None,
        priority: int | Sequence[int] | None = None,
        use_tqdm: bool = True,
        **template: Any,
    ) -> Any:
        """Like :meth:`generate`, for one or more conversations, through the model's chat template.

        ``template``: ``add_generation_prompt``, ``continue_final_message``, ``chat_template``,
        ``chat_template_kwargs``, ``cache_salt``; ``tools`` (functions, dicts or ``Tool`` objects;
        then ``output.message`` has the text, the reasoning and the tool calls), ``tool_choice``,
        ``parallel_tool_calls``, ``tool_format``.
        """
        given = sampling_params, template, returns, lora_request
        batch = self._job_maker.read_chats("chat", messages, *given)
        return self._job_runner.run("chat", batch, priority, use_tqdm)

    def run_tools(
        self,
        messages: Sequence[Message],
        tools: Sequence[ToolLike],
        sampling_params: SamplingParams | None = None,
        *,
        max_turns: int = 8,
        tool_choice: str | Mapping[str, Any] = "auto",
        on_error: Literal["message", "raise"] = "message",
        lora_request: LoRALike | None = None,
        **template: Any,
    ) -> ToolRun:
        """Chat, call the functions the model asks for, and go on until it answers without a call.

        ``tool_choice`` holds for the first answer. See :func:`sdk.tools.run_tools`.
        """
        turns = self._tool_turns(tools, tool_choice, sampling_params, template, lora_request)
        self._job_runner.advice.blocking("run_tools")
        return turns.run(self.chat, messages, max_turns, on_error)

    @names_keywords
    def beam_search(
        self,
        prompts: PromptLike | Sequence[PromptLike],
        params: BeamSearchParams,
        *,
        lora_request: LoRALike | None = None,
        use_tqdm: bool = True,
    ) -> list[BeamSearchOutput]:
        """Search each prompt's most probable answers; returns ``beam_width`` of each, best first.

        :raises RequestError: a prompt or a parameter is invalid, or logits are not finite.
        """
        work = self._beam_searches.search(prompts, params, use_tqdm, lora_request)
        return self._job_runner.do("beam_search", work)

    @overload
    def as_completed(
        self,
        prompts: PromptLike | Iterable[PromptLike | Sequence[Message]],
        sampling_params: SamplingParams | None = None,
        *,
        tools: Sequence[ToolLike],
        tool_choice: str | Mapping[str, Any] = "auto",
        lora_request: LoRALike | None = None,
        priority: int | None = None,
        **template: Any,
    ) -> AsCompleted[MessageOutput]: ...
    @overload
    def as_completed(
        self,
        prompts: PromptLike | Iterable[PromptLike | Sequence[Message]],
        sampling_params: SamplingParams | None = None,
        *,
        returns: type[T] | Mapping[str, Any],
        lora_request: LoRALike | None = None,
        priority: int | None = None,
        **template: Any,
    ) -> AsCompleted[ParsedOutput[T]]: ...
    @overload
    def as_completed(
        self,
        prompts: PromptLike | Iterable[PromptLike | Sequence[Message]],
        sampling_params: SamplingParams | None = None,
        *,
        lora_request: LoRALike | None = None,
        priority: int | None = None,
        **template: Any,
    ) -> AsCompleted[RequestOutput]: ...
    def as_completed(
        self,
        prompts: PromptLike | Iterable[PromptLike | Sequence[Message]],
        sampling_params: SamplingParams | None = None,
        *,
        returns: Any = None,
        lora_request: LoRALike | None = None,
        priority: int | None = None,
        **template: Any,
    ) -> AsCompleted[Any]:
        """Answer many prompts or conversations: ``for index, output in llm.as_completed(...)``, and
        ``async for`` in an event loop. Pairs come in the order in which answers end.

        ``prompts``: any iterable, also a generator; it is read ``2 * max_num_seqs`` ahead of the
        answers, so that what has ended can be stored while the rest runs. Leaving the loop aborts
        the rest. ``template``: for conversations, as in :meth:`chat`.

        :raises RequestError: in the loop, for an invalid prompt, with its index; unfinished ones
            are aborted then.
        """
        return self._job_runner.as_completed(
            prompts, sampling_params, priority, template, returns, lora_request
        )

    # ---- streams ---------------------------------------------------------------------------------

    @overload
    def stream(
        self,
        prompt: Sequence[Message],
        sampling_params: SamplingParams | None = None,
        *,
        tools: Sequence[ToolLike],
        tool_choice: str | Mapping[str, Any] = "auto",
        lora_request: LoRALike | None = None,
        priority: int | None = None,
        **template: Any,
    ) -> Iterator[MessageOutput]: ...
    @overload
    def stream(
        self,
        prompt: PromptLike | Sequence[Message],
        sampling_params: SamplingParams | None = None,
        *,
        returns: type[T] | Mapping[str, Any],
        lora_request: LoRALike | None = None,
        priority: int | None = None,
        **template: Any,
    ) -> Iterator[ParsedOutput[T]]: ...
    @overload
    def stream(
        self,
        prompt: PromptLike | Sequence[Message],
        sampling_params: SamplingParams | None = None,
        *,
        lora_request: LoRALike | None = None,
        priority: int | None = None,
        **template: Any,
    ) -> Iterator[RequestOutput]: ...
    def stream(
        self,
        prompt: PromptLike | Sequence[Message],
        sampling_params: SamplingParams | None = None,
        *,
        returns: Any = None,
        lora_request: LoRALike | None = None,
        priority: int | None = None,
        **template: Any,
    ) -> Iterator[Any]:
        """Yield the answer to one prompt or conversation piece by piece; ``text`` is the new part.

        ``output_kind=FINAL_ONLY`` yields the whole answer once, at its end. The request starts
        right away. Leaving the loop early aborts it. With ``returns``, ``outputs[0].partial`` is
        the value so far; with ``tools``, ``outputs[0].delta`` is what is new in the message.
        """
        return self._job_runner.stream(
            prompt, sampling_params, priority, template, returns, lora_request
        )

    # ---- async twins -----------------------------------------------------------------------------

    @names_keywords
    async def agenerate(
        self,
        prompts: PromptLike | Sequence[PromptLike],
        sampling_params: ParamsLike = None,
        *,
        returns: Any = None,
        lora_request: LoRAsLike = None,
        priority: int | Sequence[int] | None = None,
    ) -> list[Any]:
        """:meth:`generate` for an event loop; cancelling the task aborts its requests.

        Long prompts are tokenized in a thread, so that the loop goes on meanwhile.
        """
        read = partial(self._job_maker.read, prompts, sampling_params, returns, lora_request)
        return await self._job_runner.abatch(read, prompts, sampling_params, priority, lora_request)

    async def achat(
        self,
        messages: Sequence[Message] | Sequence[Sequence[Message]],
        sampling_params: ParamsLike = None,
        *,
        returns: Any = None,
        lora_request: LoRAsLike = None,
        priority: int | Sequence[int] | None = None,
        **template: Any,
    ) -> list[Any]:
        """:meth:`chat` for an event loop."""
        given = sampling_params, template, returns, lora_request
        read = partial(self._job_maker.read_chats, "achat", messages, *given)
        return await self._job_runner.abatch(
            read, messages, sampling_params, priority, lora_request
        )

    async def arun_tools(
        self,
        messages: Sequence[Message],
        tools: Sequence[ToolLike],
        sampling_params: SamplingParams | None = None,
        *,
        max_turns: int = 8,
        tool_choice: str | Mapping[str, Any] = "auto",
        on_error: Literal["message", "raise"] = "message",
        lora_request: LoRALike | None = None,
        **template: Any,
    ) -> ToolRun:
        """:meth:`run_tools` for an event loop; coroutine functions of one answer run together."""
        turns = self._tool_turns(tools, tool_choice, sampling_params, template, lora_request)
        return await turns.arun(self.achat, messages, max_turns, on_error)

    def _tool_turns(
        self,
        tools: Sequence[ToolLike],
        tool_choice: str | Mapping[str, Any],
        sampling_params: SamplingParams | None,
        template: dict[str, Any],
        lora_request: LoRALike | None,
    ) -> ToolTurns:
        from sdk.requests.answer_formats import ToolTurns

        return ToolTurns(tools, tool_choice, sampling_params, template, lora_request)

    def astream(
        self,
        prompt: PromptLike | Sequence[Message],
        sampling_params: SamplingParams | None = None,
        *,
        returns: Any = None,
        lora_request: LoRALike | None = None,
        priority: int | None = None,
        **template: Any,
    ) -> AnswerStream:
        """:meth:`stream` for an event loop: ``async for piece in llm.astream(...)``.

        The call itself rejects an invalid request. The request starts when the first piece is
        awaited. A long prompt is tokenized and checked in a thread, with the first piece or by
        ``stream = await llm.astream(...)``.
        """
        return self._job_runner.astream(
            "astream", prompt, sampling_params, priority, template, returns, lora_request
        )

    # ---- stepping by hand ------------------------------------------------------------------------

    def enqueue(
        self,
        prompts: PromptLike | Sequence[Message] | Sequence[PromptLike | Sequence[Message]],
        sampling_params: ParamsLike = None,
        *,
        lora_request: LoRAsLike = None,
        priority: int | Sequence[int] | None = None,
        request_id: str | Sequence[str] | None = None,
        **template: Any,
    ) -> list[str]:
        """Queue prompts or conversations and return their request ids at once.

        Nothing runs until :meth:`step`, :meth:`pump` or :meth:`wait_for_completion` is called (or
        another call keeps the engine running). ``request_id``: your own ids, one for each
        prompt. ``template``: for conversations, as in :meth:`chat`.

        :raises RequestError: an invalid request, or an id that belongs to a request that is
            unfinished or whose last output has not been collected.
        """
        return self._stepping.enqueue(
            prompts, sampling_params, priority, request_id, template, lora_request
        )

    def wait_for_completion(self) -> list[RequestOutput]:
        """Finish all requests enqueued so far; final outputs in the order of enqueueing.

        Requests that other threads enqueue meanwhile are left for the next call. If a request
        fails, its error is raised and the next call returns the others. Ctrl-C aborts the
        requests; the next call returns what they had generated.
        """
        self._job_runner.advice.blocking("wait_for_completion")
        return self._stepping.wait_for_completion()

    def step(self) -> list[RequestOutput]:
        """Run one engine step in this thread; return the new outputs of enqueued requests.

        Some outputs may come from steps of other threads. Outputs that other threads wait for are
        not returned here. If there is nothing to return and a request has failed, its error is
        raised. An exception of a signal handler in the middle of a step may end the engine.
        """
        return self._stepping.step()

    def pump(self, max_ms: float) -> list[RequestOutput]:
        """Run steps for about ``max_ms`` milliseconds, for a host that draws frames.

        Runs as many steps as should end in time, with as much of a waiting prompt as fits. The
        time of a step is predicted from the steps before; the first steps are small. At least one
        step runs if there is work, unless another thread is always inside a step. Returns early
        when there is no work. A step in progress is not interrupted.

        :raises RequestError: ``max_ms`` is negative or not a number.
        """
        return self._stepping.pump(max_ms)

    @property
    def has_unfinished_requests(self) -> bool:
        """Whether a step would do or return anything."""
        return self._stepping.has_unfinished_requests

    def abort(self, request_id: str | Sequence[str]) -> None:
        """End requests with ``finish_reason="abort"``; unknown and finished ids are ignored."""
        self._stepping.abort(request_id)
