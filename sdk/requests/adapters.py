"""The adapters of an ``LLM``: those it knows by name, and which of them are in memory."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from os import PathLike, fspath
from typing import Any, Protocol

from sdk.api.errors import RequestError
from sdk.api.flags import check_flags
from sdk.api.lora import KnownAdapter, LoRAInfo, LoRARequest
from sdk.engine.engine import Engine
from sdk.quant.safe_repr import safe_repr
from sdk.requests.driving.driver import Driver

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


_OFF = "lora_request: this LLM was loaded without room for adapters; load it with enable_lora=True"


class Residency(Protocol):
    """Where adapters are loaded: the slots of an engine."""

    def load(self, adapter: KnownAdapter, *, pin: bool) -> None:
        """Load it now if there is room. :raises SdkError: it cannot be loaded or pinned."""

    def remove(self, adapter: KnownAdapter) -> None:
        """Let it go once no request uses it."""

    def state(self, adapter: KnownAdapter) -> tuple[bool, bool, int]:
        """Whether it is loaded, whether it is pinned, and how many requests use it."""


class Adapters:
    """See the module. Usable from any thread.

    ``open_adapter`` checks an adapter's files against the model and takes its time;
    ``None``: adapters are off.
    """

    def __init__(
        self,
        open_adapter: Callable[[LoRARequest], KnownAdapter] | None,
        residency: Residency | None,
    ) -> None:
        self._open = open_adapter
        self._residency = residency
        self._known: dict[str, KnownAdapter] = {}
        self._lock = threading.Lock()  # of the names
        self._opening = threading.Lock()  # held by the thread that reads an adapter's file
        #: The adapter of calls that name none.
        self.default: str | None = None

    # ---- requests --------------------------------------------------------------------------------

    def knows(self, given: Any) -> bool:
        """Whether :meth:`of` reads no file."""
        items = given if isinstance(given, list | tuple) else [given]
        return all(
            one is None or isinstance(one, str) or self._same(one) is not None for one in items
        )

    def of(self, given: Any, count: int) -> list[KnownAdapter | None]:
        """The adapter of each of ``count`` prompts; those that are new are opened.

        :raises RequestError: ``given`` is not an adapter, or is unknown.
        :raises CheckpointError: its files are missing, damaged, or for another model.
        """
        given = self.default if given is None else given
        if given is None:
            return [None] * count
        if isinstance(given, str | LoRARequest) or _is_foreign(given):
            return [self._find(given)] * count
        if not isinstance(given, Sequence) or len(given) != count:
            found = len(given) if isinstance(given, Sequence) else safe_repr(given)
            raise RequestError(
                f"lora_request: expected a LoRARequest or a name, or one for each prompt "
                f"({count}), found {found}"
            )
        return [None if one is None else self._find(one) for one in given]

    def _find(self, given: Any) -> KnownAdapter:
        self._check_on()
        if isinstance(given, str):
            found = self._known.get(given)
            if found is None:
                names = ", ".join(map(repr, list(self._known)[:8])) or "none"
                raise RequestError(
                    f"lora_request: no adapter is called {safe_repr(given)}; there are {names}. "
                    "Add it with add_lora(name, path)"
                )
            return found
        if (found := self._same(given)) is None:
            with self._opening:  # the first requests of an adapter come at one time
                found = self._same(given) or self._add(as_ours(given))
        return found

    def _check_on(self) -> None:
        if self._open is None:
            raise RequestError(_OFF)

    def _same(self, given: Any) -> KnownAdapter | None:
        """The adapter that was added by an equal request."""
        found = self._known.get(getattr(given, "lora_name", None) or "")
        if found is None or getattr(given, "load_inplace", False):
            return None
        known, path = found.lora_request, getattr(given, "lora_path", "")
        same = (given.lora_int_id, getattr(given, "lora_scale", 1.0))
        is_same = same == (known.lora_int_id, known.lora_scale)
        return found if is_same and path in ("", known.lora_path) else None

    def _add(self, request: LoRARequest) -> KnownAdapter:
        assert self._open is not None
        self._check_free(request)
        if not request.lora_path:
            raise RequestError(f"lora_request: {request.lora_name!r} has no lora_path")
        opened = self._open(request)
        with self._lock:
            old = self._known.get(request.lora_name)
            if old is not None and not request.load_inplace and old.key == opened.key:
                return old  # another thread was faster
            self._check_free(request)
            self._known[request.lora_name] = opened
        if old is not None and old.key != opened.key:
            self._let_go(old)
        return opened

    def _check_free(self, request: LoRARequest) -> None:
        """:raises RequestError: the name or the number belongs to another adapter."""
        for known in list(self._known.values()):
            other = known.lora_request
            same_name = other.lora_name == request.lora_name
            same_number = other.lora_int_id == request.lora_int_id
            if same_name and same_number and request.load_inplace:
                continue
            if same_name or same_number:
                raise RequestError(
                    f"lora_request: ({request.lora_name!r}, {request.lora_int_id}, "
                    f"{request.lora_path!r}) has the name or the number of an adapter that was "
                    f"added before, ({other.lora_name!r}, {other.lora_int_id}, "
                    f"{other.lora_path!r}); use another, or call remove_lora first"
                )

    # ---- the user's methods ----------------------------------------------------------------------

    def add(
        self, lora: LoRARequest | str, path: str | PathLike[str] | None, *, pin: bool
    ) -> LoRARequest:
        """See :meth:`sdk.LLM.add_lora`."""
        check_flags(pin=pin)
        self._check_on()
        if isinstance(lora, str):
            if path is None:
                raise RequestError("add_lora: expected a path too, as in add_lora('name', path)")
            lora = LoRARequest(lora, self._next_number(), fspath(path))
        elif path is not None:
            raise RequestError("add_lora: a LoRARequest has its own path; leave path out")
        is_new = lora.lora_name not in self._known
        found = self._find(lora)
        if self._residency is not None:
            try:
                self._residency.load(found, pin=pin)
            except BaseException:
                if is_new:
                    self._known.pop(found.name, None)
                raise
        return found.lora_request

    def _next_number(self) -> int:
        with self._lock:
            return 1 + max(
                (one.lora_request.lora_int_id for one in self._known.values()), default=0
            )

    def remove(self, lora: LoRARequest | str | int) -> bool:
        """See :meth:`sdk.LLM.remove_lora`."""
        found = self._named(lora)
        if found is None:
            return False
        with self._lock:
            if self._known.pop(found.name, None) is None:
                return False
        self._let_go(found)
        return True

    def _let_go(self, adapter: KnownAdapter) -> None:
        shared = any(one.key == adapter.key for one in list(self._known.values()))
        if self._residency is not None and not shared:
            self._residency.remove(adapter)

    def pin(self, lora: LoRARequest | str | int) -> bool:
        """See :meth:`sdk.LLM.pin_lora`."""
        self._check_on()
        found = self._named(lora)
        if found is None:
            raise RequestError(f"pin_lora: no adapter is called {safe_repr(lora)}; add it first")
        if self._residency is not None:
            self._residency.load(found, pin=True)
        return True

    def list(self) -> list[LoRAInfo]:
        """See :meth:`sdk.LLM.list_loras`."""
        return [self._info(known) for known in list(self._known.values())]

    def _info(self, known: KnownAdapter) -> LoRAInfo:
        state = (True, False, 0)
        if self._residency is not None:
            state = self._residency.state(known)
        request = known.lora_request
        return LoRAInfo(
            request.lora_name,
            request.lora_int_id,
            request.lora_path,
            known.rank,
            known.nbytes,
            *state,
        )

    def _named(self, lora: Any) -> KnownAdapter | None:
        name = getattr(lora, "lora_name", lora)
        if isinstance(name, int):
            known = list(self._known.values())
            return next((one for one in known if one.lora_request.lora_int_id == name), None)
        return self._known.get(name) if isinstance(name, str) else None


def _is_foreign(given: object) -> bool:
    """Whether this is the ``LoRARequest`` of vLLM or of ``sdk.compat.vllm``."""
    return hasattr(given, "lora_name") and hasattr(given, "lora_int_id")


def as_ours(given: Any) -> LoRARequest:
    """A ``LoRARequest`` of vLLM, or of ours. :raises RequestError: it is neither."""
    if isinstance(given, LoRARequest):
        return given
    if not _is_foreign(given):
        raise RequestError(
            f"lora_request: expected a LoRARequest or the name of an adapter, found "
            f"{safe_repr(given)}"
        )
    return LoRARequest(
        given.lora_name,
        given.lora_int_id,
        getattr(given, "lora_path", ""),
        load_inplace=bool(getattr(given, "load_inplace", False)),
    )
