"""What the files of a model say about its embeddings."""

from __future__ import annotations

import numpy as np

from sdk.api.errors import UnsupportedError
from sdk.loading.dual_head import dual_head
from sdk.models.architecture import architecture
from sdk.quant.checkpoint import Checkpoint
from sdk.quant.embedding_head import DenseStep, EmbeddingHead, NormalizeStep
from sdk.quant.errors import CheckpointError
from sdk.quant.rewritten_checkpoint import RewrittenCheckpoint

#: llama.cpp's pooling types. 0 asks for every token's state, 4 for a reranker's score: `embed`
#: gives the last token's state then.
_GGUF_TYPES = {1: "mean", 2: "cls", 3: "last"}


def embedding_head(checkpoint: Checkpoint, hidden_size: int) -> EmbeddingHead | str | None:
    """The head; why it is not supported, for the calls that need it; None if the files say nothing.

    :raises CheckpointError: the files of the head are damaged.
    """
    if isinstance(checkpoint, RewrittenCheckpoint):
        checkpoint = checkpoint.inner
    if checkpoint.format == "gguf":
        return _of_gguf(checkpoint, hidden_size)
    from sdk.loaders.folders.sentence_folder import sentence_head

    try:
        own = architecture(checkpoint.config.get("model_type"))
        if own is not None and own.dual is not None:
            return dual_head(checkpoint, own.dual, hidden_size)
        return sentence_head(checkpoint.path, hidden_size)
    except UnsupportedError as error:
        return str(error)


def _of_gguf(checkpoint: Checkpoint, hidden_size: int) -> EmbeddingHead | str | None:
    """Pooling by the metadata, then the dense layers that llama.cpp's converter adds if asked for
    them (EmbeddingGemma), which have neither bias nor activation."""
    metadata = getattr(checkpoint, "metadata", {})
    key = f"{metadata.get('general.architecture')}.pooling_type"
    kind = metadata.get(key)
    mode = _GGUF_TYPES.get(kind) if isinstance(kind, int) else None
    steps: list[DenseStep] = []
    width = hidden_size
    for name in ("embedding_head.0", "embedding_head.1"):
        if not checkpoint.has(name):
            continue
        weight = np.asarray(checkpoint.tensor(f"{name}.weight").numpy(), np.float32)
        if weight.ndim != 2 or weight.shape[1] != width:
            raise CheckpointError(
                f"{checkpoint.path}: dense layer {len(steps) + 1} after pooling: expected a matrix "
                f"of {width} columns, found shape {list(weight.shape)}"
            )
        steps.append(DenseStep(weight, None, "Identity"))
        width = len(weight)
    if mode is not None:
        return EmbeddingHead((mode,), (*steps, NormalizeStep()))
    if not steps:
        return None
    return (
        f"{checkpoint.path}: {key}: expected 1 (mean), 2 (cls) or 3 (last) in a file with dense "
        f"layers after pooling, found {kind}"
    )
