"""What the parameters of one request may hold, checked before anything is tokenized or compiled."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields

from sdk.api.errors import RequestError
from sdk.quant.safe_repr import safe_repr
from sdk.serving.access import Refused

#: Where the routes have their texts.
_TEXTS = (
    *("prompt", "suffix", "messages", "input", "instructions", "text", "system"),
    *("query", "documents", "text_1", "text_2", "template", "context"),
)
_STRUCTURES = (
    *("response_format", "structured_outputs", "text", "format", "output_config"),
    "output_format",
    *("guided_json", "guided_regex", "guided_choice", "guided_grammar"),
)

#: The types of parts and blocks that are images, and the keys of such: none of them is a text.
_IMAGES = ("image_url", "input_image", "image")
_IMAGE_KEYS = frozenset(("type", "image_url", "detail", "file_id", "source", "cache_control"))


@dataclass(frozen=True, slots=True)
class BodyLimits:
    """Limits of the parameters of one request.

    ``prompt_chars``: of all its texts together, or tokens where the prompt is token ids;
    ``prompts``: in one request, also inputs of embeddings and documents to rerank; ``messages``:
    of a chat; ``n``: answers per prompt (also ``best_of``); ``answers``: of all prompts together;
    ``stop``: stop strings; ``stop_chars``: of one of them; ``tools``: how many; ``schema_chars``:
    of all schemas, tools and grammars together, as JSON; ``images``: in one request. Images count
    as no texts: their bytes are limited with those of the body.

    :raises RequestError: a limit is not a whole number of at least 1.
    """

    prompt_chars: int = 2 * 2**20
    prompts: int = 2048
    messages: int = 2048
    n: int = 16
    answers: int = 2048
    stop: int = 16
    stop_chars: int = 1024
    tools: int = 128
    schema_chars: int = 256 * 2**10
    images: int = 16

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            if isinstance(value, bool) or not (isinstance(value, int) and 1 <= value < 2**53):
                raise RequestError(
                    f"{field.name}: expected a whole number of at least 1, found {safe_repr(value)}"
                )

    def check(self, body: Mapping[str, object]) -> None:
        """Check the parsed body of any route. Values of a wrong type are left to the route.

        :raises Refused: 400, naming the parameter, its limit and what was found.
        """
        prompts = self._check_prompts(body)
        most = 1
        for name in ("n", "best_of"):
            value = body.get(name)
            if isinstance(value, int) and not isinstance(value, bool):
                _check(name, value, self.n, "answers per prompt")
                most = max(most, value)
        _check("n", most * prompts, self.answers, "answers in one request")
        options = body.get("options")  # Ollama's
        inside = options.get("stop") if isinstance(options, Mapping) else None
        for name in ("stop", "stop_sequences", "bad_words", "banned_strings"):
            value = body.get(name, inside if name == "stop" else None)
            strings = [value] if isinstance(value, str) else _list(value)
            _check(name, len(strings), self.stop, "strings")
            longest = max((len(s) for s in strings if isinstance(s, str)), default=0)
            _check(name, longest, self.stop_chars, "characters in one string")
        _check("tools", len(_list(body.get("tools"))), self.tools, "tools")
        structures = [body[name] for name in (*_STRUCTURES, "tools") if name in body]
        chars = sum(len(json.dumps(value, ensure_ascii=False)) for value in structures if value)
        _check("response_format", chars, self.schema_chars, "characters in schemas and tools")

    def _check_prompts(self, body: Mapping[str, object]) -> int:
        """How many prompts there are."""
        _check("messages", len(_list(body.get("messages"))), self.messages, "messages")
        prompts = 1
        for name in ("prompt", "input", "documents", "text_1", "text_2"):
            value = body.get(name)
            is_list = isinstance(value, list) and value and not isinstance(value[0], int)
            if is_list and not (name == "input" and _is_conversation(_list(value))):
                _check(name, len(_list(value)), self.prompts, "prompts")
                prompts = max(prompts, len(_list(value)))
        _check("images", sum(1 for _ in _images(body)), self.images, "images in one request")
        left = self.prompt_chars
        for name in _TEXTS:
            for chars in _lengths(body.get(name)):
                left -= chars
                if left < 0:
                    raise Refused(
                        400,
                        f"{name}: expected at most {self.prompt_chars} characters (or token ids) "
                        "in all texts of the request together, found more",
                        "string_above_max_length",
                        param=name,
                    )
        return prompts


def _check(name: str, found: int, most: int, what: str) -> None:
    if found > most:
        raise Refused(
            400,
            f"{name}: expected at most {most} {what}, found {found}",
            "invalid_value",
            param=name,
        )


def _list(value: object) -> Sequence[object]:
    return value if isinstance(value, list) else ()


def _is_conversation(value: Sequence[object]) -> bool:
    return bool(value) and isinstance(value[0], Mapping)


def _is_image(part: Mapping[str, object]) -> bool:
    return part.keys() == {"image"} or (part.get("type") in _IMAGES and part.keys() <= _IMAGE_KEYS)


def _images(value: object) -> Iterator[object]:
    """All images inside ``value``."""
    if isinstance(value, Mapping):
        if _is_image(value):
            yield value
            return
        for name, item in value.items():
            if name == "images":
                yield from _list(item)
            else:
                yield from _images(item)
    elif isinstance(value, list) and not (value and isinstance(value[0], int)):
        for item in value:
            yield from _images(item)


def _lengths(value: object) -> Iterator[int]:
    """The lengths of all texts inside ``value``; a list of token ids counts its items."""
    if isinstance(value, str):
        yield len(value)
    elif isinstance(value, Mapping):
        if _is_image(value):
            return
        for name, item in value.items():
            if name != "images":  # Ollama's, in base64
                yield from _lengths(item)
    elif isinstance(value, list):
        if value and isinstance(value[0], int):
            yield len(value)
        else:
            for item in value:
                yield from _lengths(item)
