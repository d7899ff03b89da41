"""Low-rank adapters (LoRA) as callers name them."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Sequence
from dataclasses import field
from typing import Any, NamedTuple, TypeAlias

from sdk.api.errors import RequestError
from sdk.api.flags import check_flags
from sdk.kernels.dataclass import dataclass
from sdk.quant.safe_repr import safe_repr

_MAX_NAME = 256


@dataclass(frozen=True)
class LoRARequest:
    """An adapter, with vLLM's names: ``LoRARequest("sql", 1, "path/to/adapter")``.

    ``lora_path``: a folder of PEFT, a GGUF adapter of llama.cpp, or a hub id. The first request
    with it loads it. ``lora_int_id``: a number of your choice, another one for each adapter.
    ``lora_scale`` multiplies the update, as in llama.cpp (vLLM has no such field).
    ``load_inplace``: read the files again and replace the adapter of this name.
    ``base_model_name`` is only a note.

    :raises RequestError: a field has a bad value.
    """

    lora_name: str
    lora_int_id: int
    lora_path: str = ""
    base_model_name: str | None = None
    load_inplace: bool = False
    lora_scale: float = 1.0

    def __post_init__(self) -> None:
        name, number, path = self.lora_name, self.lora_int_id, self.lora_path
        if not isinstance(name, str) or not 0 < len(name) <= _MAX_NAME:
            raise RequestError(
                f"lora_name: expected a string of 1 to {_MAX_NAME} characters, found "
                f"{safe_repr(name)}"
            )
        if type(number) is not int or not 0 < number < 2**63:
            raise RequestError(f"lora_int_id: expected an integer > 0, found {safe_repr(number)}")
        if not isinstance(path, str | os.PathLike):
            raise RequestError(f"lora_path: expected a path, found {safe_repr(path)}")
        object.__setattr__(self, "lora_path", os.fspath(path))
        check_flags(load_inplace=self.load_inplace)
        scale = self.lora_scale
        if type(scale) not in (int, float) or not math.isfinite(scale):
            raise RequestError(f"lora_scale: expected a number, found {safe_repr(scale)}")

    @property
    def name(self) -> str:
        """``lora_name``."""
        return self.lora_name

    @property
    def adapter_id(self) -> int:
        """``lora_int_id``."""
        return self.lora_int_id

    @property
    def path(self) -> str:
        """``lora_path``."""
        return self.lora_path


#: What ``lora_request=`` takes: the name of an adapter that was added, or a request.
LoRALike: TypeAlias = str | LoRARequest
#: The same, one for all prompts or one for each (``None``: no adapter).
LoRAsLike: TypeAlias = LoRALike | Sequence[LoRALike | None] | None


class LoRAInfo(NamedTuple):
    """An adapter that an ``LLM`` knows.

    ``nbytes``: what it takes while it is loaded. ``loaded``: it is in memory and can run.
    ``num_requests``: unfinished requests that use it.
    """

    name: str
    int_id: int
    path: str
    rank: int
    nbytes: int
    loaded: bool
    pinned: bool
    num_requests: int


@dataclass(frozen=True)
class KnownAdapter:
    """An adapter that was checked against the model. Only its description is in memory.

    ``key``: a hash of its contents. ``nbytes``: what it takes on all ranks together;
    ``read_bytes``: what it takes in addition while it is read. ``read`` returns the adapter; it
    runs in a thread, and raises SdkError if it cannot be read any more.
    """

    lora_request: LoRARequest
    key: str
    rank: int
    nbytes: int
    read_bytes: int
    read: Callable[[], Any] = field(repr=False, compare=False)

    @property
    def name(self) -> str:
        return self.lora_request.lora_name
