"""Vectors: one for each token, and one for each text."""

import sys

from llama_cpp import Llama

MODEL = sys.argv[1]

tokens = Llama(model_path=MODEL, n_ctx=128, embedding=True, verbose=False)
each = tokens.create_embedding("the cat sat")
assert len(each["data"][0]["embedding"]) == each["usage"]["prompt_tokens"]

mean = Llama(model_path=MODEL, n_ctx=128, embedding=True, pooling_type=1, verbose=False)
both = mean.create_embedding(["the cat sat", "a dog ran"])
assert len(both["data"][1]["embedding"]) == mean.n_embd()
unit = mean.embed("the cat sat", normalize=True)
assert abs(sum(x * x for x in unit) - 1) < 1e-3
RESULTS = {"each": each, "both": both}
