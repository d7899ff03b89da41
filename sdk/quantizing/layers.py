"""Runs a model one layer at a time over calibration text: never more than one layer is in memory.

What flows between two layers, ``[sequences, tokens, hidden]`` in float32, lies in a file.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from sdk.engine.kv_cache import KVCache, kv_spec
from sdk.errors import UnsupportedError
from sdk.kernels.batch import AttentionBatch
from sdk.kernels.ops import Ops
from sdk.models.auto import model_type, own_model
from sdk.models.config import ModelConfig
from sdk.models.decoder import Decoder, Layer, Step
from sdk.models.layers import Source
from sdk.models.parallel import Mesh
from sdk.models.rope import Rope
from sdk.quant.calibration import InputStatistics
from sdk.quant.checkpoint import Checkpoint

_PAGE = 16


def decoder_of(checkpoint: Checkpoint) -> tuple[type[Decoder], ModelConfig]:
    """The class and the facts of a model that is built of layers.

    :raises UnsupportedError: it is run by transformers' code, of which layers are not known.
    """
    name = model_type(checkpoint.config)
    model = own_model(name)
    if not isinstance(model, type) or not issubclass(model, Decoder):
        raise UnsupportedError(
            f"{checkpoint.path}: {name} models are run by transformers' code; only models of this "
            "package's own are quantized to files"
        )
    return model, ModelConfig.from_dict(checkpoint.config)


class LayerRun:
    """The layers of a model, built one by one with exact arithmetic. Close it to end its threads.

    ``tokens``: of the longest sequence.
    """

    def __init__(self, checkpoint: Checkpoint, tokens: int, num_threads: int | None = None) -> None:
        self.model, self.config = decoder_of(checkpoint)
        self.tokens = tokens
        self.ops = Ops(compute="exact", num_threads=num_threads)
        rope, local = self.config.rope, self.config.local_rope
        self._rope = Rope(rope, tokens, self.ops.device)
        self._local_rope = None if local is None else Rope(local, tokens, self.ops.device)
        pages = -(-tokens // _PAGE)
        spec = kv_spec(self.config, self.config.num_kv_heads, _PAGE, "float32")
        self._kv = KVCache(replace(spec, num_layers=1), pages + 1)
        self._table = torch.arange(1, pages + 1)

    def close(self) -> None:
        """Idempotent."""
        self._kv.close()
        self.ops.close()

    def embed(self, checkpoint: Checkpoint, ids: Tensor, path: Path) -> None:
        """The input of layer 0 for token ids ``[S, T]``, into a file."""
        weight = checkpoint.weight("model.embed_tokens")
        with _written(path, (*ids.shape, self.config.hidden_size)) as out:
            for i, row in enumerate(ids):
                out[i] = (weight.rows(row) * self.config.embedding_scale).numpy()

    def build(self, checkpoint: Checkpoint, index: int) -> Layer:
        """Layer ``index`` with the weights of ``checkpoint``."""
        source = Source(checkpoint, self.config, Mesh(), self.ops, self.tokens)
        return self.model.layer(source, f"model.layers.{index}", index)

    def outputs(self, layer: Layer, inputs: Path) -> Iterator[Tensor]:
        """What ``layer`` makes of each sequence in the file: float32 ``[T, hidden]``."""
        for hidden in np.load(inputs, mmap_mode="r"):
            with torch.inference_mode():
                yield self._forward(layer, torch.from_numpy(hidden.copy()))

    def advance(self, layer: Layer, inputs: Path, outputs: Path) -> None:
        """All sequences through ``layer``, from one file into another."""
        shape = np.load(inputs, mmap_mode="r").shape
        with _written(outputs, shape) as out:
            for i, hidden in enumerate(self.outputs(layer, inputs)):
                out[i] = hidden.numpy()

    def head_inputs(self, checkpoint: Checkpoint, hidden: Path) -> InputStatistics:
        """Of the final norm's outputs; ``hidden`` holds what the last layer made."""
        found = InputStatistics(self.config.hidden_size)
        norm = checkpoint.tensor("model.norm.weight") + (1.0 if self.model.norm_plus_one else 0.0)
        for row in np.load(hidden, mmap_mode="r"):
            x = torch.from_numpy(row.copy())
            spread = x.square().mean(-1, keepdim=True).add_(self.config.rms_norm_eps)
            found.add(x * spread.rsqrt() * norm)
        return found

    def _forward(self, layer: Layer, x: Tensor) -> Tensor:
        positions = torch.arange(len(x))
        batch = AttentionBatch(
            positions=positions,
            query_start=torch.tensor([0, len(x)], dtype=torch.int32),
            context_len=torch.tensor([len(x)], dtype=torch.int32),
            page_table=self._table[None].to(torch.int32),
            slots=self._table[positions // _PAGE] * _PAGE + positions % _PAGE,
            page_size=_PAGE,
            max_query_len=len(x),
            max_context_len=len(x),
        )
        angles = self._rope.cos_sin(positions, self.ops)
        local = angles
        if self._local_rope is not None:
            local = self._local_rope.cos_sin(positions, self.ops)
        step = Step(batch, angles, local)
        delta, residual = layer(x, torch.zeros_like(x), step, self._kv.layers[0])
        return delta + residual


class _written:
    """An array in a file that appears under its name when it is complete."""

    def __init__(self, path: Path, shape: tuple[int, ...]) -> None:
        self.path = path
        self._part = path.with_name(path.name + ".part")
        self._shape = shape

    def __enter__(self) -> NDArray[np.float32]:
        self._array: np.memmap[Any, np.dtype[np.float32]] = np.lib.format.open_memmap(
            self._part, mode="w+", dtype=np.float32, shape=self._shape
        )
        return self._array

    def __exit__(self, kind: type[BaseException] | None, *rest: object) -> None:
        if kind is None:
            self._array.flush()
            self._part.replace(self.path)
        else:
            self._part.unlink(missing_ok=True)
        del self._array
