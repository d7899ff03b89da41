"""This package, of the interpreter that runs the worker: this checkout, or another installation."""

from __future__ import annotations

import re
import time
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

from .opening import Opening
from .timing import Timing

if TYPE_CHECKING:
    from sdk.llm import LLM


class Embedlm:
    """An ``LLM`` stepped by hand."""

    def __init__(self, opening: Opening) -> None:
        from sdk import __version__
        from sdk.api.errors import RequestError

        start = time.perf_counter()
        try:
            self._llm = _opened(opening)
        except RequestError as error:
            if not str(error).startswith("max_model_len: expected at most "):
                raise
            # Longer than the model was trained for. The others do not ask; the speed is the same.
            longer = {"max_position_embeddings": opening.context}
            self._llm = _opened(opening, hf_overrides=longer)
        self.hello = {
            "name": f"{opening.engine} {__version__}"
            + (f", {opening.ranks} ranks" if opening.ranks > 1 else "")
            + (f", {opening.stages} stages" if opening.stages > 1 else "")
            + (f", {opening.replicas} replicas" if opening.replicas > 1 else ""),
            "kv": str(self._llm.memory_plan.kv_dtype),
            "vocab_size": self._llm.model_config.vocab_size,
            "open_s": time.perf_counter() - start,
        }

    def measure(self, prompts: list[list[int]], output_len: int) -> dict[str, float]:
        timing = Timing(len(prompts))
        begun: dict[str, float] = {}
        for _ in steps(self._llm, prompts, output_len, timing):
            if timing.decoding and not begun:
                begun = self._llm.get_metrics()
        found = timing.times()
        if bubble := _bubble(begun, self._llm.get_metrics()):
            found["bubble"] = bubble
        return found


def _opened(opening: Opening, **options: Any) -> LLM:
    from sdk.llm import LLM

    # Twice the request slots, so twice the pages: without spare pages the scheduler holds the
    # last prompts back until others end, and the requests would not run concurrently.
    return LLM(
        opening.model,
        device="cpu",  # as the other engines; `embedlm bench gpu` measures cards
        num_threads=opening.threads,
        tensor_parallel_size=opening.ranks,
        pipeline_parallel_size=opening.stages,
        data_parallel_size=opening.replicas,
        max_num_seqs=2 * opening.requests,
        max_model_len=opening.context,
        enable_prefix_caching=opening.prefix_cache,
        kv_cache_dtype=opening.kv,
        **options,
    )


def steps(
    llm: LLM, prompts: Sequence[Sequence[int]], output_len: int, timing: Timing
) -> Iterator[None]:
    """Step until every prompt has its ``output_len`` greedy tokens. Yields after every step, when
    ``timing`` knows what it brought."""
    from sdk.api.params import RequestOutputKind, SamplingParams

    params = SamplingParams(
        temperature=0,
        max_tokens=output_len,
        ignore_eos=True,
        detokenize=False,
        output_kind=RequestOutputKind.DELTA,
    )
    llm.enqueue([{"prompt_token_ids": list(p)} for p in prompts], params)
    while llm.has_unfinished_requests:
        outputs = llm.step()
        timing.step([(o.request_id, len(o.outputs[0].token_ids), o.finished) for o in outputs])
        yield


def _bubble(begun: dict[str, float], ended: dict[str, float]) -> float:
    """The share of the time between two readings of metrics in which a stage did not compute."""
    names = [name for name in begun if re.fullmatch(r"stage_\d+_seconds", name)]
    passed = len(names) * (ended.get("pipeline_seconds", 0.0) - begun.get("pipeline_seconds", 0.0))
    return 1.0 - sum(ended[name] - begun[name] for name in names) / passed if passed else 0.0
