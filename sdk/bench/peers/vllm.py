"""vLLM, stepped through its own engine; environment variables set its threads."""

from __future__ import annotations

import time

from .opening import Opening
from .timing import Timing

#: Keys and values have the model's type.
KV = ("auto",)


class Vllm:
    def __init__(self, opening: Opening) -> None:
        from vllm import LLM, __version__

        dtype = "bfloat16" if opening.engine.endswith("-bf16") else "float32"
        start = time.perf_counter()
        self.llm = LLM(
            opening.model,
            dtype=dtype,
            skip_tokenizer_init=True,
            max_num_seqs=opening.requests,
            max_model_len=opening.context,
            enable_prefix_caching=opening.prefix_cache,
        )
        self.count = 0
        self.hello = {
            "name": f"vLLM {__version__} {dtype}",
            "kv": dtype,
            "vocab_size": self.llm.llm_engine.model_config.get_vocab_size(),
            "open_s": time.perf_counter() - start,
        }

    def measure(self, prompts: list[list[int]], output_len: int) -> dict[str, float]:
        from vllm import SamplingParams
        from vllm.sampling_params import RequestOutputKind

        params = SamplingParams(
            temperature=0,
            max_tokens=output_len,
            ignore_eos=True,
            detokenize=False,
            output_kind=RequestOutputKind.DELTA,
        )
        engine = self.llm.llm_engine
        timing = Timing(len(prompts))
        for prompt in prompts:
            self.count += 1
            engine.add_request(str(self.count), {"prompt_token_ids": prompt}, params)
        while engine.has_unfinished_requests():
            outputs = engine.step()
            timing.step([(o.request_id, len(o.outputs[0].token_ids), o.finished) for o in outputs])
        return timing.times()
