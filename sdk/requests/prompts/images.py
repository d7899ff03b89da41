"""The images of prompts: from what callers give to image inputs and their places among the tokens.

numpy is imported for type checkers only, and images are decoded by modules that are loaded with the
first one: prompts of text need neither.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import unquote, urlsplit

from sdk.api.errors import RequestError
from sdk.kernels.errors import MissingPackageError
from sdk.models.vision.image import ImageInput, PromptImage
from sdk.quant.safe_repr import safe_repr
from sdk.quant.tokenizer import ImageTexts, Tokenizer

if TYPE_CHECKING:
    from sdk.api.config import EngineConfig
    from sdk.api.image_options import ImageFetcher
    from sdk.images.processors import ImageProcessor

#: Parts of a message's content that are images; the last one is vLLM's.
IMAGE_PARTS = ("image_url", "image", "image_pil")
#: Parts that are texts; answers may have the second one.
_TEXT_PARTS = ("text", "refusal")
#: How errors show the forms of an image in a conversation.
_FORMS = (
    "{'type': 'image_url', 'image_url': {'url': 'data:image/png;base64,...'}} or {'type': 'image', "
    "'image': bytes, a path, or an image of Pillow, numpy or torch}"
)


class ImageReader:
    """Reads the images of prompts for one model."""

    def __init__(
        self,
        processor: ImageProcessor,
        token_id: int,
        *,
        most: int,
        fetch: ImageFetcher | None = None,
        folder: str | None = None,
        dual: bool = False,
    ) -> None:
        """``token_id``: stands in a prompt for one row of embeddings. ``most``: images of a prompt.
        ``fetch``: gets URLs. ``folder``: URLs may name files in it. ``dual``: of a dual encoder,
        whose prompts are a text or an image."""
        self._processor = processor
        self.token_id = token_id
        self.dual = dual
        self.most = most
        self._fetch = fetch
        self._folder = None if folder is None else Path(folder).resolve()

    @property
    def whole_prompts(self) -> bool:
        """See :class:`sdk.images.processors.base.ImageProcessor`."""
        return self._processor.whole_prompts

    @classmethod
    def of(
        cls, config: EngineConfig, processor: ImageProcessor, token_id: int, *, dual: bool = False
    ) -> ImageReader:
        """With the options of an engine."""
        return cls(
            processor,
            token_id,
            most=config.most_images,
            fetch=config.image_fetcher,
            folder=config.allowed_local_media_path or None,
            dual=dual,
        )

    # ---- images as callers give them -------------------------------------------------------------

    def of_conversation(
        self, messages: Sequence[Mapping[str, Any]]
    ) -> tuple[Sequence[Mapping[str, Any]], tuple[ImageInput, ...]]:
        """The messages with plain parts ``{"type": "image"}``, as chat templates know them, and
        the images. What else is wrong with the messages is found by others.

        :raises RequestError: an image cannot be read, there are too many, or a part is neither an
            image nor a text.
        """
        check_parts(messages, _FORMS)
        given = [
            (f"messages[{index}].content[{number}]", part)
            for index, message in enumerate(messages)
            for number, part in image_parts(message)
        ]
        if not given:
            return messages, ()
        self.check_count(len(given))
        inputs = tuple(self._read(_source_of(part, where), where) for where, part in given)
        return [_without_data(message) for message in messages], inputs

    @staticmethod
    def source_of(part: Mapping[str, Any], where: str) -> Any:
        """What a part of a message gives for its image, for :meth:`of_data`.

        :raises RequestError: nothing, or more than that.
        """
        return _source_of(part, where)

    def of_data(self, data: Any) -> tuple[ImageInput, ...]:
        """The images of ``multi_modal_data``.

        :raises RequestError: there is other data, an image cannot be read, or there are too many.
        """
        if data is None:
            return ()
        if not isinstance(data, Mapping) or set(data) - {"image"}:
            found = safe_repr(list(data) if isinstance(data, Mapping) else data)
            raise RequestError(
                "multi_modal_data: expected {'image': one image or a list of them} (audio and "
                f"video are not supported), found {found}"
            )
        given = data.get("image")
        sources = given if isinstance(given, list | tuple) else [] if given is None else [given]
        self.check_count(len(sources))
        one = len(sources) == 1 and sources is not given
        return tuple(
            self._read(source, "multi_modal_data.image" + ("" if one else f"[{index}]"))
            for index, source in enumerate(sources)
        )

    def check_count(self, count: int) -> None:
        """:raises RequestError: these are too many images for one prompt."""
        if count > self.most:
            raise RequestError(
                f"images: expected at most {self.most} in a prompt, found {count}; send fewer, or "
                f"load the model with limit_mm_per_prompt={{'image': {count}}}"
            )

    def _read(self, source: Any, where: str) -> ImageInput:
        from sdk.images.decode import decode  # with the first image

        if isinstance(source, _Url):
            source = self._of_url(source, where)
        try:
            pixels = decode(source, name=where)
        except (RequestError, MissingPackageError):
            raise
        except Exception as error:
            raise _unread(where, error) from error
        try:
            return self._processor.read(pixels)
        except RequestError as error:
            raise RequestError(f"{where}: {error}") from error
        except Exception as error:
            raise _unread(where, error) from error

    def _of_url(self, url: _Url, where: str) -> bytes | str:
        """What a URL names: bytes, or a data URL as it is.

        :raises RequestError: it is not one that this LLM may read.
        """
        scheme = url.partition(":")[0].lower()
        if scheme == "data":
            return str(url)
        if scheme in ("http", "https"):
            return self._fetched(str(url), where)
        if self._folder is None:
            raise RequestError(
                f"{where}: expected a data URL (data:image/png;base64,...), found "
                f"{safe_repr(str(url))}; files are read from a folder that is allowed: load the "
                "model with allowed_local_media_path=FOLDER, or pass {'type': 'image', 'image': "
                "path}"
            )
        return self._of_folder(url, self._folder, where)

    def _fetched(self, url: str, where: str) -> bytes:
        if self._fetch is None:
            raise RequestError(
                f"{where}: {safe_repr(url)} is not fetched; send the image itself (a data URL), or "
                "load the model with image_fetcher=, such as sdk.ImageHosts(['img.example.org'])"
            )
        try:
            found = self._fetch(url)
        except RequestError as error:
            raise RequestError(f"{where}: {error}") from error
        except Exception as error:
            raise RequestError(
                f"{where}: image_fetcher failed for {safe_repr(url)}: {type(error).__name__}: "
                f"{str(error)[:200]}"
            ) from error
        if not isinstance(found, bytes):
            raise RequestError(f"{where}: image_fetcher: expected bytes, found {safe_repr(found)}")
        return found

    def _of_folder(self, url: str, folder: Path, where: str) -> bytes:
        """A file of the allowed folder, named by a ``file:`` URL or a path, links resolved."""
        parts = urlsplit(url)
        name = unquote(parts.path) if parts.scheme == "file" else url
        path = None if "\0" in name else (folder / name).resolve()
        if path is None or parts.netloc or not path.is_relative_to(folder):
            raise RequestError(
                f"{where}: {safe_repr(url)} is not a file in the folder of allowed_local_media_path"
            )
        from sdk.images.limits import ImageLimits

        try:
            with path.open("rb") as file:
                return file.read(ImageLimits().max_bytes + 1)
        except OSError as error:
            raise RequestError(
                f"{where}: {safe_repr(url)} cannot be read: {error.strerror}"
            ) from error

    # ---- images among the tokens -----------------------------------------------------------------

    def texts(self, tokenizer: Tokenizer, images: Sequence[ImageInput]) -> ImageTexts:
        """The images as text with one spelling of the image token for each row of embeddings."""
        return ImageTexts(
            self._processor.placeholder,
            self._processor.written,
            tuple(self._expanded(tokenizer, image, number) for number, image in enumerate(images)),
        )

    def _expanded(self, tokenizer: Tokenizer, image: ImageInput, number: int) -> str:
        spelled = tokenizer.id_to_token(self.token_id)
        if spelled is None:
            raise RequestError(
                f"images: the vocabulary has no token {self.token_id}, which stands for images; "
                "load the model with its own tokenizer"
            )
        pieces = self._processor.layout(image, number)
        return "".join(one if isinstance(one, str) else spelled * one for one in pieces)

    def alone(self, text: object, images: Sequence[ImageInput]) -> tuple[PromptImage, ...]:
        """The image of a prompt of a dual encoder.

        :raises RequestError: there are several, or a text beside it.
        """
        if len(images) != 1 or text != "":
            raise RequestError(
                "prompt: expected a text or one image, as {'prompt': '', 'multi_modal_data': "
                f"{{'image': image}}}}, because this model has a vector for each; found "
                f"{len(images)} images and {safe_repr(text)}"
            )
        return (PromptImage(images[0], ((0, 1),)),)

    def in_text(
        self, tokenizer: Tokenizer, text: str, images: Sequence[ImageInput]
    ) -> tuple[str, bool]:
        """A prompt with the images in the place of their placeholders, and whether the tokenizer
        adds the tokens that begin a text: not to one that the model's processor frames.

        :raises RequestError: there are more or fewer placeholders than images.
        """
        placeholder, bos = self._processor.placeholder, tokenizer.bos_token_id
        begin = "" if bos is None else tokenizer.id_to_token(bos) or ""
        framed = self._processor.framed(text, begin)
        pieces = framed.split(placeholder)
        self._check_places(len(pieces) - 1, len(images), placeholder)
        expanded = self.texts(tokenizer, images).expanded
        return "".join(map("".join, zip(pieces, (*expanded, ""), strict=True))), framed == text

    def in_ids(
        self, tokenizer: Tokenizer, ids: Sequence[int], images: Sequence[ImageInput]
    ) -> list[int]:
        """The same for token ids, which have one placeholder for each image.

        :raises RequestError: there are more or fewer placeholders than images.
        """
        placeholder = self._processor.placeholder
        token = tokenizer.token_to_id(placeholder)
        found = [index for index, one in enumerate(ids) if one == token]
        self._check_places(len(found), len(images), placeholder)
        made: list[int] = []
        begin = 0
        for index, text in zip(found, self.texts(tokenizer, images).expanded, strict=True):
            made += [*ids[begin:index], *tokenizer.encode(text, False)]
            begin = index + 1
        return [*made, *ids[begin:]]

    @staticmethod
    def _check_places(places: int, images: int, placeholder: str) -> None:
        if places != images:
            raise RequestError(
                f"prompt: expected one {placeholder} for each image, found {places} for {images} "
                "images"
            )

    def placed(
        self, token_ids: Sequence[int], images: Sequence[ImageInput]
    ) -> tuple[PromptImage, ...]:
        """The images with their spans among ``token_ids``.

        :raises RequestError: there are more or fewer image tokens than the images have.
        """
        token = self.token_id
        places = [index for index, one in enumerate(token_ids) if one == token]
        needed = sum(image.num_tokens for image in images)
        if len(places) != needed:
            raise RequestError(
                f"prompt: expected {needed} image tokens (id {token}) for {len(images)} images, "
                f"found {len(places)}"
                + ("" if images else "; give the images, or leave the tokens out")
            )
        taken = iter(places)
        return tuple(
            PromptImage(image, tuple(_spans(itertools.islice(taken, image.num_tokens))))
            for image in images
        )


class _Url(str):
    """A string that names an image; others are paths of the caller."""

    __slots__ = ()


def _unread(where: str, error: Exception) -> RequestError:
    """The error for an image at which something failed that nobody expected."""
    return RequestError(
        f"{where}: the image cannot be read: {type(error).__name__}: {str(error)[:200]}"
    )


def image_parts(message: object) -> Iterator[tuple[int, Mapping[str, Any]]]:
    """The images of a message, with their places in its content."""
    content = message.get("content") if isinstance(message, Mapping) else None
    if not isinstance(content, list | tuple):
        return
    for number, part in enumerate(content):
        if isinstance(part, Mapping) and part.get("type") in IMAGE_PARTS:
            yield number, part


def check_parts(messages: Sequence[Mapping[str, Any]], forms: str) -> None:
    """For a model that reads images; ``forms``: how the error shows those of an image.

    :raises RequestError: a part of a message is neither an image nor a text.
    """
    for index, message in enumerate(messages):
        content = message.get("content") if isinstance(message, Mapping) else None
        for number, part in enumerate(content if isinstance(content, list | tuple) else ()):
            kind = part.get("type") if isinstance(part, Mapping) else None
            if isinstance(kind, str) and kind in (*IMAGE_PARTS, *_TEXT_PARTS):
                continue
            found = f"type {safe_repr(kind)}" if kind else f"{safe_repr(part)} without a type"
            raise RequestError(
                f"messages[{index}].content[{number}]: expected {{'type': 'text', 'text': ...}}, "
                f"or an image as {forms}; found {found} (audio, video and files are not supported)"
            )


def _source_of(part: Mapping[str, Any], where: str) -> Any:
    """What a part gives for its image. :raises RequestError: nothing, or more than that."""
    kind = part["type"]
    source = part.get(kind)
    if kind == "image_url":
        if isinstance(source, Mapping) and not set(source) - {"url", "detail"}:
            source = source.get("url")
        source = _Url(source) if isinstance(source, str) and source else None
    elif isinstance(source, str):
        scheme = source.partition(":")[0].lower()
        source = _Url(source) if scheme in ("data", "http", "https") else source
    if source is None or set(part) - {"type", kind, "detail"}:
        raise RequestError(f"{where}: expected {_FORMS}, found {safe_repr(dict(part))}")
    return source


def _without_data(message: Mapping[str, Any]) -> Mapping[str, Any]:
    content = message.get("content")
    if not any(True for _ in image_parts(message)):
        return message
    assert isinstance(content, list | tuple)
    at = {number for number, _ in image_parts(message)}
    parts = [{"type": "image"} if i in at else part for i, part in enumerate(content)]
    return {**message, "content": parts}


def _spans(places: Iterable[int]) -> Iterator[tuple[int, int]]:
    """Runs of consecutive numbers: the first one and how many."""
    first = count = 0
    for place in places:
        if count and place == first + count:
            count += 1
            continue
        if count:
            yield first, count
        first, count = place, 1
    if count:
        yield first, count


def images_of(
    images: Sequence[ImageInput], messages: Sequence[Mapping[str, Any]], kept: Sequence[int]
) -> tuple[ImageInput, ...]:
    """Of the images of a conversation those in some messages, named by their indices."""
    counts = [sum(1 for _ in image_parts(message)) for message in messages]
    starts = [0, *itertools.accumulate(counts)]
    return tuple(one for index in kept for one in images[starts[index] : starts[index + 1]])


def shortened(token_ids: Sequence[int], images: Sequence[PromptImage]) -> list[int]:
    """Token ids to show: of each run of image tokens the first one."""
    hidden = {
        place
        for image in images
        for first, count in image.spans
        for place in range(first + 1, first + count)
    }
    return [token for place, token in enumerate(token_ids) if place not in hidden]


def described(images: Sequence[ImageInput]) -> str:
    """How many tokens images have, for errors about lengths."""
    counts = [image.num_tokens for image in images]
    shown = ", ".join(map(str, counts[:8])) + (", ..." if len(counts) > 8 else "")
    if len(counts) == 1:
        return f"its image has {shown} of them"
    return f"its {len(counts)} images have {sum(counts)} of them ({shown})"
