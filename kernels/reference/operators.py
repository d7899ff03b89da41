"""Every operator of the reference backend."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from sdk.kernels.reference.attention import Attention
from sdk.kernels.reference.elementwise import (
    MAPS,
    Map,
    PlaceRows,
    Places,
    SelectRows,
    TakeColumns,
)
from sdk.kernels.reference.exchange import AllGather, AllReduce, Receive, Send
from sdk.kernels.reference.linear import ReferenceLinear, ReferenceLinearAsFile
from sdk.kernels.reference.low_rank import LowRank
from sdk.kernels.reference.moe import (
    AddOwnersBias,
    Combine,
    CombineRanks,
    GatherRanks,
    GroupByExpert,
    GroupRanks,
    Route,
)
from sdk.kernels.reference.norm import Activation, AddNormalize, Gate, GatedActivation, Normalize
from sdk.kernels.reference.recode import RecodePage
from sdk.kernels.reference.rope import LatentRopeAndCache, RopeAndCache, RopeAngles
from sdk.kernels.reference.sampling import Sample
from sdk.kernels.reference.states import (
    CausalConv,
    GatedDelta,
    GatedNorm,
    Rates,
    Rwkv,
    SelectiveScan,
    StateSpace,
)


def operators() -> dict[str, Sequence[Any]]:
    """The implementations of each operator, which reject nothing."""
    return {
        "linear": (ReferenceLinear(), ReferenceLinearAsFile()),
        "low_rank": (LowRank(),),
        "all_reduce": (AllReduce(),),
        "all_gather": (AllGather(),),
        "send": (Send(),),
        "receive": (Receive(),),
        "route": (Route(),),
        "group": (GroupByExpert(),),
        "group_ranks": (GroupRanks(),),
        "add_owners_bias": (AddOwnersBias(),),
        "combine": (Combine(),),
        "combine_ranks": (CombineRanks(),),
        "gather_ranks": (GatherRanks(),),
        "norm": (Normalize(),),
        "add_norm": (AddNormalize(),),
        "gated_activation": (GatedActivation(),),
        "gate": (Gate(),),
        "activation": (Activation(),),
        **{kind: (Map(kind),) for kind in MAPS},
        "rope_angles": (RopeAngles(),),
        "select_rows": (SelectRows(),),
        "place_rows": (PlaceRows(),),
        "take_columns": (TakeColumns(),),
        "find_places": (Places(),),
        "rope_and_cache": (RopeAndCache(),),
        "latent_rope_and_cache": (LatentRopeAndCache(),),
        "attention": (Attention(),),
        "recode_page": (RecodePage(),),
        "sample": (Sample(),),
        "causal_conv": (CausalConv(),),
        "gated_delta": (GatedDelta(),),
        "rwkv": (Rwkv(),),
        "ssd": (StateSpace(),),
        "selective_scan": (SelectiveScan(),),
        "rates": (Rates(),),
        "gated_norm": (GatedNorm(),),
    }
