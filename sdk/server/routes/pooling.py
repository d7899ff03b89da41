"""``/v1/embeddings``, ``/v1/rerank``, ``/v1/score``: answers without tokens."""

from __future__ import annotations

import base64
import struct
import uuid
from collections.abc import Sequence
from typing import Any

from sdk.async_llm import AsyncLLM
from sdk.errors import RequestError
from sdk.openai.requests import Body, prompts_of
from sdk.openai.responses import Responses
from sdk.quant.safe_repr import safe_repr
from sdk.server.access import Demand
from sdk.server.endpoint import Services, admitted, salted
from sdk.server.errors import check_ended
from sdk.server.exchange import Departure, Exchange
from sdk.server.models import Target


async def embeddings(exchange: Exchange, services: Services) -> None:
    """A vector for each text."""
    body = Body(await exchange.read_json(services.max_body_bytes))
    target = services.models.resolve(body.take("model"))
    prompts = prompts_of(body.take("input"), "input")
    encoding = body.take("encoding_format", "float")
    if encoding not in ("float", "base64"):
        raise RequestError(
            f"encoding_format: expected 'float' or 'base64', found {safe_repr(encoding)}"
        )
    if body.take("dimensions") is not None:
        raise RequestError("dimensions: is not supported; leave it out")
    salt = salted(exchange.caller, body.take_text("cache_salt"))
    cut = body.take("truncate_prompt_tokens")
    body.end()
    async with Departure(exchange):
        read = await target.served.read(prompts, cut)
        demand = Demand(_count(read), 0, 1, target.name, len(read))
        with await admitted(exchange, services, demand):
            given = [{"prompt_token_ids": one.token_ids} for one in read]
            if salt is not None:
                given = [{**one, "cache_salt": salt} for one in given]  # type: ignore[dict-item]
            found = await AsyncLLM(target.llm).embed(
                given, lora_request=target.lora, tenant=_tenant(exchange, target)
            )
            made = Responses("embd", target.name, check_ended).embeddings(found)
            if encoding == "base64":
                for one in made.data:
                    one.embedding = _as_base64(one.embedding)
            await exchange.respond_json(made.wire())


def _as_base64(vector: Any) -> str:
    return base64.b64encode(struct.pack(f"<{len(vector)}f", *vector)).decode()


async def rerank(exchange: Exchange, services: Services) -> None:
    """The documents that match a query best: the API of Cohere and Jina, as vLLM has it."""
    body = Body(await exchange.read_json(services.max_body_bytes))
    target = services.models.resolve(body.take("model"))
    query, top_n = body.take("query"), body.take("top_n")
    documents = _documents(body.take("documents"))
    shown = body.take_flag("return_documents", True)
    salt = salted(exchange.caller, body.take_text("cache_salt"))
    if top_n == 0:  # Cohere: all
        top_n = None
    body.end()
    if not isinstance(query, str):
        raise RequestError(f"query: expected a string, found {safe_repr(query)}")
    async with Departure(exchange):
        count = await _count_pairs(target, [query], documents)
        demand = Demand(count, 0, 1, target.name, max(1, len(documents)))
        with await admitted(exchange, services, demand):
            found = await AsyncLLM(target.llm).rerank(
                query,
                documents,
                top_n,
                lora_request=target.lora,
                tenant=_tenant(exchange, target),
                cache_salt=salt,
            )
            results = [
                {
                    "index": one.index,
                    "relevance_score": one.relevance_score,
                    **({"document": {"text": one.document}} if shown else {}),
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


def _documents(given: object) -> list[str]:
    """Documents are texts, or objects with one."""
    if not isinstance(given, list):
        raise RequestError(f"documents: expected a list of texts, found {safe_repr(given)}")
    texts: list[str] = []
    for index, one in enumerate(given):
        text = one.get("text") if isinstance(one, dict) else one
        if not isinstance(text, str):
            raise RequestError(f"documents[{index}]: expected a text, found {safe_repr(one)}")
        texts.append(text)
    return texts


async def score(exchange: Exchange, services: Services) -> None:
    """How well texts match, pair by pair: vLLM's API."""
    body = Body(await exchange.read_json(services.max_body_bytes))
    target = services.models.resolve(body.take("model"))
    left = prompts_of(body.take("text_1"), "text_1")
    right = prompts_of(body.take("text_2"), "text_2")
    salt = salted(exchange.caller, body.take_text("cache_salt"))
    body.end()
    async with Departure(exchange):
        count = await _count_pairs(target, left, right)
        with await admitted(exchange, services, Demand(count, 0, 1, target.name, len(right))):
            found = await AsyncLLM(target.llm).score(
                left,
                right,
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


async def _count_pairs(target: Target, left: Sequence[Any], right: Sequence[Any]) -> int:
    """The tokens of all prompts that are computed, with the model's own template for pairs."""
    if not right:
        return 0
    pooling = target.llm._pooling
    return await target.served.briefly([left, right], lambda: pooling.pair_tokens(left, right))


def _count(prompts: Sequence[Any]) -> int:
    return sum(len(prompt.token_ids) for prompt in prompts)
