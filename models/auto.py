"""From a checkpoint to a model: ``model_type`` names the file in this folder that runs it."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from importlib import import_module
from importlib.util import find_spec
from typing import Any

from sdk.kernels.ops import Ops
from sdk.models.config import ModelConfig
from sdk.models.decoder import CausalLM
from sdk.models.layers import Source
from sdk.models.parallel import Mesh
from sdk.quant.checkpoint import Checkpoint
from sdk.quant.errors import CheckpointError


def build_model(
    checkpoint: Checkpoint,
    mesh: Mesh,
    ops: Ops,
    *,
    max_model_len: int,
    config: Mapping[str, Any] | None = None,
) -> CausalLM:
    """One rank's model, all weights pulled and in the hands of their kernels.

    ``max_model_len``: the longest request the engine will accept; some rotary scalings depend on it
    (:mod:`sdk.models.rope`). ``config`` replaces the checkpoint's own. What the model had no use
    for is left in ``checkpoint.unused()``.

    :raises CheckpointError: config or tensor missing or wrong, by name.
    :raises UnsupportedError: an architecture neither we nor transformers can run.
    :raises AlignmentError: a weight or the heads cannot be cut for this many ranks.
    """
    values = checkpoint.config if config is None else config
    model = own_model(model_type(values))
    if model is not None:
        facts = ModelConfig.from_dict(values)
        return model(Source(checkpoint, facts, mesh, ops, max_model_len))
    from sdk.models.hf_backend import build_hf_model

    return build_hf_model(checkpoint, values, mesh, ops)


def read_config(values: Mapping[str, Any]) -> ModelConfig:
    """The facts of the model a config describes, before anything is built.

    :raises CheckpointError: and :raises UnsupportedError: as :func:`build_model`.
    """
    if own_model(model_type(values)) is not None:
        return ModelConfig.from_dict(values)
    from sdk.models.hf_backend import read_hf_config

    return read_hf_config(values)


def model_type(config: Mapping[str, Any]) -> str:
    """The file name of the model: a multimodal config is named by its text part."""
    text = config.get("text_config")
    found = config.get("model_type")
    if isinstance(text, Mapping):
        found = text.get("model_type", found)
    if not isinstance(found, str) or not re.fullmatch(r"[A-Za-z][A-Za-z0-9_.-]*", found):
        raise CheckpointError(f"config: model_type: expected a name, found {found!r}")
    return "gemma3_text" if found == "gemma3" else found


def own_model(name: str) -> Callable[[Source], CausalLM] | None:
    """The ``Model`` of ``models/<name>.py``; ``None`` where there is no such file or class."""
    if not name.isidentifier() or find_spec(f"sdk.models.{name}") is None:
        return None
    found: Callable[[Source], CausalLM] | None
    found = getattr(import_module(f"sdk.models.{name}"), "Model", None)
    return found
