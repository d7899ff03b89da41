"""How a rank runs a step: operator by operator, as one recorded program, or as CUDA graphs.

A strategy writes a :class:`~sdk.engine.rank.step_batch.StepBatch` into the inputs, launches it and
returns a :class:`LaunchedBatch`. The strategies are in eager.py, recorded.py and device_graphs.py.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

from sdk.engine.rank.step_batch import StepBatch
from sdk.kernels.lazy_torch import Tensor
from sdk.kernels.operators.sampling import Tokens


class LaunchedBatch:
    """A batch that was launched. The ``hidden`` states of its tokens and the ``logits`` of its
    output rows are valid until the next launch, as are ``streams`` (``Decoder.streams``).
    ``read_tokens`` waits for the sampled tokens.
    """

    __slots__ = ("batch", "hidden", "logits", "read_tokens", "streams")

    def __init__(
        self,
        batch: StepBatch,
        hidden: Tensor,
        logits: Tensor,
        read_tokens: Callable[[], Tokens],
        streams: Sequence[Tensor] = (),
    ) -> None:
        self.batch = batch
        self.hidden = hidden
        self.logits = logits
        self.read_tokens = read_tokens
        self.streams = streams


class Repeater(Protocol):
    """Runs the rows of the last step again, with one new plain token each, at the lowest cost.

    It uses few objects: a step leaves the CPU caches full of weights, and each function or object
    not used since then costs 1 to 10 us.
    """

    @property
    def ready(self) -> bool:
        """Whether the next step can be launched now."""

    def launch(self, tokens: list[int], ahead: int) -> None:
        """Launch the step after the one that sampled ``tokens``.

        Sampling states do not have the last ``ahead`` of their tokens yet, except states whose
        draw depends on them (not ``foreseeable``).
        """

    def tokens(self) -> list[int] | None:
        """Wait for the sampled tokens. None: some logits are not finite; use :meth:`launched`."""

    def launched(self) -> LaunchedBatch:
        """The same step with all of its results."""


class Strategy(Protocol):
    """One way to run steps. ``llm.explain()`` prints the properties."""

    @property
    def eager_reason(self) -> str | None:
        """Why decode steps run operator by operator, or None if they do not."""

    @property
    def eager_prompts_reason(self) -> str | None:
        """Why steps with prompts run operator by operator, or None if they do not."""

    @property
    def most_tokens_in_pieces(self) -> int:
        """Tokens of the largest step that is replayed in pieces, or 0 if none is."""

    @property
    def failed_captures(self) -> list[str]:
        """Reasons why some sizes are not replayed."""

    @property
    def steps_ahead(self) -> int:
        """How many steps are launched before the tokens of the last one are known."""

    @property
    def batches_in_flight(self) -> int:
        """How many batches may be launched before the result of the first is read."""

    def capture_next(self) -> bool:
        """Prepare one more size of steps, while there are no requests; whether one was left."""

    def launch(self, batch: StepBatch) -> Sequence[LaunchedBatch]:
        """Run a step, as one batch or as several."""

    def repeater(self, batch: StepBatch) -> Repeater | None:
        """Runs ``batch`` again. ``batch`` is the last one launched, plain, and decodes only.

        None: this strategy cannot repeat it.
        """
