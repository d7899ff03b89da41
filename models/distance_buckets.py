"""Biases of attention scores by buckets of distances (T5, Raffel et al. 2019, arXiv 1910.10683).

Half of the buckets are for keys after the query. Of each half, the first half has one distance
each; the others span distances that grow by a constant factor, up to ``farthest``.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import numpy as np

from sdk.kernels.lazy_torch import Tensor, torch

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from sdk.models.configs.score_biases import DistanceBuckets
    from sdk.models.source import Source


def bucket_of_distances(rule: DistanceBuckets) -> NDArray[np.int64]:
    """The bucket of each distance ``-farthest .. farthest`` of a key from its query; those of keys
    further away are those at the ends.

    In float32 and in transformers' order: a boundary is a rounded logarithm.
    """
    half = rule.number // 2
    exact = half // 2
    steps = np.arange(rule.farthest + 1)
    ratio = np.log(np.maximum(steps, 1).astype(np.float32) / np.float32(exact))
    share = ratio / np.float32(math.log(rule.farthest / exact)) * np.float32(half - exact)
    own = np.where(steps < exact, steps, np.minimum(exact + share.astype(np.int64), half - 1))
    return np.concatenate([own[:0:-1], own[:1], own[1:] + half])


def distance_biases(source: Source, rule: DistanceBuckets, path: str) -> Tensor:
    """Biases of a rank's heads by the distance of a key, float32 ``[heads, 2 * farthest + 1]``,
    from the table ``path``."""
    heads = source.heads
    table = source.vector(f"{path}.weight", rule.number, source.config.num_heads).cpu().numpy()
    own = table[bucket_of_distances(rule), heads.start : heads.start + heads.count]
    return torch.from_numpy(np.ascontiguousarray(own.T)).to(source.ops.device)
