"""``/api/embed`` and the older ``/api/embeddings``."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

from sdk.api.errors import RequestError
from sdk.quant.embedding_head import unit
from sdk.quant.safe_repr import safe_repr
from sdk.requests.pooling.vectors import Wanted
from sdk.serving.endpoint import Services, salted
from sdk.serving.exchange import Departure, Exchange
from sdk.serving.models import Target
from sdk.serving.ollama.lines import nanoseconds
from sdk.serving.ollama.requests import begin, options_of
from sdk.serving.routes.pooling import embedded, read_dimensions


async def embed(exchange: Exchange, services: Services) -> None:
    """Vectors of length 1 of one or more texts; without a text the model is loaded."""
    body, target = await begin(exchange, services)
    given = body.take("input", [])
    texts = [given] if isinstance(given, str) else given
    if not isinstance(texts, list) or not all(isinstance(one, str) for one in texts):
        raise RequestError(f"input: expected a text or a list of texts, found {safe_repr(given)}")
    texts = [] if given == "" else texts
    cut = -1 if body.take_flag("truncate", True) else None
    wanted = Wanted(dimensions=read_dimensions(body, target))
    options_of(body)
    body.end()
    vectors, count = await _vectors(exchange, services, target, texts, cut, wanted)
    if not target.llm._pooling.gives_units:  # this route always does
        vectors = [unit(vector) for vector in vectors]
    took = nanoseconds(time.monotonic() - exchange.began)
    await exchange.respond_json(
        {
            "model": target.name,
            "embeddings": vectors,
            "total_duration": took,
            "load_duration": 0,
            "prompt_eval_count": count,
        }
    )


async def embeddings(exchange: Exchange, services: Services) -> None:
    """The vector of one text."""
    body, target = await begin(exchange, services)
    prompt = body.take("prompt", "")
    if not isinstance(prompt, str):
        raise RequestError(f"prompt: expected a string, found {safe_repr(prompt)}")
    options_of(body)
    body.end()
    texts = [prompt] if prompt else []
    vectors, _ = await _vectors(exchange, services, target, texts, -1, Wanted())
    await exchange.respond_json({"embedding": vectors[0] if vectors else []})


async def _vectors(
    exchange: Exchange,
    services: Services,
    target: Target,
    texts: Sequence[str],
    cut: int | None,
    wanted: Wanted,
) -> tuple[list[Any], int]:
    """The vectors, and the number of tokens."""
    if not texts:
        return [], 0
    async with Departure(exchange):
        read = await target.served.read(texts, cut, wanted)
        salt = salted(exchange.caller, None)
        found = await embedded(exchange, services, target, read, salt, wanted)
        return [one.embedding for one in found], sum(len(one.token_ids) for one in read)
