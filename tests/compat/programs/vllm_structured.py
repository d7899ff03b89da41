"""Answers that follow a choice, a pattern, a schema and a grammar."""

import json
import re
import sys

from vllm import LLM, SamplingParams
from vllm.sampling_params import StructuredOutputsParams

MODEL = sys.argv[1]

llm = LLM(
    model=MODEL,
    max_model_len=256,
    enforce_eager=True,
    structured_outputs_config={"backend": "guidance", "disable_any_whitespace": True},
)


def answer(**structure):
    params = SamplingParams(
        temperature=0.0,
        max_tokens=100,
        structured_outputs=StructuredOutputsParams(**structure),
    )
    [output] = llm.generate("the answer is", params, use_tqdm=False)
    return output.outputs[0]


choice = answer(choice=["yes", "no"])
assert choice.text in ("yes", "no")
pattern = answer(regex=r"[a-c]{3}-\d\d")
assert re.fullmatch(r"[a-c]{3}-\d\d", pattern.text)
schema = {
    "type": "object",
    "properties": {"size": {"enum": ["small", "large"]}},
    "required": ["size"],
    "additionalProperties": False,
}
value = answer(json=schema)
assert json.loads(value.text)["size"] in ("small", "large")
grammar = answer(grammar='root ::= "one" | "two"')
assert grammar.text in ("one", "two")
RESULTS = {"choice": choice, "regex": pattern, "json": value, "grammar": grammar}
