"""Packs a model that is larger than memory into the cache of weights, before it is opened.

Everything is packed as always, but experts are given up once they are written. So the experts of a
few matrices are in memory together, and everything else.
"""

from __future__ import annotations

import contextlib
import shutil
from dataclasses import replace

from sdk.api.errors import OutOfMemoryError
from sdk.api.sizes import format_bytes
from sdk.engine.rank.experts import unused_tensors
from sdk.engine.rank.runner_config import RunnerConfig
from sdk.engine.weight_cache.folder import made_folder, prune, weights_folder
from sdk.engine.weight_cache.store import WeightStore, weight_store
from sdk.engine.weight_cache.writer import FREE
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
        checkpoint.on_bytes = None  # all was reported
        store = weight_store(config, mesh, checkpoint, ops)
    if store.experts is None:
        raise _refused(store.reason)
    return store


def _refused(reason: str) -> OutOfMemoryError:
    return OutOfMemoryError(
        "memory: expected room for all weights, or experts in the cache of weights "
        f"(weight_cache), which has none: {reason}"
    )


def _check_room(config: RunnerConfig) -> None:
    """:raises OutOfMemoryError: the cache or its disk has too little room, which is said now and
    not after minutes. What was not used for the longest time makes room first."""
    needed, most = config.packed_bytes, config.weight_cache
    if needed > most:
        raise _refused(
            f"they take about {format_bytes(needed)}, so they are larger than the cache may be "
            f"({format_bytes(most)}): pass a larger weight_cache"
        )
    try:
        folder = weights_folder()
        made_folder(folder)
        prune(folder, most - needed)
        free = shutil.disk_usage(folder).free
    except (OSError, RuntimeError) as error:
        raise _refused(str(error)) from error
    if free < needed + FREE:
        raise _refused(
            f"they take about {format_bytes(needed)}, and the disk of {folder} has "
            f"{format_bytes(free)}, of which {format_bytes(FREE)} stay free: remove files, or set "
            "XDG_CACHE_HOME to a folder on another disk"
        )


def _pack_experts(config: RunnerConfig, mesh: Mesh, checkpoint: Checkpoint) -> None:
    """Write the file of the cache, of which ``checkpoint`` reports the progress."""
    _check_room(config)
    own = replace(config, expert_bytes=0)
    report, said = checkpoint.on_bytes, (0, 1)

    def on_bytes(done: int, total: int) -> None:
        nonlocal said
        said = done, total
        if report is not None:
            report(done, total)

    with contextlib.closing(config.open_model()) as files:
        files.on_bytes = on_bytes
        ops = own.open_ops(mesh)
        try:
            store = weight_store(own, mesh, files, ops, drops_experts=True)
            store.alive = lambda: on_bytes(*said)
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
