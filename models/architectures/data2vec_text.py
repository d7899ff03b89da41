"""data2vec's encoder of text: a RoBERTa under another name.

Baevski et al., "data2vec" (2022), arXiv 2202.03555; transformers' modeling_data2vec_text.py.
"""

from __future__ import annotations

from sdk.models.architecture import TensorRules
from sdk.models.architectures import bert, roberta

ARCHITECTURE = roberta.ARCHITECTURE._replace(
    model_type="data2vec_text",
    aliases=("data2vec-text",),
    tensors=TensorRules(names=bert.tensor_names("data2vec_text")),
)
