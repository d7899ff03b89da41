"""ELECTRA's discriminator: a BERT, if embeddings have the width of the layers.

Clark et al., "ELECTRA" (2020), arXiv 2003.10555; transformers' modeling_electra.py.
"""

from __future__ import annotations

from typing import Any

from sdk.models.architecture import Architecture, EmbeddingRules, TensorRules
from sdk.models.architectures import bert, roberta
from sdk.quant.errors import UnsupportedError


def _derived(config: dict[str, Any]) -> None:
    bert.derived(config)
    width, hidden = config.get("embedding_size"), config.get("hidden_size")
    if width not in (None, hidden):
        raise UnsupportedError(
            f"config: embedding_size: expected hidden_size {hidden}, found {str(width)[:80]}: "
            "embeddings of another width are not supported for electra"
        )


ARCHITECTURE = Architecture(
    "electra",
    layer=bert.LAYER,
    config=bert.ARCHITECTURE.config._replace(
        keys=("type_vocab_size", "embedding_size"),
        ignored=(
            *bert.IGNORED,
            *("summary_type", "summary_use_proj", "summary_activation", "summary_last_dropout"),
        ),
        stated=("hidden_act", "type_vocab_size", "embedding_size"),
        derived=_derived,
    ),
    tensors=TensorRules(names=bert.tensor_names("electra")),
    embedding=EmbeddingRules(positions=0, norm=True, types=True),
    head=roberta.HEAD._replace(activation="GELU"),
)
