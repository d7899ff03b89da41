"""Writes a quantized model as a GGUF file: Hugging Face's names and values become llama.cpp's.

This is the inverse of :mod:`sdk.loaders.gguf_files.checkpoint`: rows of q and k are interleaved
where the architecture says so (whole rows, so after packing), norms stored minus 1 get 1 added, and
the experts of a layer, which arrive one by one, become one tensor.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from sdk.kernels.weights.layouts import Blocks, Dense, Layout
from sdk.loaders.gguf_files.checkpoint import GgufCheckpoint
from sdk.loaders.gguf_files.names import LAYER_OF, expert_of, gguf_name
from sdk.loaders.qkv_rows import our_delta_rows
from sdk.loaders.writers.gguf_file import GgufEntry, write_gguf
from sdk.loaders.writers.gguf_metadata import architecture_of, model_metadata, rope_factors
from sdk.loaders.writers.gguf_vocabulary import vocabulary_metadata
from sdk.loaders.writers.parts import PartTensor, read_parts, write_part
from sdk.models.architecture import Architecture, GgufRules
from sdk.quant.checkpoint import Checkpoint
from sdk.quant.errors import CheckpointError, UnsupportedError
from sdk.quant.methods.gguf_mixtures import FILE_TYPES, tensor_type
from sdk.quant.permuted import Permuted
from sdk.quant.quantize import to_blocks
from sdk.quant.scheme import Scheme
from sdk.quant.weight import Weight

#: Rows of the embedding that are packed at a time: 65 MB in float32 at 2048 columns.
_ROWS = 8192
#: Precedes the number of an expert in the names of a part.
_EXPERT = "#"


class GgufWriter:
    """See :class:`sdk.quantizing.job.Writer`.

    :raises UnsupportedError: an architecture or a tokenizer that GGUF files cannot hold.
    """

    def __init__(self, source: Checkpoint, scheme: Scheme) -> None:
        self._scheme, self._source = scheme, source
        self._config = source.config
        if isinstance(source, GgufCheckpoint):  # whose metadata are kept
            self._architecture, self._rules = source.architecture, source.rules
        else:
            self._architecture, self._rules = architecture_of(source.config, str(source.path))
        self._metadata = _metadata(source, self._architecture, self._rules)
        self._metadata["general.file_type"] = FILE_TYPES[scheme.mixture].number
        self._rope = rope_factors(source.config)
        if isinstance(source, GgufCheckpoint):
            self._rope = source.rope_factors()
        self._path = source.path

    def kind(self, name: str, columns: int) -> str:
        """The block type of a layer's matrix; ``"f16"`` if no block divides its rows."""
        theirs = self._name(expert_of(name)[0]).split(".")
        config = self._config
        kv_heads = config.get("num_key_value_heads") or config["num_attention_heads"]
        return tensor_type(
            self._scheme.mixture,
            theirs[2],
            int(theirs[1]),
            config["num_hidden_layers"],
            columns,
            grouped=config["num_attention_heads"] // kv_heads,
        )

    def matrix(self, name: str, weight: Layout | Permuted) -> tuple[dict[str, Tensor], str]:
        """The bytes of a matrix, with its type and shape as a note."""
        if isinstance(weight, Blocks):
            return self._encoded(name, weight.data, weight.type, weight.shape)
        assert isinstance(weight, Dense)
        rows = weight.values.contiguous().view(torch.uint8)  # a view of transposed experts
        return self._encoded(name, rows, "f16", weight.shape)

    def plain(self, name: str, tensor: Tensor) -> tuple[dict[str, Tensor], str]:
        """A norm or a bias, in float32; nothing of what is in the metadata."""
        match = LAYER_OF.fullmatch(name)
        if match is not None and match[2] in self._rules.numbers:
            return {}, ""
        if name.endswith("norm.weight"):
            tensor = tensor + self._architecture.tensors.norm_offset(name.removesuffix(".weight"))
        shape = tuple(tensor.shape)
        if isinstance(self._source, GgufCheckpoint):  # a mixer's tensors, as the file has them
            shape = self._source.stored_shape(name) or shape
        rows = tensor.to(torch.float32).reshape(-1, 1).contiguous().view(torch.uint8)
        return self._encoded(name, rows, "f32", shape)

    def whole(
        self, name: str, weight: Weight, gram: Tensor | None = None
    ) -> tuple[dict[str, Tensor], str]:
        """The embedding or the head, packed; the diagonal of ``gram`` weights errors."""
        tied = bool(self._config.get("tie_word_embeddings"))
        part = "output" if tied or name == "lm_head" else "token_embd"
        rows, columns = weight.shape
        kind = tensor_type(self._scheme.mixture, part, 0, 1, columns)
        mean_square = None if gram is None else gram.diagonal()
        parts = []
        for start in range(0, rows, _ROWS):
            values = weight.narrow("out", start, min(_ROWS, rows - start)).dequantize()
            if kind == "f16":
                parts.append(values.half().view(torch.uint8))
            else:
                parts.append(to_blocks(name, values, kind, mean_square).data)
        return self._encoded(name, torch.cat(parts), kind, weight.shape)

    def finish(self, parts: Sequence[Path], out: Path) -> None:
        """The file ``out``."""
        if self._rope:
            path = parts[0].with_name("rope.safetensors")
            factors = {name: torch.from_numpy(values) for name, values in self._rope.items()}
            notes = {name: _note("f32", tuple(values.shape)) for name, values in factors.items()}
            write_part(path, {n: v.view(torch.uint8) for n, v in factors.items()}, notes)
            parts = [*parts, path]
        tensors, notes = read_parts(parts)
        whole: dict[str, list[PartTensor]] = {}
        for tensor in tensors:
            whole.setdefault(tensor.name.partition(_EXPERT)[0], []).append(tensor)
        entries = []
        for name, data in whole.items():
            data.sort(key=lambda tensor: tensor.name)  # by expert
            kind, shape = json.loads(notes[data[0].name])
            experts = [len(data)] if _EXPERT in data[0].name else []
            entries.append(GgufEntry(name, (*experts, *shape), kind, tuple(data)))
        write_gguf(out, self._metadata, entries)

    # -- inside --------------------------------------------------------------------------------

    def _name(self, name: str) -> str:
        found = gguf_name(self._rules, name)
        if found is None:
            raise UnsupportedError(
                f"{self._path}: {name}: GGUF files of {self._rules.name} have no such tensor"
            )
        return found

    def _encoded(
        self, name: str, rows: Tensor, kind: str, shape: tuple[int, ...]
    ) -> tuple[dict[str, Tensor], str]:
        """``rows`` uint8 ``[N, bytes of a row]``, in llama.cpp's order."""
        stem = name.removesuffix(".bias")
        if (moved := our_delta_rows(self._config, name.removesuffix(".weight"))) is not None:
            rows = rows.view(len(moved), -1)[moved]
        if self._rules.interleaved_qk and stem.endswith(("q_proj", "k_proj")):
            key = "num_attention_heads" if stem.endswith("q_proj") else "num_key_value_heads"
            heads = self._config[key]
            split = rows.numpy().reshape(heads, 2, len(rows) // heads // 2, -1)
            rows = torch.from_numpy(np.ascontiguousarray(split.swapaxes(1, 2)))
        joined, expert = expert_of(name)
        theirs = self._name(joined)
        if expert is not None:
            theirs += f"{_EXPERT}{expert:04d}"
        return {theirs: rows.reshape(-1)}, _note(kind, shape)


def _note(kind: str, shape: tuple[int, ...]) -> str:
    return json.dumps([kind.upper(), list(shape)])


def _metadata(source: Checkpoint, own: Architecture, rules: GgufRules) -> dict[str, Any]:
    """The metadata of a GGUF file, or those made from a folder's config and tokenizer."""
    ahead = _blocks_ahead(source, own, rules)
    if isinstance(source, GgufCheckpoint):
        split = ("split.no", "split.count", "split.tensors.count", "general.alignment")
        kept = {key: value for key, value in source.metadata.items() if key not in split}
        return _with_blocks(kept, rules.name, source.config["num_hidden_layers"], ahead)
    if source.tokenizer is None:
        raise CheckpointError(f"{source.path}: no tokenizer in the folder; a GGUF file needs one")
    found = model_metadata(source.config, str(source.path))
    layers = source.config["num_hidden_layers"]
    if ahead:
        found |= {f"{rules.name}.block_count": layers + ahead}
        found |= {f"{rules.name}.nextn_predict_layers": ahead}
    for ours, theirs in rules.numbers.items():
        tensors = [source.tensor(f"model.layers.{i}.{ours}") for i in range(layers)]
        found[theirs] = np.array([float(x) for x in tensors], np.float32)
    found["general.name"] = source.path.resolve().name
    vocabulary = vocabulary_metadata(source.path, source.tokenizer, source.config["vocab_size"])
    return found | vocabulary


def _blocks_ahead(source: Checkpoint, own: Architecture, rules: GgufRules) -> int:
    """How many blocks of multi-token prediction are written: those that this package runs."""
    count, layers = 0, source.config["num_hidden_layers"]
    if own.next_token is not None and "nextn_predict_layers" in rules.keys:
        while source.has(f"model.layers.{layers + count}.eh_proj"):
            count += 1
    return count


def _with_blocks(metadata: dict[str, Any], name: str, layers: int, ahead: int) -> dict[str, Any]:
    """The metadata of a file that counts ``ahead`` blocks after its layers; others are left out,
    with their values in arrays that have one for each."""
    key = f"{name}.nextn_predict_layers"
    before = int(metadata.get(key, 0))
    if before == ahead:
        return metadata
    found = dict(metadata)
    for other, value in metadata.items():
        if isinstance(value, np.ndarray) and value.shape == (layers + before,):
            found[other] = value[: layers + ahead]
    return found | {f"{name}.block_count": layers + ahead, key: ahead}
