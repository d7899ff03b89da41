"""``/metrics``: numbers for Prometheus."""

from __future__ import annotations

from typing import TYPE_CHECKING

from sdk.server.access import Refused
from sdk.server.endpoint import Services
from sdk.server.exchange import Exchange

if TYPE_CHECKING:
    from prometheus_client import CollectorRegistry


class Metrics:
    """A handler whose response has the numbers of all models, with a registry of its own.

    ``prefix``: of the names (``"vllm"`` for dashboards that were made for it).
    """

    def __init__(self, prefix: str) -> None:
        self._prefix = prefix
        self._registry: CollectorRegistry | None = None  # made when it is first asked for

    async def __call__(self, exchange: Exchange, services: Services) -> None:
        """:raises Refused: the extra ``metrics`` is not installed."""
        try:
            from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, generate_latest

            from sdk.metrics.prometheus import collector
        except ImportError as error:
            message = 'metrics: prometheus-client is not installed: pip install "embedlm[metrics]"'
            raise Refused(501, message, "not_installed") from error
        if self._registry is None:
            self._registry = CollectorRegistry()
            named = {served.name: served.llm for served in services.models}
            self._registry.register(collector(named, prefix=self._prefix))
        text = generate_latest(self._registry)
        await exchange.respond(text, kind=CONTENT_TYPE_LATEST.encode())
