"""The penalties of several requests as one list, for a kernel that applies all of them at once."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from sdk.kernels.sampling import Penalties
from sdk.sampling.state import RequestState


def penalties_of(
    states: Sequence[RequestState | None], device: torch.device | str = "cpu"
) -> Penalties:
    """Those of the requests of R rows; a row without one is left alone."""
    factors = np.zeros((len(states), 3), np.float32)
    factors[:, 0] = 1.0
    rows, ids, counts = [], [], []
    for row, state in enumerate(states):
        if state is None or not state.penalized:
            continue
        params = state.params
        factors[row] = (
            params.repetition_penalty,
            params.frequency_penalty,
            params.presence_penalty,
        )
        rows.append(np.full(len(state.counts), row, np.int64))
        ids.append(np.fromiter(state.counts, np.int64, len(state.counts)))
        counts.append(np.fromiter(state.counts.values(), np.float32, len(state.counts)))
    if not rows:
        rows, ids, counts = [np.zeros(0, np.int64)], [np.zeros(0, np.int64)], [np.zeros(0, "f4")]
    arrays = (np.concatenate(rows), np.concatenate(ids), np.concatenate(counts), factors)
    return Penalties(*(torch.from_numpy(x).to(device) for x in arrays))
