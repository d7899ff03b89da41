"""What the files of a model say about its embeddings."""

from __future__ import annotations

from sdk.api.errors import UnsupportedError
from sdk.quant.checkpoint import Checkpoint
from sdk.quant.embedding_head import EmbeddingHead, NormalizeStep
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
        metadata = getattr(checkpoint, "metadata", {})
        kind = metadata.get(f"{metadata.get('general.architecture')}.pooling_type")
        mode = _GGUF_TYPES.get(kind) if isinstance(kind, int) else None
        return None if mode is None else EmbeddingHead((mode,), (NormalizeStep(),))
    from sdk.loaders.sentence_folder import sentence_head

    try:
        return sentence_head(checkpoint.path, hidden_size)
    except UnsupportedError as error:
        return str(error)
