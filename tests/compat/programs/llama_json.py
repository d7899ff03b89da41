"""JSON, by a schema and by a grammar."""

import json
import sys

from llama_cpp import Llama, LlamaGrammar

MODEL = sys.argv[1]

llm = Llama(model_path=MODEL, n_ctx=256, chat_format="chatml", verbose=False)
messages = [{"role": "user", "content": "Which size?"}]
schema = {
    "type": "object",
    "properties": {"size": {"enum": ["small", "large"]}},
    "required": ["size"],
}
answer = llm.create_chat_completion(
    messages=messages,
    response_format={"type": "json_object", "schema": schema},
    temperature=0.0,
    max_tokens=100,
)
assert json.loads(answer["choices"][0]["message"]["content"])["size"] in ("small", "large")

rules = LlamaGrammar.from_string('root ::= ("yes" | "no") "!"', verbose=False)
ruled = llm("Really? ", grammar=rules, max_tokens=10, temperature=0.0)
assert ruled["choices"][0]["text"] in ("yes!", "no!")

made = LlamaGrammar.from_json_schema(json.dumps(schema), verbose=False)
value = llm("Size: ", grammar=made, max_tokens=100, temperature=0.0)
assert json.loads(value["choices"][0]["text"])["size"] in ("small", "large")
RESULTS = {"answer": answer, "ruled": ruled, "value": value}
