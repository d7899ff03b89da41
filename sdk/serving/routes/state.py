"""``/health``, ``/ready``, ``/v1/models``: what is there, and whether it can be used."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import datetime, timezone
from typing import Any

from sdk.api.errors import EngineAsleepError, SdkError
from sdk.serving.endpoint import Services
from sdk.serving.exchange import Exchange


async def health(exchange: Exchange, services: Services) -> None:
    """200 while the process can work; 503 once a model is dead or closed: restart it."""
    dead = {}
    for served in services.models:
        try:
            served.llm.get_metrics()
        except EngineAsleepError:
            pass
        except SdkError as error:
            dead[served.name] = str(error)
    state = {"status": "dead", "models": dead} if dead else {"status": "ok"}
    await exchange.respond_json(state, 503 if dead else 200)


async def ready(exchange: Exchange, services: Services) -> None:
    """200 if every model accepts requests; 503 while one sleeps, or is dead or closed."""
    states = {}
    for served in services.models:
        try:
            served.llm.get_metrics()
            states[served.name] = "ready"
        except EngineAsleepError:
            states[served.name] = "asleep"
        except SdkError as error:
            states[served.name] = str(error)
    fine = all(state == "ready" for state in states.values())
    state = {"status": "ready" if fine else "not ready", "models": states}
    await exchange.respond_json(state, 200 if fine else 503)


async def models(exchange: Exchange, services: Services) -> None:
    """The names that requests may use; for Anthropic's clients as they read them."""
    cards = services.models.cards()
    if exchange.header(b"anthropic-version") is None:
        await exchange.respond_json({"object": "list", "data": cards})
        return
    data = [_anthropic(card) for card in cards]
    ends = {"first_id": data[0]["id"], "last_id": data[-1]["id"]}
    await exchange.respond_json({"data": data, "has_more": False, **ends})


def _anthropic(card: Mapping[str, Any]) -> dict[str, Any]:
    created = datetime.fromtimestamp(card["created"], timezone.utc)
    name = card["id"]
    at = created.isoformat().replace("+00:00", "Z")
    return {"type": "model", "id": name, "display_name": name, "created_at": at}


async def model(exchange: Exchange, services: Services) -> None:
    """One of them. :raises Refused: there is no such model."""
    name = exchange.path_parameter("model")
    services.models.named(name)  # also where a request could have any
    [card] = [card for card in services.models.cards() if card["id"] == name]
    if exchange.header(b"anthropic-version") is not None:
        card = _anthropic(card)
    await exchange.respond_json(card)
