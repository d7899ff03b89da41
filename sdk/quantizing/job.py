"""Quantizes a model layer by layer, so that the job can be stopped and continued.

Unfinished work is in a folder next to the result (``job_folder.py``). A layer is finished when its
part has its final name; the same job, started again, continues after the last one. At the end the
parts become the result, which appears under its name in one step.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Protocol

import torch
from torch import Tensor

from sdk.kernels.weights.layouts import Dense, Layout
from sdk.models.leftovers import Leftovers
from sdk.quant.calibration import InputStatistics, Observer
from sdk.quant.checkpoint import Checkpoint
from sdk.quant.online import stays_plain
from sdk.quant.permuted import Permuted, PermutedWeight
from sdk.quant.quantize import (
    Packed,
    check_finite,
    quantize_joined,
    quantize_without_data,
    to_blocks,
)
from sdk.quant.rewritten_checkpoint import RewrittenCheckpoint
from sdk.quant.scheme import Scheme
from sdk.quant.spec import QuantSpec
from sdk.quant.weight import Weight, weight_of
from sdk.quantizing.folds import Folding
from sdk.quantizing.job_folder import JobFolder
from sdk.quantizing.layers import LayerRun, plain_values

#: Weight of a row's errors as an embedding, relative to the mean weight as a row of the head.
_AS_EMBEDDING = 0.1
_OF_LATENT = re.compile(r"\.(kv_b_proj|k_b_proj|v_b_proj)$").search
Report = Callable[[int, int], None]
Encoded = tuple[dict[str, Tensor], str]


class Writer(Protocol):
    """Writes a model in one format. The methods return tensors by their name in the file, with a
    note that ``finish`` reads again."""

    def matrix(self, name: str, weight: Layout | Permuted) -> Encoded:
        """A quantized matrix of a layer."""

    def plain(self, name: str, tensor: Tensor) -> Encoded:
        """A norm or bias, float32."""

    def whole(self, name: str, weight: Weight, gram: Tensor | None) -> Encoded:
        """The embedding or the head; ``gram`` ``[in, in]``: of the inputs to optimize it for."""

    def finish(self, parts: Sequence[Path], out: Path) -> None:
        """Write everything to ``out``, which does not exist yet."""


class Job:
    """Quantizes one model with one scheme.

    Args:
        checkpoint: the original.
        writer: writes the scheme's format.
        kinds: for GGUF, the block type of a matrix by name and columns.
        ids: calibration text, int64 ``[S, T]``; None for methods without data.
        out: the result.
        facts: identify the job: an unfinished one with equal facts is continued.
    """

    def __init__(
        self,
        checkpoint: Checkpoint,
        scheme: Scheme,
        writer: Writer,
        kinds: Callable[[str, int], str] | None,
        ids: Tensor | None,
        out: Path,
        facts: Mapping[str, object],
        num_threads: int | None = None,
    ) -> None:
        self.checkpoint = checkpoint
        self.scheme = scheme
        self.writer = writer
        self.kinds = kinds
        self.ids = ids
        tokens = 1 if ids is None else ids.shape[1]
        self.layers = LayerRun(checkpoint, tokens, num_threads)
        self.folder = JobFolder(out, facts, self._bytes_to_write())

    def close(self) -> None:
        """Idempotent; finished parts stay on the disk."""
        self.layers.close()

    def run(self, report: Report) -> None:
        """Do what is left. ``report(done, total)`` counts layers; it stops the job by raising.

        :raises QuantizationError: OUT exists, there is no space, the folder of unfinished parts
            belongs to another job, or a matrix cannot be quantized.
        """
        count = self.layers.config.num_layers
        inputs = None if self.ids is None else self._inputs_bytes(self.ids)
        try:
            self.folder.enter()
            first = self.folder.first_missing(count + 1, inputs)
            report(min(first, count), count)
            for index in range(first, count):
                self._layer(index)
                report(index + 1, count)
            if first <= count:
                self._ends(count)
            if first == 0:  # else this run has not pulled everything
                self._check_leftovers()
            parts = [self.folder.part(i) for i in range(count + 1)]
            self.folder.finish(lambda made: self.writer.finish(parts, made))
        except OSError as error:
            raise self.folder.failed(error) from error

    def _check_leftovers(self) -> None:
        """:raises CheckpointError: the result would lack tensors of the model."""
        names = [entry.name for entry in self.checkpoint.entries()]
        config, only_text = self.layers.config, self.checkpoint.format == "gguf"
        unused = self.checkpoint.unused()
        left = Leftovers.of(
            unused, names, config.num_layers, sharing=config.sharing_layers, only_text=only_text
        )
        left.check(self.checkpoint.path, config.model_type)

    def _inputs_bytes(self, ids: Tensor) -> int:
        return ids.numel() * self.layers.config.hidden_size * 4

    def _bytes_to_write(self) -> int:
        """Bytes of the parts and the result, which both exist at the end."""
        weights = sum(entry.num_elements for entry in self.checkpoint.entries())
        needed = 2 * weights * self.scheme.spec.bits // 8
        return needed if self.ids is None else needed + 2 * self._inputs_bytes(self.ids)

    # -- layers --------------------------------------------------------------------------------

    def _layer(self, index: int) -> None:
        observer = Observer()
        observing = RewrittenCheckpoint(
            self.checkpoint,
            # heads of latent attention are one weight, which takes no wrappers
            lambda name, weight: weight if _OF_LATENT(name) else observer.watch(name, weight),
        )
        inputs = self.folder.inputs(index)
        if self.ids is not None and index == 0:
            self.layers.embed(self.checkpoint, self.ids, inputs)
        layer = self.layers.build(observing, index)
        pulled, plain = (list(dict.fromkeys(each)) for each in observing.pulled)
        names = [name for name in pulled if not stays_plain(name)]
        packed: dict[str, Packed] = {}
        changed: dict[str, Tensor] = {}
        if self.ids is None:
            packed = {name: self._without_data(name) for name in names}
        else:
            for name in names:  # before running them, so that the error names the right matrix
                check_finite(name, self._values(name))
            for _ in self.layers.outputs(layer, inputs):
                pass
            del layer
            packed, changed = self._with_data(index, observer.inputs)
            for name in names:
                if name not in packed:  # an expert that no token of the text was routed to
                    packed[name] = self._without_data(name)
            after = RewrittenCheckpoint(
                self.checkpoint,
                lambda name, weight: _weight(packed[name]) if name in packed else weight,
                changed,
            )
            made = self.layers.build(after, index)
            self.layers.advance(made, inputs, self.folder.inputs(index + 1))
        tensors = {n: changed[n] if n in changed else self.checkpoint.tensor(n) for n in plain}
        self._write(index, self._encoded(pulled, packed, tensors))
        inputs.unlink(missing_ok=True)

    def _encoded(
        self, pulled: Sequence[str], packed: Mapping[str, Packed], plain: Mapping[str, Tensor]
    ) -> list[Encoded]:
        """A layer's matrices, of which some stay plain, and its plain tensors."""
        kept = {f"{n}.weight": plain_values(self.checkpoint, n) for n in pulled if stays_plain(n)}
        found = [self.writer.matrix(name, packed[name]) for name in pulled if name in packed]
        return found + [self.writer.plain(*each) for each in {**plain, **kept}.items()]

    def _values(self, name: str) -> Tensor:
        return self.checkpoint.weight(name).dequantize()

    def _without_data(self, name: str, inputs: InputStatistics | None = None) -> Packed:
        weight = self._values(name)
        if self.kinds is None:
            return quantize_without_data(name, weight, self.scheme)
        kind = self.kinds(name, weight.shape[1])
        if kind == "f16":
            return Dense(weight.half())
        return to_blocks(name, weight, kind, None if inputs is None else inputs.mean_square)

    def _with_data(
        self, index: int, inputs: Mapping[tuple[str, ...], InputStatistics]
    ) -> tuple[dict[str, Packed], dict[str, Tensor]]:
        """The layer's quantized matrices, and the norms that were changed with them."""
        packed: dict[str, Packed] = {}
        if self.scheme.method in ("awq", "smoothquant"):
            # parts of one matrix have its name each
            taken = (
                tuple(dict.fromkeys(name for name in names if not stays_plain(name)))
                for names in inputs
            )
            pairs = zip(taken, inputs.values(), strict=True)
            return Folding(
                self.checkpoint,
                self.scheme,
                self.layers.config,
                f"model.layers.{index}",
                {names: statistics for names, statistics in pairs if names},
            ).run()
        for names, statistics in inputs.items():
            if stays_plain(names[0]):
                continue
            if self.scheme.method != "gptq":
                packed.update((name, self._without_data(name, statistics)) for name in names)
                continue
            by_kind: dict[QuantSpec, dict[str, Tensor]] = {}
            for name in names:
                values = self._values(name)
                kind = self.scheme.spec_of(name)
                if self.kinds is not None:
                    kind = QuantSpec.parse(self.kinds(name, values.shape[1]))
                by_kind.setdefault(kind, {})[name] = values
            for kind, weights in by_kind.items():
                if kind.name in ("f16", "q8_0"):
                    packed.update((name, self._without_data(name, statistics)) for name in weights)
                else:
                    packed.update(quantize_joined(weights, statistics, self.scheme, kind))
        return packed, {}

    def _ends(self, count: int) -> None:
        """The tensors outside the layers."""
        found = [self.writer.plain(*plain) for plain in self.layers.ends(self.checkpoint)]
        tied = self.layers.config.tie_word_embeddings
        for name in ["model.embed_tokens"] if tied else ["model.embed_tokens", "lm_head"]:
            packs = self.scheme.head is not None or self.kinds is not None
            gram = None
            if self.ids is not None and packs and (tied or name == "lm_head"):
                gram = self.layers.head_inputs(self.checkpoint, self.folder.inputs(count)).gram
                if tied:
                    gram = _for_both(gram)
            found.append(self.writer.whole(name, self.checkpoint.weight(name), gram))
        for pulled, plain in self.layers.blocks_ahead(self.checkpoint):
            packed = {name: self._without_data(name) for name in pulled if not stays_plain(name)}
            found += self._encoded(pulled, packed, {n: self.checkpoint.tensor(n) for n in plain})
        self._write(count, found)
        self.folder.inputs(count).unlink(missing_ok=True)

    def _write(self, index: int, encoded: Sequence[Encoded]) -> None:
        tensors: dict[str, Tensor] = {}
        notes: dict[str, str] = {}
        for found, note in encoded:
            tensors |= found
            if note:
                notes |= dict.fromkeys(found, note)
        self.folder.write_part(index, tensors, notes)


def _for_both(gram: Tensor) -> Tensor:
    """The Gram matrix for an embedding that is also the head: weights errors by the head's inputs,
    and equally for the rows that enter the model."""
    return gram + _AS_EMBEDDING * float(gram.diagonal().mean()) * torch.eye(len(gram))


def _weight(packed: Packed) -> Weight:
    if isinstance(packed, Permuted):
        return PermutedWeight(weight_of(packed.layout), packed.order)
    return weight_of(packed)
