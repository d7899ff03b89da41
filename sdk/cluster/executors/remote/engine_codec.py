"""The types that ranks on different hosts send each other."""

from __future__ import annotations

from dataclasses import fields
from typing import Any

from sdk.api.params import SamplingParams
from sdk.cluster.wire.codec import Codec, Record
from sdk.engine.executor import RankCall
from sdk.engine.pages import elastic
from sdk.engine.plan import (
    Duplicate,
    EncodedImage,
    Encoding,
    Frames,
    Move,
    Pooling,
    RequestStart,
    SequenceSpec,
    StateCopy,
    StateSave,
    StepPlan,
    StepRow,
    Swap,
)
from sdk.engine.rank import adapters, kv_transfer, page_rows
from sdk.engine.rank.runner_config import DraftingWeights, RunnerConfig
from sdk.models.vision.image import ImageInput, PromptImage
from sdk.quant.adapter import LowRank
from sdk.quant.spec import KVSpec

#: What ranks on different hosts say to each other, and its version.
PROTOCOL = "embedlm-ranks/5"
#: Whole, field by field.
_WHOLE: tuple[type[Any], ...] = (
    *(StepPlan, StepRow, RequestStart, Frames, StateSave),
    *(Pooling, Swap, Move, Duplicate, StateCopy, RankCall),
    *(Encoding, EncodedImage, PromptImage, ImageInput),
    *(RunnerConfig, KVSpec, kv_transfer.LayerKV, page_rows.RankRows, LowRank),
)
#: Only rank 0 samples and drafts: the others need to know that there are drafts, and which logits
#: all ranks compute.
_PARTS = (
    Record(SamplingParams, ("prompt_logprobs",)),
    Record(SequenceSpec, tuple(one.name for one in fields(SequenceSpec) if one.name != "resolved")),
    Record(DraftingWeights, ("model", "quantization", "max_model_len", "has_pages")),
)
#: What ``Executor.on_ranks`` is called with.
_FUNCTIONS = (
    *(
        adapters.clear_slots,
        adapters.drop_parts,
        adapters.add_parts,
        adapters.pack_parts,
        adapters.write_slot,
    ),
    *(adapters.features, adapters.learn_elsewhere),
    *(kv_transfer.read_layer, kv_transfer.write_layer),
    *(kv_transfer.read_state, kv_transfer.write_state),
    *(page_rows.read_rows, page_rows.write_rows),
    *elastic.ON_RANKS,
)


def whole(kind: type[Any]) -> Record:
    """All fields of a named tuple or a dataclass."""
    names = getattr(kind, "_fields", None)
    return Record(kind, names or tuple(field.name for field in fields(kind) if field.init))


def engine_codec() -> Codec:
    """For the ranks of an engine."""
    return Codec([*map(whole, _WHOLE), *_PARTS], _FUNCTIONS)
