"""This package's worker for the bench: ``peer.py``'s protocol around an ``LLM``."""

from __future__ import annotations

import re
import time
from typing import TYPE_CHECKING

from sdk import __version__
from sdk.cli.bench.peer import serve

if TYPE_CHECKING:
    from sdk.llm import LLM


class OwnEngine:
    """An ``LLM`` stepped by hand."""

    def __init__(
        self,
        engine: str,
        model: str,
        threads: int,
        requests: int,
        context: int,
        kv: str,
        prefix_cache: bool,
        ranks: int = 1,
        stages: int = 1,
        replicas: int = 1,
    ) -> None:
        from sdk.llm import LLM

        start = time.perf_counter()
        # Twice the request slots, so twice the pages: without spare pages the scheduler holds the
        # last prompts back until others end, and the requests would not run concurrently.
        self._llm: LLM = LLM(
            model,
            num_threads=threads,
            tensor_parallel_size=ranks,
            pipeline_parallel_size=stages,
            data_parallel_size=replicas,
            max_num_seqs=2 * requests,
            max_model_len=context,
            enable_prefix_caching=prefix_cache,
            kv_cache_dtype=kv,
        )
        self.hello = {
            "name": f"{engine} {__version__}"
            + (f", {ranks} ranks" if ranks > 1 else "")
            + (f", {stages} stages" if stages > 1 else "")
            + (f", {replicas} replicas" if replicas > 1 else ""),
            "kv": str(self._llm.memory_plan.kv_dtype),
            "vocab_size": self._llm.model_config.vocab_size,
            "open_s": time.perf_counter() - start,
        }

    def measure(self, prompts: list[list[int]], output_len: int) -> dict[str, float]:
        """Decoding is timed from the first token of the last request to the end of the first."""
        from sdk.params import RequestOutputKind, SamplingParams

        params = SamplingParams(
            temperature=0,
            max_tokens=output_len,
            ignore_eos=True,
            detokenize=False,
            output_kind=RequestOutputKind.DELTA,
        )
        start = time.perf_counter()
        waiting = set(self._llm.enqueue([{"prompt_token_ids": p} for p in prompts], params))
        left = set(waiting)
        prefilled = ended = start
        tokens = 0
        begun = self._llm.get_metrics()
        while left:
            outputs = self._llm.step()
            now = time.perf_counter()
            all_run = not waiting and len(left) == len(prompts)
            made = 0
            for output in outputs:
                made += len(output.outputs[0].token_ids)
                waiting.discard(output.request_id)
                if output.finished:
                    left.discard(output.request_id)
            if all_run:
                tokens += made
                ended = now
            elif not waiting and prefilled == start:
                prefilled = ended = now
                begun = self._llm.get_metrics()
        found = {
            "prefill_s": prefilled - start,
            "decode_s": ended - prefilled,
            "decode_tokens": tokens,
        }
        if bubble := _bubble(begun, self._llm.get_metrics()):
            found["bubble"] = bubble
        return found


def _bubble(begun: dict[str, float], ended: dict[str, float]) -> float:
    """The share of the time between two readings of metrics in which a stage did not compute."""
    names = [name for name in begun if re.fullmatch(r"stage_\d+_seconds", name)]
    passed = len(names) * (ended.get("pipeline_seconds", 0.0) - begun.get("pipeline_seconds", 0.0))
    return 1.0 - sum(ended[name] - begun[name] for name in names) / passed if passed else 0.0


if __name__ == "__main__":
    serve(OwnEngine)
