"""The logits of a GGUF file in llama.cpp."""

import llama_cpp
import numpy as np
from each import each


def read(job: dict) -> None:
    options = {"n_ctx": 64, "n_threads": 2, "logits_all": True, "verbose": False}
    model = llama_cpp.Llama(job["folder"], **options)
    model.eval(job["prompt"])
    logits = np.array(model.scores[: len(job["prompt"])], dtype=np.float32)
    np.savez(job["out"], logits=logits)


each(read)
