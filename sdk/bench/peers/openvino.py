"""OpenVINO GenAI on a CPU, stepped through its pipeline for several requests."""

from __future__ import annotations

import time
from importlib.metadata import version
from typing import Any

from .opening import Opening
from .timing import Timing

#: Prompt tokens of a step: as many as llama.cpp gets.
BATCH = 512
#: Tokens of a page of keys and values, fixed on a CPU.
_PAGE = 32
#: Its own default on a CPU is u8.
KV = {
    "auto": "", "float16": "f16", "bfloat16": "bf16", "float32": "f32", "int16": "f16",
    "int8": "u8", "int4": "u4",
}  # fmt: skip


class OpenVino:
    def __init__(self, opening: Opening) -> None:
        import openvino
        import openvino_genai

        start = time.perf_counter()
        self.openvino, self.api = openvino, openvino_genai
        limits = openvino_genai.SchedulerConfig()
        limits.max_num_seqs = opening.requests
        limits.max_num_batched_tokens = BATCH
        # Twice the pages that the requests fill: without spare ones the last prompts would wait.
        limits.num_kv_blocks = 2 * opening.requests * (opening.context // _PAGE + 1)
        limits.enable_prefix_caching = opening.prefix_cache
        options: dict[str, Any] = {"INFERENCE_NUM_THREADS": opening.threads}
        if opening.engine.endswith("-f32"):
            options["INFERENCE_PRECISION_HINT"] = "f32"
        if KV[opening.kv]:
            options["KV_CACHE_PRECISION"] = KV[opening.kv]
        self.pipeline = openvino_genai.ContinuousBatchingPipeline(
            opening.model, limits, "CPU", options
        )
        core = openvino.Core()
        # bf16 where the CPU multiplies that, although the file's values do not all fit it.
        computes = (
            options.get("INFERENCE_PRECISION_HINT")
            or core.get_property("CPU", "INFERENCE_PRECISION_HINT").to_string()
        )
        self.count = 0
        self.hello = {
            "name": f"OpenVINO GenAI {version('openvino-genai')} {computes}",
            "kv": KV[opening.kv] or core.get_property("CPU", "KV_CACHE_PRECISION").to_string(),
            "vocab_size": len(self.pipeline.get_tokenizer().get_vocab()),
            "open_s": time.perf_counter() - start,
        }

    def measure(self, prompts: list[list[int]], output_len: int) -> dict[str, float]:
        import numpy

        params = self.api.GenerationConfig()
        params.do_sample = False
        params.max_new_tokens = output_len
        params.ignore_eos = True
        timing = Timing(len(prompts))
        handles = []
        for prompt in prompts:
            self.count += 1
            ids = self.openvino.Tensor(numpy.array([prompt], numpy.int64))
            handles.append(self.pipeline.add_request(self.count, ids, params))
        finished = self.api.GenerationStatus.FINISHED
        while self.pipeline.has_non_finished_requests():
            self.pipeline.step()
            timing.step(
                [
                    (number, _new_tokens(handle), handle.get_status() == finished)
                    for number, handle in enumerate(handles)
                ]
            )
        return timing.times()


def _new_tokens(handle: Any) -> int:
    """The number of tokens since the last call."""
    found = 0
    while handle.can_read():
        found += sum(len(output.generated_ids) for output in handle.read().values())
    return found
