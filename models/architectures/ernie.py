"""ERNIE 2 and 3: a BERT with the embedding of a task, which is that of task 0 for every token.

Sun et al., "ERNIE 2.0" (2019), arXiv 1907.12412; transformers' modeling_ernie.py.
"""

from __future__ import annotations

from sdk.models.architecture import TensorRules
from sdk.models.architectures import bert

ARCHITECTURE = bert.ARCHITECTURE._replace(
    model_type="ernie",
    config=bert.ARCHITECTURE.config._replace(
        keys=("type_vocab_size", "use_task_id", "task_type_vocab_size"),
    ),
    tensors=TensorRules(
        names={
            **bert.tensor_names("ernie"),
            "model.embed_tasks": "ernie.embeddings.task_type_embeddings",
        }
    ),
    gguf=None,
    embedding=bert.ARCHITECTURE.embedding._replace(tasks=True),
    head=bert.HEAD._replace(dense=("ernie.pooler.dense", "pooler.dense"), gguf_untyped=None),
)
