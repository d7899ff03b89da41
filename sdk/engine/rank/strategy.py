"""How a rank runs a step: operator by operator, as one recorded program, or as graphs of a device.

A strategy writes a :class:`~sdk.engine.rank.work.Work` into the inputs, launches it, and answers
with what came out, or will. There are eager.py, recorded.py and device_graphs.py.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

from torch import Tensor

from sdk.engine.rank.work import Work
from sdk.kernels.sampling import Tokens


class Run:
    """Work that was launched. ``hidden`` states of its tokens and ``logits`` of its outputs are
    valid until the next launch; ``chosen`` waits for what was drawn.
    """

    __slots__ = ("chosen", "hidden", "logits", "work")

    def __init__(
        self, work: Work, hidden: Tensor, logits: Tensor, chosen: Callable[[], Tokens]
    ) -> None:
        self.work = work
        self.hidden = hidden
        self.logits = logits
        self.chosen = chosen


class Repeat(Protocol):
    """The last step's rows once more, one plain token each, with as little work as possible.

    It touches little: a step leaves the caches full of weights, and each function or object not
    used since costs 1 to 10 us.
    """

    @property
    def ready(self) -> bool:
        """Whether it can be launched now."""

    def launch(self, tokens: list[int], ahead: int) -> None:
        """The step after the one that sampled ``tokens``. Sampling states do not know the last
        ``ahead`` of their tokens, but for those whose draw depends on them (``foreseeable``).
        """

    def tokens(self) -> list[int] | None:
        """What was sampled; None: not all logits are finite, see :meth:`run`."""

    def run(self) -> Run:
        """The same with everything that came out."""


class Strategy(Protocol):
    """One way to run steps. The properties say how, for ``llm.explain()``."""

    @property
    def eager_reason(self) -> str | None:
        """Why decode steps run operator by operator; None: they do not."""

    @property
    def eager_prompts_reason(self) -> str | None:
        """The same of steps with prompts."""

    @property
    def most_tokens_in_pieces(self) -> int:
        """Tokens of the largest step that is replayed in pieces; 0: none is."""

    @property
    def failed_captures(self) -> list[str]:
        """Why only some sizes are replayed."""

    @property
    def steps_ahead(self) -> int:
        """How many steps are launched before the tokens of the last one are known."""

    @property
    def batches_in_flight(self) -> int:
        """How many batches may be launched before the first of them is read."""

    def launch(self, work: Work) -> Sequence[Run]:
        """Run a step, in one part or several."""

    def repeat(self, work: Work) -> Repeat | None:
        """What runs ``work``, launched last, all decodes and plain, again. None: nothing does."""
