"""Prompts and jobs of a fake LLM: each job carries its scripted answers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

from sdk.api.lora import KnownAdapter, LoRARequest
from sdk.api.params import SamplingParams
from sdk.engine.job import Job
from sdk.engine.plan import Pooling, RequestKind
from sdk.engine.scheduling.results import ResultBudget
from sdk.requests.adapters import Adapters
from sdk.requests.job_maker import JobMaker
from sdk.requests.prompts.kinds import ChatOptions, Message
from sdk.requests.prompts.reader import Prompt, PromptReader
from sdk.testing.fake_executor import HIDDEN_SIZE
from sdk.testing.fake_tokenizer import END, VOCAB_SIZE
from sdk.testing.script import Asked, FakeAnswer, FakeRequest, Script, ScriptedParams


@dataclass(frozen=True, slots=True)
class _AskedPrompt(Prompt):
    """A rendered conversation that remembers its messages."""

    messages: Sequence[Message] = ()


class FakeReader(PromptReader):
    def read_chat(
        self, messages: Sequence[Message], params: SamplingParams, options: ChatOptions
    ) -> Prompt:
        prompt = super().read_chat(messages, params, options)
        values = {field.name: getattr(prompt, field.name) for field in fields(Prompt)}
        copied = [dict(message) for message in messages]  # callers append to their lists
        return _AskedPrompt(**values, messages=copied)


class ScriptedJobs(JobMaker):
    """Makes jobs that carry their answers."""

    def __init__(
        self,
        reader: PromptReader,
        default: SamplingParams,
        script: Script,
        clock: Callable[[], float],
        max_model_len: int,
    ) -> None:
        super().__init__(
            reader,
            default,
            vocab_size=VOCAB_SIZE,
            eos_token_ids=frozenset({END}),
            max_model_len=max_model_len,
            results=ResultBudget.for_plan(0, VOCAB_SIZE, HIDDEN_SIZE),
            adapters=Adapters(_unopened, None),
        )
        self._tokenizer = reader.need_tokenizer("FakeLLM")
        self._script = script
        self._clock = clock
        self.accepted: list[FakeRequest] = []

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
        # The script decides the answer: a structure needs no grammar, and nothing is drawn again.
        plain = [_unconstrained(p) for p in params]
        how: dict[str, Any] = {"priority": priority, "kind": kind, "pooling": pooling}
        jobs = super().make(prompts, plain, request_ids=request_ids, **how)
        asked = [self._asked(prompt) for prompt in prompts]
        if kind == "generate":
            jobs = [self._scripted(job, one) for job, one in zip(jobs, asked, strict=True)]
        self.accepted += [
            FakeRequest(one, p, kind, None if job.adapter is None else job.adapter.lora_request)
            for one, p, job in zip(asked, params, jobs, strict=True)
        ]
        now = self._clock()
        return [replace(job, arrival_time=now) for job in jobs]

    def _asked(self, prompt: Prompt) -> Asked:
        if isinstance(prompt, _AskedPrompt):
            return prompt.messages
        return self._tokenizer.decode(prompt.token_ids) if prompt.text is None else prompt.text

    def _scripted(self, job: Job, asked: Asked) -> Job:
        answers = [self._script.next(asked) for _ in range(job.params.num_answers)]
        read = tuple((self._tokens(answer), answer.error) for answer in answers)
        params = job.params
        if any(answer.finish_reason == "length" for answer in answers):
            lengths = {len(tokens) for tokens, _ in read}
            if len(lengths) > 1:
                raise AssertionError(
                    "FakeLLM: finish_reason 'length': expected answers of the same number of "
                    f"tokens for one request, found {sorted(lengths)}"
                )
            least = min(lengths.pop(), params.max_tokens or VOCAB_SIZE)
            params = params.clone(max_tokens=least, min_tokens=min(params.min_tokens, least))
        resolved = job.spec.resolved
        values = {field.name: getattr(resolved, field.name) for field in fields(resolved)}
        return job.with_spec(params=params, resolved=ScriptedParams(**values, answers=read))

    def _tokens(self, answer: FakeAnswer) -> tuple[int, ...]:
        return tuple(self._tokenizer.encode(answer.written, False, False))


def _unopened(request: LoRARequest) -> KnownAdapter:
    """An adapter whose files are not looked at: a script knows what it answers."""
    key = f"{request.lora_name} {request.lora_path}"
    return KnownAdapter(request, key, rank=0, nbytes=0, read_bytes=0, read=lambda: None)


def _unconstrained(params: SamplingParams) -> SamplingParams:
    if params.structure is None and not params.banned_strings:
        return params
    return params.clone(structured_outputs=None, guided_decoding=None, banned_strings=())
