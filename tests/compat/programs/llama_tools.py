"""A call of a function that the program names."""

import json
import sys

from llama_cpp import Llama

MODEL = sys.argv[1]

llm = Llama(model_path=MODEL, n_ctx=384, verbose=False)
tool = {
    "type": "function",
    "function": {
        "name": "set_light",
        "parameters": {
            "type": "object",
            "properties": {"state": {"enum": ["on", "off"]}},
            "required": ["state"],
        },
    },
}
ask = {
    "messages": [{"role": "user", "content": "Light on, please."}],
    "tools": [tool],
    "tool_choice": {"type": "function", "function": {"name": "set_light"}},
    "temperature": 0.0,
    "max_tokens": 100,
}
answer = llm.create_chat_completion(**ask)
[call] = answer["choices"][0]["message"]["tool_calls"]
assert json.loads(call["function"]["arguments"])["state"] in ("on", "off")
assert call["function"]["name"] == "set_light"

chunks = list(llm.create_chat_completion(**ask, stream=True))
text = ""
for chunk in chunks:
    for part in chunk["choices"][0]["delta"]["tool_calls"] or []:
        text += part["function"]["arguments"]
assert json.loads(text)["state"] in ("on", "off")
RESULTS = {"answer": answer, "first": chunks[0], "middle": chunks[2], "last": chunks[-1]}
