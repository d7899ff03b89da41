"""Vectors of texts, and how well they match."""

import sys

from vllm import LLM, PoolingParams

MODEL = sys.argv[1]

llm = LLM(model=MODEL, runner="pooling", convert="embed", max_model_len=128, enforce_eager=True)
texts = ["the cat sat", "a dog ran away"]
outputs = llm.embed(texts)
for output in outputs:
    assert output.outputs.hidden_size == len(output.outputs.embedding)
    assert abs(sum(x * x for x in output.outputs.embedding) - 1) < 1e-2
raw = llm.embed(texts[:1], pooling_params=PoolingParams(use_activation=False), use_tqdm=False)
pooled = llm.encode(texts[:1], pooling_task="embed")
assert pooled[0].outputs.data.shape == (outputs[0].outputs.hidden_size,)
scores = llm.score(texts[0], texts)
assert abs(scores[0].outputs.score - 1) < 1e-2
RESULTS = {"embed": outputs[0], "raw": raw[0], "pooled": pooled[0], "score": scores[1]}
