"""RoBERTa and XLM-RoBERTa: BERTs whose table of positions begins after the padding token's row.

Liu et al., "RoBERTa" (2019), arXiv 1907.11692; Conneau et al. (2019), arXiv 1911.02116;
transformers' modeling_roberta.py, modeling_xlm_roberta.py, modeling_camembert.py, which are the
same. bge-m3 and multilingual-e5 are XLM-RoBERTas. GGUF files of them are BERTs, whose tables lack
the unused rows.
"""

from __future__ import annotations

from typing import Any

from sdk.models.architecture import Architecture, EmbeddingRules, TensorRules
from sdk.models.architectures import bert
from sdk.models.configs.head_rules import HeadRules
from sdk.quant.errors import UnsupportedError


def _derived(config: dict[str, Any]) -> None:
    tasks = config.get("lora_adaptations")
    if tasks:
        raise UnsupportedError(
            f"config: lora_adaptations: expected none, found {str(tasks)[:120]}: these weights "
            "(jina-embeddings-v3) hold an adapter for each task inside each tensor. Open the model "
            "of transformers' class (jinaai/jina-embeddings-v3-hf) or a GGUF file, and the task's "
            "adapter with lora_request (docs/lora.md)"
        )
    bert.derived(config)


HEAD = HeadRules(("classifier.dense",), ("classifier.out_proj",))

ARCHITECTURE = Architecture(
    "roberta",
    aliases=("xlm-roberta", "camembert"),
    layer=bert.LAYER,
    config=bert.ARCHITECTURE.config._replace(
        keys=("type_vocab_size", "pad_token_id"),
        defaults={**bert.ARCHITECTURE.config.defaults, "pad_token_id": 1},
        stated=("hidden_act", "type_vocab_size", "pad_token_id"),
        derived=_derived,
    ),
    tensors=TensorRules(names=bert.tensor_names("roberta")),
    embedding=EmbeddingRules(positions="after padding", norm=True, types=True),
    head=HEAD,
)
