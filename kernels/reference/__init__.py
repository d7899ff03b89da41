"""Pure torch kernels: the fallback for every format and device, and the oracle of kernel tests.

Exact rather than fast: weights are dequantized to float32 on the fly and multiplied in fixed tiles,
so that a row's result has the same bits whatever else is in the batch.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from sdk.kernels.offload import OnDisk
from sdk.kernels.reference.attention import Attention
from sdk.kernels.reference.elementwise import Map, Places, SelectRows, TakeColumns
from sdk.kernels.reference.exchange import AllGather, AllReduce, Receive, Send
from sdk.kernels.reference.linear import ReferenceLinear, ReferenceLinearAsFile
from sdk.kernels.reference.low_rank import LowRank
from sdk.kernels.reference.moe import (
    AddOwnersBias,
    Combine,
    CombineRanks,
    GatherRanks,
    Group,
    GroupRanks,
    Route,
)
from sdk.kernels.reference.norm import Activation, AddNormalize, GatedActivation, Normalize
from sdk.kernels.reference.recode import RecodePage
from sdk.kernels.reference.rope import RopeAndCache, RopeAngles
from sdk.kernels.reference.sampling import Sample

#: 16-bit activations are read as float32, and rounded when they are written.
ACTIVATIONS = ("float32", "bfloat16", "float16")


def available(device: str) -> str | None:
    """Always: torch runs everywhere."""
    return None


def open_backend(
    device: str, num_threads: int, *, fixed: bool = False, offload: OnDisk | None = None
) -> ReferenceBackend:
    """Always ``fixed``; ``num_threads`` has no effect, because torch's thread pool belongs to the
    host. Weights stay in memory unchanged.
    """
    return ReferenceBackend()


class ReferenceBackend:
    """See :class:`sdk.kernels.backend.Backend`."""

    name = "reference"
    keys_transposed = True
    offloaded = 0
    shares_keys = False
    captures = False

    def __init__(self) -> None:
        self._implementations: dict[str, Sequence[Any]] = {
            "linear": (ReferenceLinear(), ReferenceLinearAsFile()),
            "low_rank": (LowRank(),),
            "all_reduce": (AllReduce(),),
            "all_gather": (AllGather(),),
            "send": (Send(),),
            "receive": (Receive(),),
            "route": (Route(),),
            "group": (Group(),),
            "group_ranks": (GroupRanks(),),
            "add_owners_bias": (AddOwnersBias(),),
            "combine": (Combine(),),
            "combine_ranks": (CombineRanks(),),
            "gather_ranks": (GatherRanks(),),
            "norm": (Normalize(),),
            "add_norm": (AddNormalize(),),
            "gated_activation": (GatedActivation(),),
            "activation": (Activation(),),
            **{kind: (Map(kind),) for kind in ("zeros", "add", "add_bias", "scale", "softcap")},
            "rope_angles": (RopeAngles(),),
            "select_rows": (SelectRows(),),
            "take_columns": (TakeColumns(),),
            "find_places": (Places(),),
            "rope_and_cache": (RopeAndCache(),),
            "attention": (Attention(),),
            "recode_page": (RecodePage(),),
            "sample": (Sample(),),
        }

    def work_shape(self, requests: int, heads: int, kv_heads: int, head_dim: int) -> None:
        return None

    def implementations(self, op: str) -> Sequence[Any]:
        return self._implementations.get(op, ())

    def finish_packing(self) -> None:
        """Weights are packed when ``pack`` returns."""

    def restart_threads(self, num_threads: int) -> None:
        """Nothing: torch's threads belong to the process."""

    def close(self) -> None:
        """Nothing to free."""
