"""Loads, pins and removes adapters in the slots of an engine, for callers on any thread."""

from __future__ import annotations

from sdk.api.errors import RequestError
from sdk.api.lora import KnownAdapter
from sdk.engine.engine import Engine
from sdk.requests.driver import Driver

_SECONDS = 0.05


class EngineResidency:
    """See :class:`sdk.requests.adapters.Residency`."""

    def __init__(self, driver: Driver, engine: Engine) -> None:
        slots, loader = engine.scheduler.adapters, engine.adapters
        assert slots is not None and loader is not None
        self._driver = driver
        self._engine = engine
        self._slots = slots
        self._loader = loader

    def load(self, adapter: KnownAdapter, *, pin: bool) -> None:
        """Load an adapter now, if a slot is free or unused; otherwise a request will load it."""
        found = self._driver.between_steps(lambda: self._slots.load(adapter, pin=pin))
        if found is None:
            if pin:
                raise RequestError(
                    f"adapter {adapter.name!r} cannot be pinned now: running requests use all "
                    f"{self._slots.num_slots} slots (max_loras) or the bytes of lora_memory; try "
                    "again when some have ended, or raise the limit"
                )
            return
        while found.slot >= 0 and not found.ready:
            self._loader.wait(_SECONDS)
            self._driver.between_steps(self._engine.advance_adapters)
        if found.error is not None:
            raise found.error

    def remove(self, adapter: KnownAdapter) -> None:
        """Let an adapter go once no request uses it."""

        def remove() -> None:
            self._slots.remove(adapter.key)
            self._engine.advance_adapters()

        self._driver.between_steps(remove)

    def state(self, adapter: KnownAdapter) -> tuple[bool, bool, int]:
        """Whether it is loaded, whether it is pinned, and how many requests use it."""
        found = self._slots.find(adapter.key)
        if found is None:
            return False, False, 0
        return found.ready, found.pinned, found.num_requests
