"""From a checkpoint to a model: the architecture is chosen by the config's ``model_type``."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from sdk.kernels.host.torch_import import one_mode
from sdk.kernels.operators.ops import Ops
from sdk.models.architecture import architecture
from sdk.models.configs.config import ModelConfig
from sdk.models.decoder import CausalLM, Decoder
from sdk.models.other_models import check_type
from sdk.models.parallel import Mesh
from sdk.models.parts import Tensors
from sdk.models.source import Source
from sdk.quant.checkpoint import Checkpoint
from sdk.quant.errors import CheckpointError
from sdk.quant.online import online_quantized


def build_model(
    checkpoint: Checkpoint,
    mesh: Mesh,
    ops: Ops,
    *,
    max_model_len: int,
    config: Mapping[str, Any] | None = None,
    layers: range | None = None,
    shared: Tensors | None = None,
) -> CausalLM:
    """Build one rank's model; its weights are pulled and packed for their kernels.

    ``max_model_len``: the longest request the engine will accept; some rotary scalings depend on it
    (:mod:`sdk.models.rope`). ``config`` replaces the checkpoint's own. ``layers``: those of
    ``mesh.stage`` (default: all). ``shared``: the tensors of another engine's model with the same
    weights; not for models that transformers runs. Tensors that the model does not use stay in
    ``checkpoint.unused()``.

    :raises CheckpointError: config or tensor missing or wrong, by name.
    :raises UnsupportedError: an architecture that neither we nor transformers can run.
    :raises AlignmentError: a weight or the heads cannot be split over this many ranks.
    """
    values = checkpoint.config if config is None else config
    if architecture(model_type(values)) is not None:
        facts = ModelConfig.from_dict(values)
        with one_mode():
            return Decoder(Source(checkpoint, facts, mesh, ops, max_model_len, layers, shared))
    assert shared is None
    check_type(model_type(values))
    from sdk.models.transformers_code.backend import build_hf_model

    return build_hf_model(checkpoint, values, mesh, ops)


def read_config(values: Mapping[str, Any]) -> ModelConfig:
    """Read a model's config without building the model.

    :raises CheckpointError: and :raises UnsupportedError: as :func:`build_model`.
    """
    if architecture(model_type(values)) is not None:
        return ModelConfig.from_dict(values)
    check_type(model_type(values))
    from sdk.models.transformers_code.backend import read_hf_config

    return read_hf_config(values)


def quantized_online(
    checkpoint: Checkpoint,
    name: str | None,
    overrides: Mapping[str, Any] | None = None,
    threads: int = 1,
) -> Checkpoint:
    """``checkpoint``, its weights packed by scheme ``name`` while they are pulled, with
    ``threads``, as suits the model that its config with ``overrides`` describes; unchanged for
    None.

    :raises UnsupportedError: as :func:`sdk.quant.online.online_quantized`, :func:`read_config`.
    """
    if name is None:
        return checkpoint
    encoder = not read_config({**checkpoint.config, **(overrides or {})}).causal
    return online_quantized(checkpoint, name, encoder=encoder, threads=threads)


def model_type(config: Mapping[str, Any]) -> str:
    """The model's type, without aliases; of a multimodal config, that of its text part."""
    text = config.get("text_config")
    found = config.get("model_type")
    if isinstance(text, Mapping):
        found = text.get("model_type", found)
    if not isinstance(found, str) or not re.fullmatch(r"[A-Za-z][A-Za-z0-9_.-]*", found):
        raise CheckpointError(f"config: model_type: expected a name, found {found!r}")
    known = architecture(found)
    return found if known is None else known.model_type
