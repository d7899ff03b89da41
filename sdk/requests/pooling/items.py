"""What ``score`` and ``rerank`` compare: texts, and images with texts where the model reads images.

An item with an image is ``{"content": [parts]}``, parts as in a conversation, or a prompt with
``multi_modal_data``.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from sdk.api.errors import RequestError
from sdk.quant.safe_repr import safe_repr
from sdk.requests.prompts.images import IMAGE_PARTS, ImageReader

#: How errors show an item with an image.
FORMS = (
    "{'content': [{'type': 'image', 'image': image}, {'type': 'text', 'text': text}]} where the "
    "model reads images"
)


def check_item(where: str, item: object) -> None:
    """:raises RequestError: it is neither a text nor an item with images."""
    if not isinstance(item, str | Mapping):
        raise RequestError(f"{where}: expected a string, or {FORMS}, found {safe_repr(item)}")


def has_parts(item: object) -> bool:
    """Whether an item has parts, as a message of a conversation has."""
    return isinstance(item, Mapping) and isinstance(item.get("content"), list | tuple)


def parts_of(item: Any) -> list[dict[str, Any]]:
    """The parts of an item. Of a prompt with images these come first, as in what Qwen3-VL-Reranker
    was trained with, and an empty item has the text "NULL".

    :raises RequestError: it is nothing of that.
    """
    if isinstance(item, str):
        return [_text(item or "NULL")]
    if has_parts(item) and set(item) <= {"content", "role"}:
        return [dict(one) if isinstance(one, Mapping) else one for one in item["content"]]
    data = item.get("multi_modal_data") if isinstance(item, Mapping) else None
    text = item.get("prompt", "") if isinstance(item, Mapping) else None
    if isinstance(data, Mapping) and set(data) == {"image"} and isinstance(text, str):
        given = data["image"]
        images = given if isinstance(given, list | tuple) else [given]
        found: list[dict[str, Any]] = [{"type": "image", "image": image} for image in images]
        return [*found, *([_text(text)] if text or not found else [])]
    raise RequestError(f"score: expected a string, or {FORMS}, found {safe_repr(item)}")


def as_prompt(item: Any, images: ImageReader | None) -> Any:
    """An item as a prompt for a vector.

    :raises RequestError: its parts are more than a text, or an image for a dual encoder.
    """
    if not has_parts(item):
        return item
    parts = parts_of(item)
    [part] = parts if len(parts) == 1 else [{}]
    if part.get("type") == "text" and set(part) == {"type", "text"}:
        return part["text"]
    if part.get("type") in IMAGE_PARTS and images is not None and images.dual:
        return {"prompt": "", "multi_modal_data": {"image": images.source_of(part, "content[0]")}}
    raise RequestError(
        f"score: expected one text, or one image for a dual encoder (CLIP, SigLIP), found "
        f"{safe_repr(parts)}; a model that embeds images among texts takes {{'prompt': text with "
        "placeholders, 'multi_modal_data': {'image': image}}"
    )


def _text(text: str) -> dict[str, Any]:
    return {"type": "text", "text": text}
