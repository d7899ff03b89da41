"""A few prompts at once."""

import sys

from vllm import LLM, SamplingParams

MODEL = sys.argv[1]

llm = LLM(model=MODEL, max_model_len=128, enforce_eager=True, disable_log_stats=True)
params = SamplingParams(temperature=0.8, top_p=0.95, seed=1, max_tokens=6, logprobs=2)
texts = ["the cat sat", "a dog ran", "once there was"]
outputs = llm.generate(texts, params)
for text, output in zip(texts, outputs, strict=True):
    assert output.prompt == text
    assert output.outputs[0].finished()
    assert output.finished
    assert output.request_id

default = llm.get_default_sampling_params()
default.max_tokens = 3
[again] = llm.generate({"prompt_token_ids": outputs[0].prompt_token_ids}, default)
assert len(again.outputs[0].token_ids) <= 3

[several] = llm.generate("the cat", SamplingParams(n=2, max_tokens=4, prompt_logprobs=1, seed=3))
assert [one.index for one in several.outputs] == [0, 1]
RESULTS = {"plain": outputs[0], "several": several, "again": again}
