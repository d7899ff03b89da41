"""Responses that later requests go on from (``previous_response_id``), in bounded memory."""

from __future__ import annotations

import json
from collections import OrderedDict
from dataclasses import dataclass
from typing import Any

from sdk.api.errors import RequestError
from sdk.api.sizes import format_bytes
from sdk.quant.safe_repr import safe_repr
from sdk.serving.access import Caller, Refused

#: 64 MiB: 30,000 short conversations, or 16 of a million tokens as text.
MAX_KEPT_BYTES = 2**26
#: What an entry takes besides its texts: two byte strings, the key, the places in two dicts.
_OVERHEAD = 512


@dataclass(frozen=True, slots=True)
class _Kept:
    """``conversation``: the messages up to its answer, without instructions. Both are JSON, so that
    their size is known."""

    response: bytes
    conversation: bytes

    @property
    def nbytes(self) -> int:
        return len(self.response) + len(self.conversation) + _OVERHEAD


class KeptResponses:
    """The newest responses, each for the caller that asked for it.

    Above ``max_bytes`` the oldest one of the caller with most bytes is dropped, so that nobody can
    take more than an equal share from the others. 0: nothing is kept. Of one event loop.
    """

    def __init__(self, max_bytes: int = MAX_KEPT_BYTES) -> None:
        if isinstance(max_bytes, bool) or not isinstance(max_bytes, int) or max_bytes < 0:
            raise RequestError(
                f"max_kept_bytes: expected an integer of at least 0, found {safe_repr(max_bytes)}"
            )
        self.max_bytes = max_bytes
        self.nbytes = 0
        self._owned: dict[tuple[str, str | None], OrderedDict[str, _Kept]] = {}
        self._sizes: dict[tuple[str, str | None], int] = {}

    def keep(
        self, caller: Caller, response: dict[str, Any], conversation: list[dict[str, Any]]
    ) -> None:
        """Keep a response under its ``id``; one that is larger than everything may be is not."""
        kept = _Kept(_packed(response), _packed(conversation))
        if kept.nbytes > self.max_bytes:
            return
        owner = _owner(caller)
        self._owned.setdefault(owner, OrderedDict())[response["id"]] = kept
        self._count(owner, kept.nbytes)
        while self.nbytes > self.max_bytes:
            largest = max(self._sizes, key=lambda one: self._sizes[one])
            self._drop(largest, next(iter(self._owned[largest])))

    def response(self, caller: Caller, response_id: str) -> dict[str, Any]:
        """:raises Refused: it is not kept."""
        found: dict[str, Any] = json.loads(self._find(caller, response_id).response)
        return found

    def conversation(self, caller: Caller, response_id: object) -> list[dict[str, Any]]:
        """The messages up to the answer of a response. :raises Refused: it is not kept.

        :raises RequestError: ``response_id`` is not a string.
        """
        if not isinstance(response_id, str):
            raise RequestError(
                f"previous_response_id: expected a string, found {safe_repr(response_id)}"
            )
        try:
            kept = self._find(caller, response_id)
        except Refused as refused:  # as OpenAI answers
            code = "previous_response_not_found"
            raise Refused(400, refused.message, code, param="previous_response_id") from None
        found: list[dict[str, Any]] = json.loads(kept.conversation)
        return found

    def forget(self, caller: Caller, response_id: str) -> None:
        """:raises Refused: it is not kept."""
        self._find(caller, response_id)
        self._drop(_owner(caller), response_id)

    def _find(self, caller: Caller, response_id: str) -> _Kept:
        own = self._owned.get(_owner(caller))
        found = None if own is None else own.get(response_id)
        if found is None:
            limit = (
                f"the newest responses are kept, {format_bytes(self.max_bytes)} of all callers "
                "together"
                if self.max_bytes
                else "this server keeps no responses"
            )
            raise Refused(
                404,
                f"Response {safe_repr(response_id)} is not kept: {limit}. Send the whole "
                "conversation as input.",
                "response_not_found",
            )
        return found

    def _drop(self, owner: tuple[str, str | None], response_id: str) -> None:
        own = self._owned[owner]
        self._count(owner, -own.pop(response_id).nbytes)
        if not own:
            del self._owned[owner], self._sizes[owner]

    def _count(self, owner: tuple[str, str | None], nbytes: int) -> None:
        self._sizes[owner] = self._sizes.get(owner, 0) + nbytes
        self.nbytes += nbytes


def _owner(caller: Caller) -> tuple[str, str | None]:
    return caller.name, caller.tenant


def _packed(value: object) -> bytes:
    return json.dumps(value, ensure_ascii=False, separators=(",", ":")).encode("utf-8", "replace")
