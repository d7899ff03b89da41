"""Texts: echo, stop strings, log-probabilities, streams, tokens."""

import sys

from llama_cpp import Llama, LogitsProcessorList, StoppingCriteriaList

MODEL = sys.argv[1]

llm = Llama(model_path=MODEL, n_ctx=128, logits_all=True, verbose=False)
plain = llm("the cat sat on", max_tokens=6, temperature=0.0, echo=True, stop=["Q:"])
assert plain["choices"][0]["text"].startswith("the cat sat on")
assert plain["usage"]["prompt_tokens"] == len(llm.tokenize(b"the cat sat on"))

scored = llm.create_completion("the cat", max_tokens=3, temperature=0.0, logprobs=2)
assert len(scored["choices"][0]["logprobs"]["tokens"]) <= 3

chunks = list(llm("the cat sat on", max_tokens=6, temperature=0.0, stream=True))
text = "".join(chunk["choices"][0]["text"] for chunk in chunks)
assert "the cat sat on" + text == plain["choices"][0]["text"]
assert chunks[-1]["choices"][0]["finish_reason"] in ("stop", "length")

first = llm("a dog", max_tokens=8, seed=5)["choices"][0]["text"]
assert llm("a dog", max_tokens=8, seed=5)["choices"][0]["text"] == first

wanted = llm.tokenize(b"t", add_bos=False)[-1]


def only(ids, scores):
    scores[:] = -1e9
    scores[wanted] = 0.0
    return scores


prompt = llm.tokenize(b"a dog")
end = len(prompt) + 2
stopped = llm(
    prompt,
    max_tokens=9,
    logits_processor=LogitsProcessorList([only]),
    stopping_criteria=StoppingCriteriaList([lambda ids, scores: len(ids) >= end]),
)
assert stopped["usage"]["completion_tokens"] == 2
assert stopped["choices"][0]["finish_reason"] == "stop"
assert llm.detokenize(llm.tokenize(b"the cat", add_bos=False)).strip() == b"the cat"
RESULTS = {
    "plain": plain,
    "scored": scored,
    "chunk": chunks[0],
    "last": chunks[-1],
    "facts": [llm.n_ctx(), llm.n_vocab(), llm.n_embd(), llm.token_bos(), llm.token_eos()],
}
llm.close()
