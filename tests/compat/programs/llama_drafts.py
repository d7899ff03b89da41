"""Drafts from the prompt: the same answer."""

import sys

from llama_cpp import Llama
from llama_cpp.llama_speculative import LlamaPromptLookupDecoding

MODEL = sys.argv[1]

text = "the cat sat on the mat and the cat sat on the"
plain = Llama(model_path=MODEL, n_ctx=128, verbose=False)
expected = plain(text, max_tokens=12, temperature=0.0)
drafting = Llama(
    model_path=MODEL,
    n_ctx=128,
    draft_model=LlamaPromptLookupDecoding(num_pred_tokens=2),
    verbose=False,
)
found = drafting(text, max_tokens=12, temperature=0.0)
assert found["choices"][0]["text"] == expected["choices"][0]["text"]
RESULTS = {"found": found}
