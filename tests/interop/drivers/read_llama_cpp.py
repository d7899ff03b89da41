"""The logits of a GGUF file in llama.cpp, and its tokens of some texts."""

import json
import sys
from pathlib import Path

import llama_cpp
import numpy as np

job = json.loads(Path(sys.argv[1]).read_text())
model = llama_cpp.Llama(job["folder"], n_ctx=64, n_threads=2, logits_all=True, verbose=False)
model.eval(job["prompt"])
logits = np.array(model.scores[: len(job["prompt"])], dtype=np.float32)
np.savez(job["out"], logits=logits)
