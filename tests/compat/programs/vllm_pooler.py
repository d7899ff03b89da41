"""The mean of all states instead of the last one."""

import sys

from vllm import LLM
from vllm.config import PoolerConfig

MODEL = sys.argv[1]

llm = LLM(
    model=MODEL,
    runner="pooling",
    convert="embed",
    pooler_config=PoolerConfig(pooling_type="MEAN", use_activation=False),
    max_model_len=128,
    enforce_eager=True,
)
[output] = llm.embed("the cat sat")
assert len(output.outputs.embedding) == output.outputs.hidden_size
RESULTS = {"output": output}
