"""``/metrics``: the numbers of all models for Prometheus."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from sdk.kernels.packages import missing
from sdk.serving.access import Refused
from sdk.serving.endpoint import Services
from sdk.serving.exchange import Exchange
from sdk.serving.models import Models

#: The metrics as text, and their media type.
Scrape = Callable[[str], tuple[bytes, str]]


class Metrics:
    """The handler. It needs prometheus-client, which is imported at the first scrape.

    ``prefix``: of the names; ``"vllm"`` for dashboards that were made for vLLM.
    """

    def __init__(self, models: Models, prefix: str) -> None:
        self._models = models
        self._prefix = prefix
        self._scrape: Scrape | None = None

    async def __call__(self, exchange: Exchange, services: Services) -> None:
        """:raises Refused: prometheus-client is not installed."""
        if self._scrape is None:
            self._scrape = self._made()
        accept = (exchange.header(b"accept") or b"").decode("latin-1")
        # In a thread: a scrape of many tenants takes milliseconds, and may wait for a step.
        text, kind = await asyncio.to_thread(self._scrape, accept)
        await exchange.respond(text, kind=kind.encode())

    def _made(self) -> Scrape:
        try:
            from prometheus_client import CollectorRegistry
            from prometheus_client.exposition import choose_encoder
        except ModuleNotFoundError as error:
            raise Refused(501, str(missing(error, "/metrics needs")), "not_installed") from error
        from sdk.metrics.prometheus import collector

        registry = CollectorRegistry()
        llms = {served.name: served.llm for served in self._models}
        registry.register(collector(llms, prefix=self._prefix))

        def scrape(accept: str) -> tuple[bytes, str]:
            encode, kind = choose_encoder(accept)
            return encode(registry), kind

        return scrape
