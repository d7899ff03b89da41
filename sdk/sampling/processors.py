"""Changes one row of logits before temperature, for requests with ``logits_processors``.

The order is vLLM's: allowed ids, bad words, ``min_tokens``, ``logit_bias``, ``logits_processors``,
then repetition, frequency and presence penalties. DRY and ``no_repeat_ngram_size`` follow, and
last the thinking budget, which forces a token in any case. Without ``logits_processors`` the
sampling kernel applies the changes (``SamplerState.shape``). ``row`` is ``[V]`` float32, changed in
place; minus infinity forbids a token.
"""

from __future__ import annotations

from collections.abc import Sequence

from sdk.api.errors import RequestError
from sdk.api.params import LogitsProcessor
from sdk.kernels.lazy_torch import Tensor, as_torch, torch
from sdk.kernels.reference.sampling import allow, apply
from sdk.sampling.state import SamplerState


def process(row: Tensor, state: SamplerState) -> Tensor:
    """Apply all changes of ``state``.

    :raises RequestError: a callback raised, or did not return a row of logits.
    """
    if state.rules.mask is not None:
        allow(row, state.rules.mask)
    for change in state.changes.earlier(state.output):
        apply(row, change)
    row = _call_processors(row, state)
    for change in state.changes.later():
        apply(row, change)
    return row


def _call_processors(row: Tensor, state: SamplerState) -> Tensor:
    if not state.params.logits_processors:
        return row
    row = as_torch(row)
    for processor in _processors_of(state):
        name = _name_of(processor)
        try:
            result = processor(tuple(state.output), row)
        except Exception as error:
            raise RequestError(
                f"logits processor {name} raised {type(error).__name__}: {error}"
            ) from error
        if not isinstance(result, Tensor) or result.shape != row.shape:
            found = tuple(result.shape) if isinstance(result, Tensor) else type(result).__name__
            raise RequestError(
                f"logits processor {name} must return a tensor of shape {tuple(row.shape)}, "
                f"got {found}"
            )
        row = result.detach().to(device=row.device, dtype=torch.float32)
    return row


def _processors_of(state: SamplerState) -> Sequence[LogitsProcessor]:
    """A callback with a method ``for_answer(prompt_token_ids)`` is asked once for each answer."""
    if state.processors is None:
        made = []
        for processor in state.params.logits_processors or ():
            for_answer = getattr(processor, "for_answer", None)
            try:
                made.append(processor if for_answer is None else for_answer(state.prompt))
            except Exception as error:
                raise RequestError(
                    f"logits processor {_name_of(processor)} raised {type(error).__name__}: {error}"
                ) from error
        state.processors = made
    return state.processors


def _name_of(processor: LogitsProcessor) -> str:
    return str(getattr(processor, "__name__", type(processor).__name__))
