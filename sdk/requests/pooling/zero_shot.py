"""Classes that a caller names: how well their texts match an image, with a dual encoder."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from sdk.api.errors import RequestError
from sdk.models.classifier import probabilities
from sdk.quant.embedding_head import Contrast, EmbeddingHead
from sdk.quant.safe_repr import safe_repr
from sdk.requests.pooling.vectors import similarity
from sdk.requests.prompts.reader import Prompt


def contrast_of(head: EmbeddingHead | None) -> Contrast:
    """:raises RequestError: the model has no texts and images in one space."""
    if head is None or head.contrast is None:
        raise RequestError(
            "labels: expected none: this model has its own classes, or generates. Labels of a "
            "caller are compared with images by a dual encoder (CLIP, SigLIP)"
        )
    return head.contrast


def checked_labels(labels: Any) -> list[str]:
    """:raises RequestError: they are not two or more different texts, or one."""
    texts = list(labels) if isinstance(labels, (list, tuple)) else []
    if not texts or not all(isinstance(one, str) and one for one in texts):
        raise RequestError(f"labels: expected a list of texts, found {safe_repr(labels)}")
    if len(set(texts)) != len(texts):
        raise RequestError(f"labels: expected different texts, found {safe_repr(labels)}")
    return texts


def check_pictures(read: Sequence[Prompt]) -> None:
    """:raises RequestError: a prompt has no image."""
    for index, one in enumerate(read):
        if not one.images:
            raise RequestError(
                f"prompts[{index}]: expected an image to compare with labels, as {{'prompt': '', "
                f"'multi_modal_data': {{'image': image}}}}, found {safe_repr(one.text)}; score "
                "compares texts"
            )


def matches(
    contrast: Contrast, image: Sequence[float], texts: Sequence[Sequence[float]], use: bool
) -> list[float]:
    """A number for each text: its logit, or with ``use`` its probability."""
    logits = [contrast.logit(similarity(image, text)) for text in texts]
    return probabilities("sigmoid" if contrast.each else "softmax", logits) if use else logits
