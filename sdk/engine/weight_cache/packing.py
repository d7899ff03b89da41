"""Packs a model that is larger than memory into the cache of weights, before it is opened.

Everything is packed as always, but experts are given up once they are written. So the experts of a
few matrices are in memory together, and everything else.
"""

from __future__ import annotations

import contextlib
from dataclasses import replace

from sdk.api.errors import OutOfMemoryError
from sdk.engine.rank.experts import unused_tensors
from sdk.engine.rank.runner_config import RunnerConfig
from sdk.engine.weight_cache.store import WeightStore, weight_store
from sdk.kernels.operators.ops import Ops
from sdk.models.auto import build_model
from sdk.models.parallel import Mesh
from sdk.quant.checkpoint import Checkpoint


def packed_store(config: RunnerConfig, mesh: Mesh, checkpoint: Checkpoint, ops: Ops) -> WeightStore:
    """What the cache has of a model whose experts do not all stay in memory: filled before, if it
    is empty.

    :raises OutOfMemoryError: the experts cannot be in the cache. :raises CheckpointError: the
        model's files cannot be read.
    """
    store = weight_store(config, mesh, checkpoint, ops)
    if store.experts is None:
        _pack_experts(config, mesh, checkpoint)
        store = weight_store(config, mesh, checkpoint, ops)
    if store.experts is None:
        raise _refused(store.reason)
    return store


def _refused(reason: str) -> OutOfMemoryError:
    return OutOfMemoryError(
        "memory: expected room for all weights, or experts in the cache of weights "
        f"(weight_cache), which has none: {reason}"
    )


def _pack_experts(config: RunnerConfig, mesh: Mesh, checkpoint: Checkpoint) -> None:
    """Write the file of the cache, of which ``checkpoint`` reports the progress."""
    own = replace(config, expert_bytes=0)
    with contextlib.closing(config.open_model()) as files:
        files.on_bytes = checkpoint.on_bytes
        ops = own.open_ops(mesh)
        try:
            store = weight_store(own, mesh, files, ops, drops_experts=True)
            if not store.reason:
                model = build_model(
                    files,
                    mesh,
                    ops,
                    max_model_len=config.max_model_len,
                    config={**files.config, **config.hf_overrides},
                    shared=store.tensors,
                )
                ops.finish_packing()
                store.loaded(unused_tensors(files, model))
                store.wait()
            if (state := store.reason or str(store)) != "written":
                raise _refused(state)
        finally:
            ops.close()
