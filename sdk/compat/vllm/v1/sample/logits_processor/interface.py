"""Classes that change the logits of a batch, and what they are told about it.

Here every answer has its own object, which sees a batch of one: ``update_state`` is told once that
request 0 was added, and then before each token that nothing changed.
"""

from __future__ import annotations

import inspect
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import Enum, auto
from typing import TYPE_CHECKING, Any, TypeVar

if TYPE_CHECKING:
    from sdk.compat.vllm.config import VllmConfig
    from sdk.compat.vllm.sampling_params import SamplingParams

T = TypeVar("T")
#: ``f(output_token_ids, logits) -> logits``, or with the prompt's token ids before them.
RequestLogitsProcessor = Callable[..., Any]


class MoveDirectionality(Enum):
    """How requests change places in a batch. Here they never do."""

    UNIDIRECTIONAL = auto()
    SWAP = auto()


@dataclass(frozen=True)
class BatchUpdate:
    """``added``: (index, parameters, prompt token ids, output token ids, which grow later)."""

    batch_size: int
    removed: Sequence[int]
    added: Sequence[tuple[int, SamplingParams, list[int] | None, list[int]]]
    moved: Sequence[tuple[int, int, MoveDirectionality]]


class LogitsProcessor(ABC):
    """Changes logits ``[batch, vocabulary]``, a float32 tensor of torch."""

    @classmethod  # noqa: B027  # may be left out
    def validate_params(cls, sampling_params: SamplingParams) -> None:
        """:raises ValueError: the parameters are not allowed."""

    @abstractmethod
    def __init__(self, vllm_config: VllmConfig, device: Any, is_pin_memory: bool) -> None: ...

    @abstractmethod
    def apply(self, logits: Any) -> Any:
        """The changed logits; they may be the same tensor."""

    @abstractmethod
    def is_argmax_invariant(self) -> bool:
        """Whether greedy choices never change. Not asked here: the processor is always called."""

    @abstractmethod
    def update_state(self, batch_update: BatchUpdate | None) -> None:
        """Called before each token; ``None``: the batch has not changed."""


class AdapterLogitsProcessor(LogitsProcessor):
    """A :class:`LogitsProcessor` of functions for one request."""

    def __init__(self, vllm_config: VllmConfig, device: Any, is_pin_memory: bool) -> None:
        self.req_info: dict[int, Callable[[Any], Any]] = {}

    @abstractmethod
    def new_req_logits_processor(self, params: SamplingParams) -> RequestLogitsProcessor | None:
        """The function for a request; ``None``: its logits do not change."""

    def _new_state(
        self, params: SamplingParams, prompt_ids: list[int] | None, output_ids: list[int]
    ) -> Callable[[Any], Any] | None:
        found = self.new_req_logits_processor(params)
        if found is None:
            return None
        takes_prompt = len(inspect.signature(found).parameters) == 3
        known = (prompt_ids, output_ids) if takes_prompt else (output_ids,)
        return lambda row: found(*known, row)

    def update_state(self, batch_update: BatchUpdate | None) -> None:
        """See :class:`LogitsProcessor`."""
        process_dict_updates(self.req_info, batch_update, self._new_state)

    def apply(self, logits: Any) -> Any:
        """See :class:`LogitsProcessor`."""
        for index, change in self.req_info.items():
            logits[index] = change(logits[index])
        return logits


def process_dict_updates(
    req_entries: dict[int, T],
    batch_update: BatchUpdate | None,
    new_state: Callable[[SamplingParams, list[int] | None, list[int]], T | None],
) -> bool:
    """Keep ``new_state`` of each request under its index. Returns whether an entry changed."""
    if batch_update is None:
        return False
    before = dict(req_entries)
    for index, params, prompt_ids, output_ids in batch_update.added:
        req_entries.pop(index, None)
        if (state := new_state(params, prompt_ids, output_ids)) is not None:
            req_entries[index] = state
    for index in batch_update.removed:
        req_entries.pop(index, None)
    for source, target, direction in batch_update.moved:
        moved, other = req_entries.pop(source, None), req_entries.pop(target, None)
        if moved is not None:
            req_entries[target] = moved
        if other is not None and direction is MoveDirectionality.SWAP:
            req_entries[source] = other
    same = before.keys() == req_entries.keys()
    return not same or any(before[index] is not state for index, state in req_entries.items())
