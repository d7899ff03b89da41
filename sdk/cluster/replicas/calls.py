"""Calls of an ``LLM`` with replicas, in the process of one replica."""

from __future__ import annotations

from dataclasses import replace
from os import PathLike
from typing import Any

from sdk.api.lora import KnownAdapter, LoRARequest
from sdk.engine.snapshot import Snapshot
from sdk.llm import LLM
from sdk.requests.prompts.reader import Prompt


class ReplicaCalls:
    """What cannot be called with the methods of ``llm``. Adapters cross processes by their
    requests: each replica opens their files itself."""

    def __init__(self, llm: LLM) -> None:
        self._llm = llm

    def adapter(self, lora: LoRARequest) -> KnownAdapter:
        """The adapter, opened if it is new here."""
        [found] = self._llm._job_maker.adapters.of(lora, 1)
        assert found is not None
        return found

    def describe_adapter(self, lora: LoRARequest) -> dict[str, Any]:
        """The fields of its :class:`KnownAdapter` without the reader."""
        found = self.adapter(lora)
        names = ("lora_request", "key", "rank", "nbytes", "read_bytes")
        return {name: getattr(found, name) for name in names}

    def load_adapter(self, lora: LoRARequest, pin: bool) -> None:
        """See :meth:`sdk.LLM.add_lora`."""
        self._llm.add_lora(lora, pin=pin)

    def adapter_state(self, name: str) -> tuple[bool, bool, int]:
        """Whether it is loaded, whether it is pinned, and how many requests use it."""
        for found in self._llm.list_loras():
            if found.name == name:
                return found.loaded, found.pinned, found.num_requests
        return False, False, 0

    def restore(self, source: Snapshot | str | PathLike[str], salt: str | None, pin: bool) -> int:
        """See :meth:`sdk.LLM.restore`."""
        return self._llm.restore(source, cache_salt=salt, pin=pin)

    def pin(self, prompt: Prompt, lora: LoRARequest | None) -> int:
        """See :meth:`sdk.LLM.pin`."""
        return self._llm._prefixes.pin(self._adapted(prompt, lora))

    def unpin(self, prompt: Prompt, lora: LoRARequest | None) -> bool:
        """See :meth:`sdk.LLM.unpin`."""
        return self._llm._prefixes.unpin(self._adapted(prompt, lora))

    def _adapted(self, prompt: Prompt, lora: LoRARequest | None) -> Prompt:
        return prompt if lora is None else replace(prompt, adapter=self.adapter(lora))
