"""CodeGen: GPT-J's layers; the rows of queries, values and keys are those of four ranks.

Nijkamp et al., "CodeGen" (2022), arXiv 2203.13474; transformers' modeling_codegen.py. llama.cpp
does not run it.
"""

from __future__ import annotations

from typing import Any

from sdk.models.architecture import TensorRules
from sdk.models.architectures.gptj import ARCHITECTURE as GPTJ
from sdk.models.configs.fields import Fields

_RANKS = 4


def _derived(config: dict[str, Any]) -> None:
    assert GPTJ.config.derived is not None
    GPTJ.config.derived(config)
    hidden = config.get("hidden_size")
    if isinstance(hidden, int) and hidden % _RANKS:
        Fields(config).fail("hidden_size", f"a multiple of {_RANKS}", hidden)


ARCHITECTURE = GPTJ._replace(
    model_type="codegen",
    gguf=None,
    config=GPTJ.config._replace(derived=_derived),
    tensors=TensorRules(
        names={**GPTJ.tensors.names, "self_attn.qkv_proj": "attn.qkv_proj"}, qkv_by_rank=_RANKS
    ),
)
