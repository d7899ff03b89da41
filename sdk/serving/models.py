"""The models of an app: which name in a request means which LLM (and adapter)."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from sdk.api.errors import RequestError
from sdk.quant.safe_repr import safe_repr
from sdk.requests.pooling.vectors import Wanted
from sdk.requests.prompts.kinds import ChatOptions, special_tokens_of
from sdk.requests.prompts.reader import Prompt, PromptLike
from sdk.serving.access import Caller, Refused
from sdk.serving.model_files import ModelFiles, files_of
from sdk.tools import reasoning_of

T = TypeVar("T")


class Served:
    """One loaded model under its names; responses, metrics and logs have the first one."""

    def __init__(self, names: Sequence[str], llm: Any) -> None:
        self.names = tuple(names)
        self.llm = llm
        self.created = int(time.time())
        self._reasons: bool | None = None
        self._files: ModelFiles | None = None
        self._weights: dict[str, float] = {}  # of tenants, as they were set last

    @property
    def name(self) -> str:
        return self.names[0]

    @property
    def reasons(self) -> bool:
        """Whether its chat template knows reasoning, so that answers are split."""
        if self._reasons is None:
            tokenizer = self.llm._reader.need_tokenizer("chat")
            self._reasons = reasoning_of(self.template, special_tokens_of(tokenizer)) is not None
        return self._reasons

    @property
    def sees(self) -> bool:
        """Whether it reads images."""
        return self.llm._reader.images is not None

    @property
    def template(self) -> str | None:
        """The source of its chat template, if it has one."""
        found: str | None = self.llm._reader.template_of(ChatOptions())
        return found

    @property
    def infills(self) -> bool:
        """Whether it can write what is between a prompt and a suffix."""
        return self.llm._reader.need_tokenizer("suffix").fim_tokens is not None

    @property
    def files(self) -> ModelFiles:
        """What its files are."""
        if self._files is None:
            self._files = files_of(self.llm)
        return self._files

    @property
    def memory(self) -> tuple[int, bool]:
        """The bytes that it may take, and whether they are a card's."""
        facts = getattr(getattr(self.llm, "_served", None), "facts", None)
        if facts is None:  # a fake model
            return 0, False
        return self.llm.memory_plan.total, facts.runner_config.device != "cpu"

    def all_names(self) -> list[str]:
        """Its names, then those of its adapters."""
        return [*self.names, *self.adapters()]

    def adapters(self) -> list[str]:
        """The names of its adapters, which are models for clients."""
        return [one.name for one in self.llm.list_loras()]

    @property
    def has_adapters(self) -> bool:
        """Whether there are any, or there may be some later."""
        return bool(getattr(self.llm.config, "enable_lora", False) or self.llm.list_loras())

    def weigh(self, caller: Caller) -> None:
        """Give the tenant of a caller its share of the model, under the policy ``"fair"``."""
        tenant, weight = caller.tenant, caller.weight
        if tenant is None or self._weights.get(tenant, 1.0) == weight:
            return
        if self.llm.config.scheduling_policy == "fair":
            self.llm.set_tenant_weight(tenant, weight)
            self._weights[tenant] = weight

    async def read(
        self, prompts: Sequence[PromptLike], cut: int | None = None, wanted: Wanted | None = None
    ) -> list[Prompt]:
        """Prompts for embeddings as token ids, checked; long ones are tokenized in a thread.

        ``cut``: ``truncate_prompt_tokens``. ``wanted``: of embeddings; None: of hidden states.
        :raises RequestError: one is invalid or too long.
        """
        return await self.briefly(prompts, lambda: self.llm._pooling.read(prompts, cut, wanted))

    async def briefly(self, data: object, work: Callable[[], T]) -> T:
        """What ``work`` returns, which tokenizes ``data``: in a thread unless that is short."""
        if self.llm._reader.is_short(data, None):
            return work()
        return await asyncio.to_thread(work)


@dataclass(frozen=True, slots=True)
class Target:
    """What a name means. ``lora``: the name of an adapter of the model, or none."""

    name: str
    served: Served
    lora: str | None = None

    @property
    def llm(self) -> Any:
        return self.served.llm


class Models:
    """The models of one app by name; the first is used by requests that name none."""

    def __init__(self, llms: Any, name: str | Sequence[str] | None = None) -> None:
        """``llms``: one LLM, or a mapping of names to them; an LLM that occurs in it more than once
        has several names. ``name``: of the only one, or several names for it."""
        if isinstance(llms, Mapping):
            if name is not None:
                raise RequestError("model_name: the mapping of models has the names; leave it out")
            if not llms:
                raise RequestError("models: expected at least one, found none")
        else:
            llms = dict.fromkeys(_names_of(llms, name), llms)
        by_llm: dict[int, list[str]] = {}
        for key, llm in llms.items():
            if not isinstance(key, str) or not key:
                raise RequestError(f"models: expected names as keys, found {safe_repr(key)}")
            if not hasattr(llm, "astream"):
                raise RequestError(f"models: expected an LLM for {key!r}, found {safe_repr(llm)}")
            by_llm.setdefault(id(llm), []).append(key)
        self._all = [Served(names, llms[names[0]]) for names in by_llm.values()]
        self._served = {name: served for served in self._all for name in served.names}

    def __iter__(self) -> Any:
        return iter(self._all)

    def resolve(self, name: object) -> Target:
        """The model that a request names.

        With one model, any name means it: clients come with the name of the model that they were
        written for. Adapters are further models, so that a misspelled one is an error.

        :raises Refused: there are several, and none has this name.
        """
        if name is not None and not isinstance(name, str):
            raise RequestError(f"model: expected a string, found {safe_repr(name)}")
        first = self._all[0]
        if name is None or (len(self._all) == 1 and not first.has_adapters):
            return Target(first.name, first)
        return self.named(name)

    def has(self, name: str) -> bool:
        """Whether a model or an adapter has this name."""
        return name in self._names()

    def named(self, name: str) -> Target:
        """The model with a name. :raises Refused: none has it."""
        found = self._served.get(name)
        if found is not None:
            return Target(found.name, found)
        for served in self:
            if name in served.adapters():
                return Target(name, served, lora=name)
        raise Refused(
            404,
            f"model: expected one of {', '.join(self._names())}, found {safe_repr(name)}",
            "model_not_found",
            param="model",
        )

    def _names(self) -> list[str]:
        """The models, then their adapters."""
        return [*self._served, *(name for served in self for name in served.adapters())]

    def cards(self) -> list[dict[str, Any]]:
        """The entries of ``/v1/models``: models with all their names, each with its adapters after
        it."""
        return [
            {
                "id": name,
                "object": "model",
                "created": served.created,
                "owned_by": "embedlm",
                "root": served.name,
                "parent": None if name in served.names else served.name,
                "max_model_len": served.llm.max_model_len,
                "input_modalities": ["text", "image"] if served.sees else ["text"],
            }
            for served in self
            for name in served.all_names()
        ]


def _names_of(llm: Any, given: str | Sequence[str] | None) -> list[str]:
    """The names of a single model. :raises RequestError: they are none, or not different."""
    if given is None:
        return [_name_of(llm)]
    names = [given] if isinstance(given, str) else list(given)
    if not names or len(set(map(str, names))) < len(names):
        raise RequestError(
            f"model_name: expected a name, or different names, found {safe_repr(given)}"
        )
    return names


def _name_of(llm: Any) -> str:
    """The name of a model that got none: that of its file or folder, or its hub id."""
    model = str(getattr(getattr(llm, "config", None), "model", None) or "model")
    path = Path(model)
    if path.suffix == ".gguf":
        return path.stem
    return path.name if path.exists() else model
