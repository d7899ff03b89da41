"""Bodies of Ollama's requests in terms of OpenAI's."""

from __future__ import annotations

import re
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from sdk.api.errors import RequestError
from sdk.quant.safe_repr import safe_repr
from sdk.serving.endpoint import Services
from sdk.serving.exchange import Exchange
from sdk.serving.images import data_url
from sdk.serving.models import Models, Target
from sdk.serving.openai.requests import Body

#: ``options`` of a request: the same with our names.
_OPTIONS: Mapping[str, str] = MappingProxyType(
    {
        "num_predict": "max_tokens",
        "repeat_penalty": "repetition_penalty",
        **{name: name for name in ("temperature", "top_p", "top_k", "min_p", "typical_p", "seed")},
        **{name: name for name in ("stop", "presence_penalty", "frequency_penalty")},
    }
)
#: Options about how a model is loaded, which its owner has decided here.
_LOADING = frozenset(
    (
        *("num_ctx", "num_batch", "num_gpu", "main_gpu", "num_thread", "num_keep", "numa"),
        *("low_vram", "f16_kv", "logits_all", "vocab_only", "use_mmap", "use_mlock"),
        "embedding_only",
    )
)
#: Options that are accepted with the values that ask for nothing special. Those of mirostat have no
#: effect without it, and penalties count line breaks like all tokens.
_ONLY: Mapping[str, tuple[Any, ...]] = MappingProxyType(
    {"mirostat": (0,), "tfs_z": (1,), "penalize_newline": (True,)}
)
_MIROSTAT = ("mirostat_tau", "mirostat_eta")
_PENALTIES = ("repetition_penalty", "presence_penalty", "frequency_penalty")
_LEVELS = ("low", "medium", "high")
_DURATION = re.compile(r"-?(\d+(\.\d*)?|\.\d+)(ns|us|µs|ms|s|m|h)?|(-?(\d+(\.\d*)?)(ms|[smh]))+")


async def begin(exchange: Exchange, services: Services) -> tuple[Body, Target]:
    """The body, and the model that it names."""
    body = Body(await exchange.read_json(services.max_body_bytes))
    target = resolved(services.models, body.take("model"))
    keep = body.take("keep_alive")  # the owner of the model closes it
    number = isinstance(keep, int | float) and not isinstance(keep, bool)
    text = isinstance(keep, str) and _DURATION.fullmatch(keep)
    if keep is not None and not number and not text:
        raise RequestError(
            f"keep_alive: expected seconds, or a duration such as '5m', found {safe_repr(keep)}"
        )
    return body, target


def resolved(models: Models, name: object) -> Target:
    """The model of a name, which may have Ollama's tag of the newest version."""
    if isinstance(name, str) and name.endswith(":latest") and not models.has(name):
        name = name.removesuffix(":latest")
    return models.resolve(name)


def images_of(given: object, target: Target) -> list[dict[str, Any]]:
    """The parts of a message for ``images``, which are in base64.

    :raises RequestError: the model reads text only, or the images are something else.
    """
    if not given:
        return []
    if not target.served.sees:
        raise RequestError(f"images: are not supported by {target.name}; leave them out")
    if not isinstance(given, list):
        raise RequestError(f"images: expected a list of images in base64, found {safe_repr(given)}")
    return [data_url(f"images[{index}]", one) for index, one in enumerate(given)]


def translated(body: Body) -> dict[str, Any]:
    """``options``, ``format`` and ``logprobs`` with OpenAI's names.

    :raises RequestError: a value is invalid, or an option is unknown or not supported.
    """
    made = options_of(body)
    form = body.take("format")
    if form == "json":
        made["response_format"] = {"type": "json_object"}
    elif form not in (None, ""):
        made["structured_outputs"] = {"json": form}
    if body.take("template") is not None:
        raise RequestError("template: is not supported; the owner of the model chooses it")
    return made


def options_of(body: Body) -> dict[str, Any]:
    """``options`` with our names. :raises RequestError: one is unknown or not supported."""
    options = body.take("options", {})
    if not isinstance(options, Mapping):
        raise RequestError(f"options: expected an object, found {safe_repr(options)}")
    made: dict[str, Any] = {}
    for name, value in options.items():
        if value is None or name in _LOADING or name in _MIROSTAT or name == "repeat_last_n":
            continue
        if name in _OPTIONS:
            made[_OPTIONS[name]] = value
        elif name not in _ONLY:
            raise RequestError(f"options: {safe_repr(name)} is unknown; leave it out")
        elif value not in _ONLY[name]:
            raise RequestError(
                f"options: {name}: expected {_ONLY[name][0]!r}, found {safe_repr(value)}; other "
                "values are not supported"
            )
    _check_window(options.get("repeat_last_n"), made)
    if made.get("max_tokens") in (-1, -2):  # no limit; to the end of the context
        del made["max_tokens"]
    return made


def _check_window(window: object, made: dict[str, Any]) -> None:
    """``repeat_last_n``: for how many tokens penalties count; -1: all, 0: none."""
    if window is None or window == -1:
        return
    given = [name for name in _PENALTIES if made.get(name) not in (None, 0, 1)]
    if window == 0:
        for name in given:
            del made[name]
    elif given:
        raise RequestError(
            "options: repeat_last_n: expected -1 or 0 beside a penalty, found "
            f"{safe_repr(window)}; penalties look at the whole text"
        )


def thinking(body: Body, target: Target) -> dict[str, Any]:
    """The variables of the chat template for ``think``.

    :raises RequestError: it is not such a value, or the model does not think.
    """
    think = body.take("think")
    if think is None:
        return {}
    if not isinstance(think, bool) and think not in _LEVELS:
        raise RequestError(
            f"think: expected true, false, 'low', 'medium' or 'high', found {safe_repr(think)}"
        )
    if think and not target.served.reasons:
        raise RequestError(
            f"think: {target.name} does not support thinking: its chat template has no reasoning; "
            "leave it out"
        )
    if isinstance(think, bool):
        return {"enable_thinking": think}
    return {"enable_thinking": True, "reasoning_effort": think}


def message_of(given: Any, target: Target) -> Any:
    """A message with OpenAI's names."""
    if not isinstance(given, Mapping):
        return given
    images = images_of(given.get("images"), target)
    message = {key: value for key, value in given.items() if key != "images" and value is not None}
    if images:
        message["content"] = with_text(images, message.get("content"))
    if "tool_name" in message:
        message["name"] = message.pop("tool_name")
    if thoughts := message.pop("thinking", ""):
        message["reasoning_content"] = thoughts
    return message


def with_text(images: list[dict[str, Any]], text: object) -> list[dict[str, Any]]:
    """The content of a message, in which images come first, as in Ollama."""
    return [*images, {"type": "text", "text": text}] if text else images
