"""Images in requests: data URLs, and URLs of hosts that the operator allows; never local files."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from sdk.api.errors import RequestError
from sdk.api.image_options import ImageFetcher
from sdk.quant.safe_repr import safe_repr
from sdk.requests.prompts.images import ImageReader, check_parts, image_parts

Message = Mapping[str, Any]
_REMOTE = ("http", "https")
#: How errors show the form of an image in a request.
_FORM = "{'type': 'image_url', 'image_url': {'url': 'data:image/png;base64,...'}}"


async def with_images(
    messages: Sequence[Message], llm: Any, fetch: ImageFetcher | None
) -> Sequence[Message]:
    """The messages of a request for ``LLM.chat``, in which the images are bytes or data URLs.

    Those of a model of text are left as they are: it refuses them.

    :raises RequestError: an image is given in another way or cannot be fetched, there are too many,
        or a part is neither an image nor a text.
    """
    reader: ImageReader | None = llm._reader.images
    if reader is None:
        return messages
    check_parts(messages, _FORM)
    found = list(_urls(messages))
    reader.check_count(len(found))
    remote = [(where, url) for where, url in found if _scheme(url) in _REMOTE]
    if not remote:
        return messages
    if fetch is None:
        where, url = remote[0]
        raise RequestError(
            f"{where}: {safe_repr(url)} is not fetched: this server allows no hosts; send the "
            "image itself (a data URL)"
        )
    data = await asyncio.to_thread(_fetched, remote, fetch)
    return [_replaced(message, data) for message in messages]


def _scheme(url: str) -> str:
    return url.partition(":")[0].lower()


def _urls(messages: Sequence[Message]) -> Iterator[tuple[str, str]]:
    """The URLs of all images, with their places.

    :raises RequestError: an image has none, or one that names a file here.
    """
    for index, message in enumerate(messages):
        for number, part in image_parts(message):
            where = f"messages[{index}].content[{number}]"
            url = _url(part)
            if url is None or _scheme(url) not in ("data", *_REMOTE):
                raise RequestError(f"{where}: expected {_FORM}, found {safe_repr(dict(part))}")
            yield where, url


def _url(part: Mapping[str, Any]) -> str | None:
    given = part.get("image_url") if part["type"] == "image_url" else None
    url = given.get("url") if isinstance(given, Mapping) else given
    return url if isinstance(url, str) else None


def _fetched(remote: Sequence[tuple[str, str]], fetch: ImageFetcher) -> dict[str, bytes]:
    made: dict[str, bytes] = {}
    for where, url in remote:
        try:
            made[url] = made.get(url) or fetch(url)
        except RequestError as error:
            raise RequestError(f"{where}: {error}") from error
    return made


def _replaced(message: Message, data: Mapping[str, bytes]) -> Message:
    at = {number: _url(part) for number, part in image_parts(message)}
    if not any(url in data for url in at.values()):
        return message
    parts = [
        {"type": "image", "image": data[url]}
        if (url := at.get(number)) is not None and url in data
        else part
        for number, part in enumerate(message["content"])
    ]
    return {**message, "content": parts}


def data_url(where: str, data: object, media_type: str = "") -> dict[str, Any]:
    """A part of a message for an image in base64.

    :raises RequestError: ``data`` is not a string.
    """
    if not isinstance(data, str) or not data:
        raise RequestError(f"{where}: expected an image in base64, found {safe_repr(data)}")
    url = data if data.startswith("data:") else f"data:{media_type};base64,{data}"
    return {"type": "image_url", "image_url": {"url": url}}
