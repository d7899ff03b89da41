"""Runs beam searches: each step of all prompts' beams is one batch of one-token requests.

A request's pages stay in the prefix cache, so the next step finds those of its beam.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from sdk.api.beam_search import (
    Beam,
    Beams,
    BeamSearchOutput,
    BeamSearchParams,
    BeamSearchSequence,
    Finished,
)
from sdk.api.config import ProgressCallback
from sdk.api.errors import RequestError
from sdk.api.load_progress import reporting
from sdk.api.logprobs import Logprobs
from sdk.api.outputs import RequestOutput
from sdk.api.params import MAX_LOGPROBS, SamplingParams
from sdk.engine.job import Job
from sdk.quant.safe_repr import safe_repr
from sdk.requests.job_maker import JobMaker
from sdk.requests.job_runner import BatchedCall, JobBatch
from sdk.requests.prompts.reader import Prompt, PromptReader


class BeamSearches:
    """The beam searches of one ``LLM``."""

    def __init__(
        self,
        job_maker: JobMaker,
        reader: PromptReader,
        eos_token_ids: frozenset[int],
        max_model_len: int,
        on_progress: ProgressCallback | None,
    ) -> None:
        self._job_maker = job_maker
        self._reader = reader
        self._eos_token_ids = eos_token_ids
        self._max_model_len = max_model_len
        self._on_progress = on_progress

    def search(
        self, prompts: Any, params: BeamSearchParams, use_tqdm: bool = False, lora: Any = None
    ) -> BatchedCall[list[BeamSearchOutput]]:
        """See :meth:`sdk.LLM.beam_search`."""
        if not isinstance(params, BeamSearchParams):
            raise RequestError(f"params: expected BeamSearchParams, found {safe_repr(params)}")
        read = self._job_maker.read(prompts, None, None, lora).prompts
        if any(prompt.embeds is not None for prompt in read):
            raise RequestError("beam_search: expected prompts of tokens, found prompt_embeds")
        images = self._reader.images
        if images is not None and images.whole_prompts and any(one.images for one in read):
            raise RequestError(
                "beam_search: expected prompts without images, found one: the tokens of a prompt "
                "with images see each other both ways in this model, those of an answer do not"
            )
        searches = [
            Beams(
                params,
                self._eos_token_ids | prompt.stop_token_ids,
                self._max_model_len - len(prompt.token_ids),
            )
            for prompt in read
        ]
        bar = use_tqdm and len(read) > 1
        with reporting("beam_search", "prompt", self._on_progress, bar=bar) as report:
            open_ = list(zip(read, searches, strict=True))
            while open_:
                jobs = self._jobs_of_step(open_)
                rows = map(_candidates, (yield JobBatch(jobs)))
                for _, beams in open_:
                    beams.advance([next(rows) for _ in beams.running])
                open_ = [one for one in open_ if not one[1].done]
                report(len(read) - len(open_), len(read))
        return [self._output(*one) for one in zip(read, searches, strict=True)]

    def _jobs_of_step(self, searches: Sequence[tuple[Prompt, Beams]]) -> list[Job]:
        """Requests for one token more for all beams of all prompts."""
        count = min(max(beams.num_candidates for _, beams in searches), MAX_LOGPROBS)
        params = SamplingParams(
            temperature=0, max_tokens=1, logprobs=count, ignore_eos=True, detokenize=False
        )
        prompts = [
            Prompt(
                (*prompt.token_ids, *beam.tokens),
                cache_salt=prompt.cache_salt,
                adapter=prompt.adapter,
                images=prompt.images,
            )
            for prompt, beams in searches
            for beam in beams.running
        ]
        return self._job_maker.make(prompts, [params] * len(prompts))

    def _output(self, prompt: Prompt, beams: Beams) -> BeamSearchOutput:
        return BeamSearchOutput([self._sequence(prompt, one) for one in beams.finished])

    def _sequence(self, prompt: Prompt, finished: Finished) -> BeamSearchSequence:
        beam: Beam = finished.beam
        tokens = [*prompt.token_ids, *beam.tokens]
        tokenizer, last = self._reader.tokenizer, beam.tokens[-1]
        other = finished.ended and last not in self._eos_token_ids
        return BeamSearchSequence(
            tokens,
            list(beam.logprobs),
            beam.cum_logprob,
            finished.score,
            None if tokenizer is None else tokenizer.decode(tokens, skip_special_tokens=False),
            "stop" if finished.ended else "length",
            last if other else None,
        )


def _candidates(output: object) -> Logprobs:
    """The best next tokens. :raises RequestError: the request failed; says why."""
    assert isinstance(output, RequestOutput)
    [answer] = output.outputs
    if not answer.logprobs:
        raise RequestError(
            f"beam_search: a beam ended with {answer.finish_reason}: {answer.stop_reason}"
        )
    return answer.logprobs[0]
