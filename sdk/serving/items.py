"""Inputs of routes that generate nothing: texts, token ids, and images where a model reads them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from sdk.api.errors import RequestError
from sdk.api.params import SamplingParams
from sdk.quant.safe_repr import safe_repr
from sdk.requests.pooling.items import as_prompt
from sdk.requests.prompts.kinds import ChatOptions
from sdk.serving.endpoint import Services
from sdk.serving.images import data_url, with_images
from sdk.serving.models import Target
from sdk.serving.openai.requests import prompts_of

#: How errors show an item.
_FORMS = "a text, {'text': text}, {'image': URL} or {'content': [parts]}"


async def read_items(given: object, name: str, target: Target, services: Services) -> list[Any]:
    """One or more inputs for ``score`` and ``rerank``: as :func:`prompts_of`, or objects with a
    text, an image (Jina's API) or parts (vLLM's), whose images are fetched.

    :raises RequestError: one is nothing of that.
    """
    items = [given] if isinstance(given, Mapping) else given
    if not isinstance(items, list) or not any(isinstance(one, Mapping) for one in items):
        return list(prompts_of(given, name))
    found = []
    for index, one in enumerate(items):
        where = f"{name}[{index}]"
        if not isinstance(one, str | Mapping):
            raise RequestError(f"{where}: expected {_FORMS}, found {safe_repr(one)}")
        found.append(one if isinstance(one, str) else await _item(where, one, target, services))
    return found


async def read_prompts(given: object, name: str, target: Target, services: Services) -> list[Any]:
    """The same for vectors and classes: prompts.

    :raises RequestError: an item has an image among texts.
    """
    items = await read_items(given, name, target, services)
    return [as_prompt(one, target.llm._reader.images) for one in items]


async def _item(where: str, one: Mapping[str, Any], target: Target, services: Services) -> Any:
    if set(one) == {"text"} and isinstance(one["text"], str):
        return one["text"]
    if set(one) == {"image"}:
        parts: Any = [data_url(where, one["image"])]
    else:
        parts = one.get("content") if set(one) <= {"content", "role"} else [one]
    if isinstance(parts, str):
        return parts
    if not isinstance(parts, list) or not all(
        isinstance(part, Mapping) and isinstance(part.get("type"), str) for part in parts
    ):
        raise RequestError(f"{where}: expected {_FORMS}, found {safe_repr(dict(one))}")
    if target.llm._reader.images is None and any(part["type"] != "text" for part in parts):
        raise RequestError(f"{where}: expected texts: this model reads no images")
    message = {"role": "user", "content": parts}
    [read] = await with_images([message], target.llm, services.fetch_image)
    return {"content": read["content"]}


async def read_conversation(
    messages: object, answer: bool, target: Target, services: Services
) -> list[Any]:
    """The prompt of a conversation whose vector is asked for (vLLM's API). ``answer``: it ends with
    the beginning of an answer.

    :raises RequestError: it is none, or a dual encoder is asked for more than one text or image.
    """
    if not isinstance(messages, Sequence) or isinstance(messages, str) or not messages:
        raise RequestError(f"messages: expected a list, found {safe_repr(messages)}")
    reader = target.llm._reader
    if reader.images is not None and reader.images.dual:
        if len(messages) != 1:
            raise RequestError(
                f"messages: expected one with a text or an image, found {len(messages)}"
            )
        return await read_prompts(list(messages), "messages", target, services)
    read = await with_images(messages, target.llm, services.fetch_image)
    options = ChatOptions(add_generation_prompt=answer)
    return [
        await target.served.briefly(read, lambda: reader.read_chat(read, SamplingParams(), options))
    ]
