"""The most probable answers."""

import sys

from vllm import LLM
from vllm.sampling_params import BeamSearchParams

MODEL = sys.argv[1]

llm = LLM(model=MODEL, max_model_len=128, enforce_eager=True, max_logprobs=64)
prompts = [{"prompt": "the cat sat"}, {"prompt_token_ids": [5, 9, 11]}]
outputs = llm.beam_search(prompts, BeamSearchParams(beam_width=3, max_tokens=4))
for output in outputs:
    scores = [one.cum_logprob for one in output.sequences]
    assert len(scores) == 3
    assert scores[0] == max(scores)
assert outputs[0].sequences[0].text.startswith("the cat sat")
assert outputs[1].sequences[0].tokens[:3] == [5, 9, 11]
first = outputs[0].sequences[0]
RESULTS = {
    "tokens": first.tokens,
    "logprobs": first.logprobs,
    "cum_logprob": first.cum_logprob,
    "text": first.text,
    "lora_request": first.lora_request,
}
