"""Conversations, one and several, with a chat template of their own too."""

import sys

from vllm import LLM
from vllm.sampling_params import SamplingParams

MODEL = sys.argv[1]

llm = LLM(model=MODEL, max_model_len=256, enforce_eager=True)
messages = [
    {"role": "system", "content": "You answer in one word."},
    {"role": "user", "content": "Where is the cat?"},
]
params = SamplingParams(temperature=0.0, max_tokens=5)
[single] = llm.chat(messages, params, use_tqdm=False)
both = llm.chat([messages, messages[1:]], sampling_params=params)
assert both[0].outputs[0].token_ids == single.outputs[0].token_ids
plain = "{% for m in messages %}{{ m.content }} {% endfor %}"
[other] = llm.chat(messages, params, chat_template=plain, add_generation_prompt=False)
assert "Where is the cat?" in other.prompt
RESULTS = {"chat": single, "count": len(both), "template": other}
