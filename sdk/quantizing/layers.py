"""Runs a model over calibration text one layer at a time, with only one layer in memory.

The hidden states between two layers, float32 ``[sequences, tokens, hidden]``, are in a file.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from sdk.api.errors import QuantizationError, UnsupportedError
from sdk.engine.rank.kv_cache import KVCache, caches_of_layers, kv_spec
from sdk.kernels.operators.batch import AttentionBatch
from sdk.kernels.operators.ops import Ops
from sdk.kernels.operators.states import StateBatch
from sdk.kernels.weights.layouts import Dense
from sdk.loaders.writers.parts import new_file
from sdk.memory.drafting_heads import next_token_head
from sdk.models.architecture import architecture
from sdk.models.auto import model_type
from sdk.models.configs.config import ModelConfig
from sdk.models.decoder import Layer, layer_rules, positions_and_norm
from sdk.models.drafting_heads import ModelEnds, build_head
from sdk.models.layer_inputs import LayerInputs
from sdk.models.mixers.attention import Step
from sdk.models.mixers.rwkv import RwkvSpec
from sdk.models.parallel import Mesh
from sdk.models.rope import Rope
from sdk.models.source import Source
from sdk.quant.calibration import InputStatistics
from sdk.quant.checkpoint import Checkpoint
from sdk.quant.rewritten_checkpoint import RewrittenCheckpoint
from sdk.quant.weight import PackedWeight

_PAGE = 16


def decoder_config(checkpoint: Checkpoint) -> ModelConfig:
    """The config of a model that is built of layers.

    :raises UnsupportedError: it runs through transformers, whose layers are not known; it is an
        encoder; what is beside or between its layers is not written.
    """
    name = model_type(checkpoint.config)
    own = architecture(name)
    if own is not None and not own.config.causal:
        raise _encoder(checkpoint, name)
    if own is None:
        raise UnsupportedError(
            f"{checkpoint.path}: {name} models run through transformers; only this package's own "
            "model code can be quantized to files"
        )
    config = ModelConfig.from_dict(checkpoint.config)
    if not config.causal:
        raise _encoder(checkpoint, name)
    what = None
    if config.streams is not None:
        what = "have several residual streams"
    elif config.post_norm:
        what = "are post-norm"
    elif config.embedding_size is not None:
        what = "are wider than embeddings"
    if what is not None:
        raise UnsupportedError(
            f"{checkpoint.path}: layers of this {name} model {what}, and such models are not "
            "quantized to files yet; quantization='int8' packs its matrices while it is loaded"
        )
    return config


def check_run(checkpoint: Checkpoint, config: ModelConfig, scheme: str) -> None:
    """:raises UnsupportedError: calibration text cannot run through the layers one by one."""
    if any(map(config.shares_keys, range(config.num_layers))):
        why = "read the keys of earlier ones"
    elif config.layer_inputs:
        why = "have embeddings of their own"
    elif isinstance(config.recurrent, RwkvSpec):
        why = "read the values of the first one"
    else:
        return
    raise UnsupportedError(
        f"{checkpoint.path}: {scheme} runs a text through one layer at a time, and layers of "
        f"{config.model_type} {why}: use a scheme without calibration, such as rtn-w4g128, or a "
        "GGUF type without a calibration text"
    )


def _encoder(checkpoint: Checkpoint, name: str) -> UnsupportedError:
    return UnsupportedError(
        f"{checkpoint.path}: {name} is an encoder, and only decoders can be quantized to files; "
        "quantization='int8' packs its matrices while it is loaded"
    )


def plain_values(checkpoint: Checkpoint, name: str) -> Tensor:
    """A matrix that stays plain, in the file's type: transformers runs a router in that type."""
    weight = checkpoint.weight(name)
    layout = weight.layout if isinstance(weight, PackedWeight) else None
    return layout.values if isinstance(layout, Dense) else weight.dequantize()


class LayerRun:
    """The layers of a model, built one by one with exact arithmetic. Close it to end its threads.

    ``tokens``: the length of the longest sequence.
    """

    def __init__(self, checkpoint: Checkpoint, tokens: int, num_threads: int | None = None) -> None:
        self.config = decoder_config(checkpoint)
        self.tokens = tokens
        self.ops = Ops(compute="exact", num_threads=num_threads)
        self._ropes = [Rope(spec, tokens, self.ops.device) for spec in self.config.ropes]
        self._spec = kv_spec(self.config, _PAGE, "float32")
        #: What the last layer that was built keeps of a sequence.
        self._kv: KVCache | None = None
        self._table = torch.arange(1, -(-tokens // _PAGE) + 1)

    def close(self) -> None:
        """Idempotent."""
        if self._kv is not None:
            self._kv.close()
        self.ops.close()

    def embed(self, checkpoint: Checkpoint, ids: Tensor, path: Path) -> None:
        """Write the input of layer 0 for token ids ``[S, T]`` to a file."""
        source = self._source(checkpoint)
        embedding, (positions, norm) = source.embedding(), positions_and_norm(source)
        with new_file(path) as out:
            for row in ids:
                x = embedding(row)
                if positions is not None:
                    x = self.ops.add(positions.rows(torch.arange(len(row))), x)
                x = x if norm is None else self.ops.norm(x, norm)
                out.write(x.numpy().data)

    def build(self, checkpoint: Checkpoint, index: int) -> Layer:
        """Layer ``index`` with the weights of ``checkpoint``."""
        rules = layer_rules(self.config)
        own = self._spec.of_layers(caches_of_layers(self.config, range(index, index + 1)))
        if self._kv is not None:
            self._kv.close()
        # one slot for the state of a sequence, besides that of padding rows
        self._kv = KVCache(own, len(self._table) + 1, num_states=2)
        return Layer(self._source(checkpoint), f"model.layers.{index}", index, rules)

    def blocks_ahead(self, checkpoint: Checkpoint) -> list[tuple[list[str], list[str]]]:
        """The names of the matrices and of the plain tensors of each block of multi-token
        prediction that this package runs."""
        own, config = architecture(self.config.model_type), self.config
        found: list[tuple[list[str], list[str]]] = []
        if own is None or own.next_token is None:
            return found
        while checkpoint.has(f"model.layers.{config.num_layers + len(found)}.eh_proj"):
            watched = RewrittenCheckpoint(checkpoint, lambda name, weight: weight)
            head = next_token_head(checkpoint, config)
            block = f"model.layers.{config.num_layers + len(found)}"
            inputs, ends = torch.zeros(1, config.hidden_size), ModelEnds(_nothing, _nothing)
            build_head(watched, replace(head, block=block), self.ops, inputs, ends, self.tokens)
            found.append(watched.pulled)
        return found

    def outputs(self, layer: Layer, inputs: Path) -> Iterator[Tensor]:
        """The output of ``layer`` for each sequence in the file: float32 ``[T, hidden]``."""
        for hidden in self._rows(inputs):
            with torch.inference_mode():
                yield self._forward(layer, hidden)

    def advance(self, layer: Layer, inputs: Path, outputs: Path) -> None:
        """Run all sequences through ``layer``, from one file into another."""
        with new_file(outputs) as out:
            for hidden in self.outputs(layer, inputs):
                out.write(hidden.numpy().data)

    def ends(self, checkpoint: Checkpoint) -> list[tuple[str, Tensor]]:
        """The plain tensors before and behind the layers, with their names."""
        watched = RewrittenCheckpoint(checkpoint, lambda name, weight: weight)
        source = self._source(watched)
        positions_and_norm(source)
        if self.config.layer_inputs:
            LayerInputs(source)
        source.norm("model.norm")
        tables, plain = watched.pulled
        names = [*plain, *(["lm_head.bias"] if self.config.head_bias else [])]
        found = [(name, checkpoint.tensor(name)) for name in names]
        return [*((f"{name}.weight", plain_values(checkpoint, name)) for name in tables), *found]

    def head_inputs(self, checkpoint: Checkpoint, hidden: Path) -> InputStatistics:
        """Statistics of the final norm's outputs; ``hidden`` has the outputs of the last layer."""
        found = InputStatistics(self.config.hidden_size)
        norm = self._source(checkpoint).norm("model.norm")
        for x in self._rows(hidden):
            found.add(self.ops.norm(x, norm))
        return found

    def _source(self, checkpoint: Checkpoint) -> Source:
        return Source(checkpoint, self.config, Mesh(), self.ops, self.tokens)

    def _rows(self, path: Path) -> Iterator[Tensor]:
        """The sequences of a file, ``[tokens, hidden]`` each. Read, not mapped: a truncated file,
        or a hole in it on a full disk, would end the process."""
        shape = (self.tokens, self.config.hidden_size)
        count, rest = divmod(path.stat().st_size, math.prod(shape) * 4)
        with path.open("rb") as file:
            for _ in range(count):
                values = np.fromfile(file, np.float32, math.prod(shape))
                if len(values) < math.prod(shape):
                    break
                yield torch.from_numpy(values).view(shape)
                count -= 1
        if count or rest:
            raise QuantizationError(f"{path}: truncated while it was read; start the job again")

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
            states=_one_sequence(len(x)),
        )
        step = Step(batch, [rope.cos_sin(positions, self.ops) for rope in self._ropes])
        assert self._kv is not None
        delta, residual = layer(x, torch.zeros_like(x), step, self._kv.layers)
        assert residual is not None  # no norms of sums
        return delta + residual


def _one_sequence(tokens: int) -> StateBatch:
    """A request that begins without a state and ends with its only step."""
    each = ([-1], [0, 1], [tokens - 1], [1])
    return StateBatch(*(torch.tensor(one, dtype=torch.int32) for one in each))


def _nothing(x: Tensor) -> Tensor:
    """Stands for embedding and head of a block that is not run."""
    return x
