"""``/api/tags``, ``/api/ps``, ``/api/show``, ``/api/version``: which models there are."""

from __future__ import annotations

import hashlib
from typing import Any

from sdk import __version__
from sdk.serving.access import Refused
from sdk.serving.endpoint import Services
from sdk.serving.exchange import Exchange
from sdk.serving.model_files import ModelFiles, number_text
from sdk.serving.models import Served, Target
from sdk.serving.ollama.lines import time_text
from sdk.serving.ollama.requests import resolved
from sdk.serving.openai.requests import Body

#: For models that are not unloaded by themselves.
_NEVER = "9999-12-31T23:59:59Z"
#: Fields of a config with the names of GGUF's metadata.
_INFO = (
    ("context_length", "max_position_embeddings"),
    ("embedding_length", "hidden_size"),
    ("block_count", "num_hidden_layers"),
    ("feed_forward_length", "intermediate_size"),
    ("attention.head_count", "num_attention_heads"),
    ("attention.head_count_kv", "num_key_value_heads"),
    ("vocab_size", "vocab_size"),
)


async def tags(exchange: Exchange, services: Services) -> None:
    """The models under all their names."""
    cards = []
    for served in services.models:
        found = {**_card(served), "modified_at": time_text(served.files.modified or served.created)}
        cards += [{**found, "name": name, "model": name} for name in served.all_names()]
    await exchange.respond_json({"models": cards})


async def running(exchange: Exchange, services: Services) -> None:
    """The same: all models are loaded. ``size`` is what they may take of the memory."""
    cards = []
    for served in services.models:
        size, on_card = served.memory
        found = {
            **_card(served),
            "size": size,
            "size_vram": size if on_card else 0,
            "expires_at": _NEVER,
            "context_length": served.llm.max_model_len,
        }
        cards += [{**found, "name": name, "model": name} for name in served.all_names()]
    await exchange.respond_json({"models": cards})


async def show(exchange: Exchange, services: Services) -> None:
    """One model: its template, sizes and capabilities."""
    body = Body(await exchange.read_json(services.max_body_bytes))
    name, older = body.take("model"), body.take("name")
    target = resolved(services.models, older if name is None else name)
    body.take_flag("verbose")
    body.end()
    served = target.served
    template = served.template or ""
    await exchange.respond_json(
        {
            "modelfile": f"# {target.name}, served by embedlm\nFROM {served.name}\n",
            "parameters": _parameters(target),
            "template": template,
            "details": _card(served)["details"],
            "model_info": _info(served.files),
            "capabilities": _capabilities(served, template),
            "modified_at": time_text(served.files.modified or served.created),
        }
    )


async def version(exchange: Exchange, services: Services) -> None:
    """Our version."""
    await exchange.respond_json({"version": __version__})


async def refuse(exchange: Exchange, services: Services) -> None:
    """Requests that would change the models of a server. :raises Refused: always."""
    raise Refused(
        501,
        f"{exchange.path}: is not supported; who starts the server chooses its models",
        "not_supported",
    )


def _card(served: Served) -> dict[str, Any]:
    files = served.files
    facts = (files.family, files.size, files.parameters, files.modified, served.name)
    return {
        "size": files.size,
        # of what distinguishes models here: hashing gigabytes would take seconds
        "digest": hashlib.sha256(repr(facts).encode()).hexdigest(),
        "details": {
            "parent_model": "",
            "format": files.format,
            "family": files.family,
            "families": [files.family] if files.family else [],
            "parameter_size": number_text(files.parameters) if files.parameters else "",
            "quantization_level": files.quantization,
        },
    }


def _info(files: ModelFiles) -> dict[str, Any]:
    """Sizes with the names of GGUF's metadata."""
    if not files.family:
        return {}
    config = {**files.config, **(files.config.get("text_config") or {})}
    named = {f"{files.family}.{ours}": config.get(theirs) for ours, theirs in _INFO}
    return {
        "general.architecture": files.family,
        "general.parameter_count": files.parameters,
        **{name: value for name, value in named.items() if value is not None},
    }


def _parameters(target: Target) -> str:
    """The model's own sampling parameters, as in a Modelfile."""
    params = target.llm.get_default_sampling_params()
    given = {
        "temperature": params.temperature,
        "top_k": params.top_k,
        "top_p": params.top_p,
        "min_p": params.min_p,
        "repeat_penalty": params.repetition_penalty,
    }
    return "\n".join(f"{name:<30} {value:g}" for name, value in given.items())


def _capabilities(served: Served, template: str) -> list[str]:
    if not served.llm._job_maker.generates:
        return ["embedding"]
    found = ["completion", "embedding"]
    if template:
        found.append("tools")  # a template without a place for them gets them in words
    if served.sees:
        found.append("vision")
    if served.reasons:
        found.append("thinking")
    if served.infills:
        found.append("insert")
    return found
