"""A conversation, whole and in pieces."""

import sys

from llama_cpp import Llama

MODEL = sys.argv[1]

llm = Llama(model_path=MODEL, n_ctx=256, logits_all=True, verbose=False)
messages = [
    {"role": "system", "content": "You describe pictures."},
    {"role": "user", "content": "What is in this one?"},
]
answer = llm.create_chat_completion(messages=messages, temperature=0.0, max_tokens=6)
assert answer["choices"][0]["message"]["role"] == "assistant"
scored = llm.create_chat_completion(
    messages, temperature=0.0, max_tokens=2, logprobs=True, top_logprobs=2
)
chunks = list(llm.create_chat_completion(messages, temperature=0.0, max_tokens=6, stream=True))
deltas = [chunk["choices"][0]["delta"] for chunk in chunks]
assert deltas[0] == {"role": "assistant"}
assert deltas[-1] == {}
text = "".join(delta.get("content", "") for delta in deltas)
assert text == answer["choices"][0]["message"]["content"]
RESULTS = {"answer": answer, "scored": scored, "first": chunks[0], "last": chunks[-1]}
if len(chunks) > 2:
    RESULTS["middle"] = chunks[1]
