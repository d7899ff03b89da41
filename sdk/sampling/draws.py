"""The draw of one row of logits."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from sdk.kernels.operators.sampling import GREEDY, SampleBuffers
from sdk.sampling.state import SamplerState
from sdk.sampling.uniform import TOKEN


class Draw(NamedTuple):
    """The draw of a request's token ``ahead`` positions after the next."""

    state: SamplerState
    ahead: int = 0

    @classmethod
    def behind(cls, state: SamplerState, drafts: Sequence[int]) -> Draw:
        """The draw after draft tokens, as if they were the request's tokens."""
        if not drafts or state.foreseeable:
            return cls(state, len(drafts))
        state = state.fork()
        state.append(drafts)
        return cls(state)

    def write(self, row: int, buffers: SampleBuffers) -> None:
        """Write it for the kernel. Rows with callbacks are drawn greedily first, then again."""
        state, ahead = self
        if state.greedy or state.processed:
            buffers.set(row, GREEDY, 0.0)
        else:
            buffers.set(row, state.draw(ahead), state.uniform(TOKEN, ahead))
        buffers.set_shape(row, state.shape())
