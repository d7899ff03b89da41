"""``/v1/embeddings``, ``/pooling``, ``/classify``, ``/v1/rerank``, ``/v1/score``: answers without
tokens."""

from __future__ import annotations

import base64
import struct
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from sdk.api.errors import RequestError
from sdk.api.outputs import ClassificationOutput, EmbeddingOutput
from sdk.async_llm import AsyncLLM
from sdk.quant.safe_repr import safe_repr
from sdk.requests.pooling.vectors import Wanted
from sdk.requests.prompts.reader import Prompt
from sdk.serving.access import Demand
from sdk.serving.endpoint import Services, admitted, salted
from sdk.serving.errors import check_ended
from sdk.serving.exchange import Departure, Exchange
from sdk.serving.items import read_conversation, read_items, read_prompts
from sdk.serving.models import Target
from sdk.serving.openai.requests import Body, prompts_of
from sdk.serving.openai.responses import Responses

_TASKS = ("token_embed", "embed", "classify")


async def embeddings(exchange: Exchange, services: Services) -> None:
    """A vector for each text or image, or for a conversation (vLLM)."""
    body = Body(await exchange.read_json(services.max_body_bytes))
    target = services.models.resolve(body.take("model"))
    given, messages = body.take("input"), body.take("messages")
    answer = body.take_flag("add_generation_prompt", False)
    encode = read_encoding(body)
    wanted = read_wanted(body, target)
    salt = salted(exchange.caller, body.take_text("cache_salt"))
    cut = read_cut(body)
    body.end()
    async with Departure(exchange):
        if messages is None:
            prompts = await read_prompts(given, "input", target, services)
        elif given is None:
            prompts = await read_conversation(messages, answer, target, services)
        else:
            raise RequestError("input, messages: expected one of the two, found both")
        read = await target.served.read(prompts, cut, wanted)
        found = await embedded(exchange, services, target, read, salt, wanted)
        made = Responses("embd", target.name, check_ended).embeddings(found)
        for one, vector in zip(made.data, found, strict=True):
            one.embedding = encode(vector.embedding)
        await exchange.respond_json(made.wire())


async def embedded(
    exchange: Exchange,
    services: Services,
    target: Target,
    read: Sequence[Prompt],
    salt: str | None,
    wanted: Wanted,
) -> list[EmbeddingOutput]:
    """The vectors of prompts that were read. :raises Refused: they are too much."""
    demand = Demand(_count(read), 0, 1, target.name, len(read))
    with await admitted(exchange, services, demand):
        return await AsyncLLM(target.llm).embed(
            _given(read, salt),
            dimensions=wanted.dimensions,
            output_dtype=wanted.output_dtype,
            lora_request=target.lora,
            tenant=_tenant(exchange, target),
        )


def _given(read: Sequence[Prompt], salt: str | None) -> list[Any]:
    """Prompts that were read, for a call."""
    return [replace(one, cache_salt=salt) for one in read]


def read_wanted(body: Body, target: Target) -> Wanted:
    """What a request asks of embeddings: ``dimensions`` (OpenAI), ``prompt`` and ``prompt_name``
    (sentence-transformers), ``output_dtype``.

    :raises RequestError: one is invalid.
    """
    return Wanted(
        body.take_text("prompt_name"),
        body.take_text("prompt"),
        read_dimensions(body, target),
        body.take("output_dtype", "float32"),
    )


def read_cut(body: Body) -> int | None:
    """``truncate_prompt_tokens``, or ``truncate`` (text-embeddings-inference): true for -1.

    :raises RequestError: both are there.
    """
    cut = body.take("truncate_prompt_tokens")
    if not body.take_flag("truncate", False):
        return cut  # type: ignore[no-any-return]
    if cut is not None:
        raise RequestError("truncate, truncate_prompt_tokens: expected one of the two, found both")
    return -1


def read_dimensions(body: Body, target: Target) -> int | None:
    """``dimensions``: how many numbers of a vector are wanted, by vLLM's rule.

    The config of a model that was trained for it has ``matryoshka_dimensions``, a list of them, or
    ``is_matryoshka``; ``hf_overrides`` can add either.

    :raises RequestError: the model was not trained for that, or not for this many.
    """
    wanted = body.take("dimensions")
    if wanted is None:
        return None
    config = target.served.files.config
    listed = config.get("matryoshka_dimensions")
    if not listed and not config.get("is_matryoshka"):
        raise RequestError(
            f"dimensions: is not supported by {target.name}: its config has neither "
            "matryoshka_dimensions nor is_matryoshka, and the first numbers of its vectors alone "
            "mean little. Leave it out; if the model was trained for shorter vectors, load it with "
            "hf_overrides={'is_matryoshka': True}"
        )
    number = isinstance(wanted, int) and not isinstance(wanted, bool) and wanted > 0
    if not number or (listed and wanted not in listed):
        expected = f"one of {', '.join(map(str, listed))}" if listed else "a positive integer"
        raise RequestError(f"dimensions: expected {expected}, found {safe_repr(wanted)}")
    return wanted  # type: ignore[no-any-return]


def read_encoding(body: Body) -> Callable[[Any], Any]:
    """``encoding_format``: what writes a list of numbers, which may have lists of them inside.

    :raises RequestError: it is not such a format.
    """
    encoding = body.take("encoding_format", "float")
    if encoding not in ("float", "base64"):
        raise RequestError(
            f"encoding_format: expected 'float' or 'base64', found {safe_repr(encoding)}"
        )
    return _as_base64 if encoding == "base64" else list


def _as_base64(vector: Any) -> str:
    """Numbers as float32, little-endian, or integers of a byte each; those of several lists one
    after the other."""
    rows = vector if len(vector) and isinstance(vector[0], list) else [vector]
    packed = (_bytes(row) for row in rows)
    return base64.b64encode(b"".join(packed)).decode()


def _bytes(row: Sequence[Any]) -> bytes:
    if row and isinstance(row[0], int):
        return bytes(value & 255 for value in row)
    return struct.pack(f"<{len(row)}f", *row)


async def pooling(exchange: Exchange, services: Services) -> None:
    """The hidden states of each text: vLLM's API.

    ``task``: ``token_embed`` (default) for a vector for every token, ``embed`` for one of the whole
    text, ``classify`` for the classes of a classification head.
    """
    body = Body(await exchange.read_json(services.max_body_bytes))
    target = services.models.resolve(body.take("model"))
    prompts = prompts_of(body.take("input"), "input")
    encode = read_encoding(body)
    task = body.take("task", "token_embed")
    if task not in _TASKS:
        raise RequestError(f"task: expected one of {', '.join(_TASKS)}, found {safe_repr(task)}")
    normalized = body.take_flag("normalize", body.take_flag("use_activation", True))
    wanted = read_wanted(body, target) if task == "embed" else None
    salt = salted(exchange.caller, body.take_text("cache_salt"))
    cut = read_cut(body)
    body.end()
    async with Departure(exchange):
        read = await target.served.read(prompts, cut, wanted)
        if task == "classify":
            classes = await _classified(exchange, services, target, read, salt, normalized)
            rows: list[Sequence[float]] = [one.probs for one in classes]
        else:
            mode: Any = "token" if task == "token_embed" else None
            demand = Demand(_count(read), 0, 1, target.name, len(read))
            with await admitted(exchange, services, demand):
                found = await AsyncLLM(target.llm).encode(
                    _given(read, salt),
                    pooling=mode,
                    normalize=normalized,
                    lora_request=target.lora,
                    tenant=_tenant(exchange, target),
                )
            rows = [one.outputs.data.tolist() for one in found]
        if wanted is not None:
            is_unit = normalized or target.llm._pooling.gives_units
            rows = [wanted.vector(row, is_unit) for row in rows]
        data = [
            {"index": index, "object": "pooling", "data": encode(row)}
            for index, row in enumerate(rows)
        ]
        await exchange.respond_json(_listed("pool", target, data, _count(read)))


async def classify(exchange: Exchange, services: Services) -> None:
    """The classes of each text: vLLM's API. ``labels``: see :meth:`sdk.LLM.classify`."""
    body = Body(await exchange.read_json(services.max_body_bytes))
    target = services.models.resolve(body.take("model"))
    given, labels = body.take("input"), body.take("labels")
    probable = body.take_flag("activation", body.take_flag("use_activation", True))
    salt = salted(exchange.caller, body.take_text("cache_salt"))
    cut = read_cut(body)
    body.end()
    async with Departure(exchange):
        prompts = await read_prompts(given, "input", target, services)
        read = await target.served.read(prompts, cut)
        found = await _classified(exchange, services, target, read, salt, probable, labels)
        data = [
            {"index": index, "label": one.label, "probs": one.probs, "num_classes": one.num_classes}
            for index, one in enumerate(found)
        ]
        await exchange.respond_json(_listed("classify", target, data, _count(read)))


async def _classified(
    exchange: Exchange,
    services: Services,
    target: Target,
    read: Sequence[Prompt],
    salt: str | None,
    probable: bool,
    labels: Any = None,
) -> list[ClassificationOutput]:
    """:raises RequestError: the model has no classification head."""
    with await admitted(exchange, services, Demand(_count(read), 0, 1, target.name, len(read))):
        return await AsyncLLM(target.llm).classify(
            _given(read, salt),
            labels=labels,
            use_activation=probable,
            lora_request=target.lora,
            tenant=_tenant(exchange, target),
        )


def _listed(prefix: str, target: Target, data: list[dict[str, Any]], count: int) -> dict[str, Any]:
    """A response of vLLM's API."""
    return {
        "id": f"{prefix}-{uuid.uuid4().hex}",
        "object": "list",
        "created": int(time.time()),
        "model": target.name,
        "data": data,
        "usage": {"prompt_tokens": count, "total_tokens": count, "completion_tokens": 0},
    }


async def rerank(exchange: Exchange, services: Services) -> None:
    """The documents that match a query best: the API of Cohere and Jina, as vLLM has it."""
    body = Body(await exchange.read_json(services.max_body_bytes))
    target = services.models.resolve(body.take("model"))
    asked, top_n = body.take("query"), body.take("top_n")
    given = body.take("documents")
    shown = body.take_flag("return_documents", True)
    salt = salted(exchange.caller, body.take_text("cache_salt"))
    if top_n == 0:  # Cohere: all
        top_n = None
    cut = read_cut(body)
    body.end()
    if not isinstance(asked, str | Mapping):
        raise RequestError(f"query: expected a string, found {safe_repr(asked)}")
    async with Departure(exchange):
        [query] = await read_items(asked, "query", target, services)
        documents = await _documents(given, target, services)
        count = await _count_pairs(target, [query], documents, cut)
        demand = Demand(count, 0, 1, target.name, max(1, len(documents)))
        with await admitted(exchange, services, demand):
            found = await AsyncLLM(target.llm).rerank(
                query,
                documents,
                top_n,
                truncate_prompt_tokens=cut,
                lora_request=target.lora,
                tenant=_tenant(exchange, target),
                cache_salt=salt,
            )
            results = [
                {
                    "index": one.index,
                    "relevance_score": one.relevance_score,
                    **_shown(one.document if shown else None),
                }
                for one in found
            ]
            await exchange.respond_json(
                {
                    "id": f"rerank-{uuid.uuid4().hex}",
                    "model": target.name,
                    "usage": {"total_tokens": count},
                    "results": results,
                }
            )


def _shown(document: object) -> dict[str, Any]:
    """A document in a result: texts alone, since an image may have megabytes."""
    return {"document": {"text": document}} if isinstance(document, str) else {}


async def _documents(given: object, target: Target, services: Services) -> list[Any]:
    """Documents are texts, or objects with one or with an image."""
    if not isinstance(given, list):
        raise RequestError(f"documents: expected a list of texts, found {safe_repr(given)}")
    for index, one in enumerate(given):
        if not isinstance(one, str | Mapping):
            raise RequestError(f"documents[{index}]: expected a text, found {safe_repr(one)}")
    texts = [
        one["text"] if isinstance(one, Mapping) and isinstance(one.get("text"), str) else one
        for one in given
    ]
    return await read_items(texts, "documents", target, services) if texts else []


async def score(exchange: Exchange, services: Services) -> None:
    """How well texts match, pair by pair: vLLM's API."""
    body = Body(await exchange.read_json(services.max_body_bytes))
    target = services.models.resolve(body.take("model"))
    first, second = body.take("text_1"), body.take("text_2")
    salt = salted(exchange.caller, body.take_text("cache_salt"))
    cut = read_cut(body)
    body.end()
    async with Departure(exchange):
        left = await read_items(first, "text_1", target, services)
        right = await read_items(second, "text_2", target, services)
        count = await _count_pairs(target, left, right, cut)
        with await admitted(exchange, services, Demand(count, 0, 1, target.name, len(right))):
            found = await AsyncLLM(target.llm).score(
                left,
                right,
                truncate_prompt_tokens=cut,
                lora_request=target.lora,
                tenant=_tenant(exchange, target),
                cache_salt=salt,
            )
            data = [
                {"index": index, "object": "score", "score": one.score}
                for index, one in enumerate(found)
            ]
            await exchange.respond_json(
                {
                    "id": f"score-{uuid.uuid4().hex}",
                    "object": "list",
                    "model": target.name,
                    "data": data,
                    "usage": {"prompt_tokens": count, "total_tokens": count},
                }
            )


def _tenant(exchange: Exchange, target: Target) -> str | None:
    """The caller's tenant, which now has its share of the model."""
    target.served.weigh(exchange.caller)
    return exchange.caller.tenant


async def _count_pairs(
    target: Target, left: Sequence[Any], right: Sequence[Any], cut: int | None
) -> int:
    """The tokens of all prompts that are computed, with the model's own template for pairs."""
    if not right:
        return 0
    pooling = target.llm._pooling
    return await target.served.briefly([left, right], lambda: pooling.pair_tokens(left, right, cut))


def _count(prompts: Sequence[Any]) -> int:
    return sum(len(prompt.token_ids) for prompt in prompts)
