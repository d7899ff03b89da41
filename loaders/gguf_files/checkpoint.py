"""A GGUF file as a `Checkpoint`: llama.cpp's names and values become Hugging Face's.

llama.cpp's converter changes some tensors; pulling one undoes it:

- `interleaved_qk` architectures: rows of q and k (and their biases) are interleaved so that rotary
  pairs are adjacent, ``gguf[h, i, j] = hf[h, j, i]``. Rows are whole blocks, so packed rows are
  moved.
- `norms_minus_one` architectures: the file holds the whole weights of norms, plus 1.
- Recurrent mixers: convolutions lack the dimension of size 1, vectors of heads have one, and norms
  over groups have one for the groups.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from sdk.kernels.lazy_torch import Tensor, torch
from sdk.kernels.weights.layouts import BLOCK_TYPES, PIECE_ROWS, Affine, Layout, Pieces
from sdk.loaders.formats.gguf_decode import FLOATS, decode_matrix
from sdk.loaders.gguf_files.config import (
    build_config,
    build_generation_config,
    file_architecture,
    unread_keys,
)
from sdk.loaders.gguf_files.header import GgufTensor
from sdk.loaders.gguf_files.mmproj_files import beside
from sdk.loaders.gguf_files.names import (
    LAYER_OF,
    ONE_ROW,
    expert_of,
    gguf_name,
    half_of_experts,
    is_stacked,
    single_expert,
)
from sdk.loaders.gguf_files.reader import GgufFile, read_gguf
from sdk.loaders.model_shapes import (
    expected_shape,
    interleaved_heads,
    mixer_shape,
    num_experts,
)
from sdk.loaders.qkv_rows import delta_rows, stored_rows
from sdk.quant.checkpoint import VISION_ROOT, TensorEntry
from sdk.quant.errors import CheckpointError
from sdk.quant.online import LAYER_TABLES
from sdk.quant.spec import QuantSpec
from sdk.quant.unread import UnreadWeight
from sdk.quant.weight import Weight, weight_of

if TYPE_CHECKING:
    from sdk.loaders.gguf_files.mmproj import Mmproj

#: Tensors that became part of the config.
_IN_CONFIG = frozenset(
    {"rope_freqs.weight", "rope_factors_long.weight", "rope_factors_short.weight"}
)

#: Matrices above `_LARGE` bytes are read in pieces, which stay in a cache until packed. With 8 MiB,
#: q, k and v of an 8B model were copied twice before they were packed: 0.8 GB in all.
_PIECE = 2 << 20
_LARGE = 1 << 20


class GgufCheckpoint:
    """See `sdk.quant.checkpoint.Checkpoint`; ``path`` is the (first) file."""

    format = "gguf"

    def __init__(
        self,
        path: Path,
        pre_tokenizer: str | None = None,
        mmproj: Path | None = None,
        *,
        text_only: bool = True,
    ) -> None:
        """``pre_tokenizer``: see :func:`tokenizer_from_gguf`. ``mmproj``: the file of its encoder
        of images; ``None``: unless ``text_only`` that beside it, if there is one."""
        self.path = path
        self._pre_tokenizer = pre_tokenizer
        self.on_bytes: Callable[[int, int], None] | None = None
        self._file: GgufFile | None = read_gguf(path)
        self._file.leave_out_equal_head()
        self.architecture, self.rules = file_architecture(self._file)
        self.config: Mapping[str, Any] = build_config(self._file)
        #: Keys of the metadata that nothing reads.
        self.unread_keys = unread_keys(self._file, self.architecture, self.rules)
        self.generation_config: Mapping[str, Any] = build_generation_config(self._file, self.config)
        self.kv_scales: Mapping[str, float] = {}
        self._images: Mmproj | None = None
        if mmproj is not None or (not text_only and beside(path)):
            from sdk.loaders.gguf_files.mmproj import (  # with a model that reads images
                Mmproj,
                open_beside,
            )

            file, config = self._file, self.config
            own = (
                open_beside(path, file, config) if mmproj is None else Mmproj(mmproj, file, config)
            )
            self._images = own
        self.processor: Mapping[str, Any] = {}
        self._pulled: set[str] = set()
        self._done = 0
        self._total = sum(tensor.nbytes for tensor in self._file.tensors.values())
        if self._images is not None:
            self.config = {**self.config, **self._images.config}
            self.processor = self._images.processor
            self._total += self._images.nbytes
            self._images.on_read = self._read

    @property
    def metadata(self) -> dict[str, Any]:
        """The metadata of the file, as stored."""
        return self._opened().metadata

    @cached_property
    def tokenizer(self) -> Any:
        """The tokenizer built from the metadata; None when the file has no vocabulary."""
        if "tokenizer.ggml.tokens" not in self.metadata:
            return None
        from sdk.loaders.tokenizer.from_gguf import tokenizer_from_gguf

        return tokenizer_from_gguf(self.metadata, str(self.path), pre_tokenizer=self._pre_tokenizer)

    @property
    def mmproj(self) -> Path | None:
        """The file of its encoder of images."""
        return None if self._images is None else self._images.path

    def weight(self, name: str) -> Weight:
        if name.startswith(VISION_ROOT) and self._images is not None:
            return self._images.weight(name)
        stored = self._find(name)
        self._check_shape(name, stored)
        expert = self._expert(name, stored)
        if len(stored.shape) != (2 if expert is None else 3):
            raise self._fail(stored, f"expected a matrix, found shape {list(stored.shape)}")
        factor = self._factor_beside(stored, expert)
        own_order = stored_rows if self.rules.rows_as_stored else delta_rows
        rows = own_order(self.config, name)
        whole = expert is not None or factor is not None or rows is not None
        by_row = name.endswith(LAYER_TABLES)
        if not whole and (_is_large(stored) or (by_row and _keeps_rows(stored))):
            self._report(stored)
            return self._unread(name, stored)
        data = self._rows(name, stored, expert)
        layout = self._layout(stored, data)
        if factor is not None:
            layout = self._times(stored, layout, factor)
        self._report(stored)
        found = weight_of(layout)
        return found if rows is None else found.with_rows(rows)

    def tensor(self, name: str) -> Tensor:
        if name.startswith(VISION_ROOT) and self._images is not None:
            return self._images.tensor(name)
        if (number := self._number(name)) is not None:
            return torch.tensor([number])
        stored = self._find(name)
        self._check_shape(name, stored)
        expert, shape = self._expert(name, stored), stored.shape
        data = self._rows(name, stored, expert)
        if expert is not None:
            shape = shape[1:]
        layout = self._layout(stored, data)
        values = weight_of(layout).dequantize().reshape(shape)
        if (like := mixer_shape(name, shape)) is not None:
            values = values.reshape(like)
        if name.endswith("norm.weight"):
            values = values - self.architecture.tensors.norm_offset(name.removesuffix(".weight"))
        self._report(stored)
        return values

    def has(self, name: str) -> bool:
        if name.startswith(VISION_ROOT):
            return self._images is not None and self._images.has(name)
        return self._stored(name)[1] is not None

    def alike(self, one: str, other: str) -> bool:
        first, second = self._stored(one)[1], self._stored(other)[1]
        return first is not None and second is not None and self._opened().alike(first, second)

    def entries(self) -> Sequence[TensorEntry]:
        entries, tensors = self._opened().entries(), self._opened().tensors
        two = 2 * _PIECE  # the one that is packed and the next one
        found = [replace(e, read=two) if _is_large(tensors[e.name]) else e for e in entries]
        return [*found, *(() if self._images is None else self._images.entries())]

    def stored_shape(self, name: str) -> tuple[int, ...] | None:
        """The shape of a tensor in the file; ``None`` if it has none of its own."""
        stored = self._stored(name)[1]
        return None if stored is None or self._expert(name, stored) is not None else stored.shape

    def rope_factors(self) -> dict[str, NDArray[np.float32]]:
        """The divisors of rotary frequencies as the file has them, by the names of its tensors."""
        file = self._opened()
        names = sorted(_IN_CONFIG & file.tensors.keys())  # float32, as was checked
        return {name: file.data(name).reshape(-1).view("<f4").copy() for name in names}

    def unused(self) -> list[str]:
        read = self._pulled | _IN_CONFIG
        own = [name for name in self._opened().tensors if name not in read]
        return own if self._images is None else [*own, *self._images.unused()]

    def close(self) -> None:
        if self._file is not None:
            self._file.close()
        if self._images is not None:
            self._images.close()
        self._file = None
        self.__dict__.pop("tokenizer", None)  # callers may keep it alive

    # -- inside --------------------------------------------------------------------------------

    def _opened(self) -> GgufFile:
        if self._file is None:
            raise CheckpointError(f"{self.path}: the checkpoint is closed")
        return self._file

    def _where(self, stored: GgufTensor) -> str:
        return f"{self.path}: tensor {stored.name!r}"

    def _layout(self, stored: GgufTensor, data: NDArray[np.uint8]) -> Layout:
        factor = self._opened().factor(stored.name) if stored.type.tail else None
        return decode_matrix(
            stored.type, data, stored.shape[-1], self._where(stored), factor=factor
        )

    def _fail(self, stored: GgufTensor, what: str) -> CheckpointError:
        return CheckpointError(f"{self._where(stored)}: {what}")

    def _stored(self, name: str) -> tuple[str | None, GgufTensor | None]:
        """The file's name for ``name``, and the tensor; for an expert, that of all experts."""
        tensors = self._opened().tensors
        joined, expert = expert_of(name)
        theirs = gguf_name(self.rules, joined)
        if theirs is not None and expert is not None:
            most = num_experts(self.config)
            if ".self_attn." in name:
                most = self.config["num_attention_heads"]
            elif joined.startswith("model.altup_"):
                most = self.config["altup_num_inputs"] - 1
            if expert >= (most or 0):
                return theirs, None
            single = single_expert(theirs, expert)
            theirs = single if single in tensors else theirs
            if theirs not in tensors and (half := half_of_experts(theirs)) is not None:
                return theirs, self._half(half)
        stored = tensors.get(theirs or "")
        if stored is not None and joined.endswith(ONE_ROW) and len(stored.shape) == 1:
            stored = replace(stored, shape=(1, *stored.shape))
        return theirs, stored

    def _half(self, half: tuple[str, int]) -> GgufTensor | None:
        """Gate or up of a tensor with both of all experts, as if it had its rows alone."""
        joined = self._opened().tensors.get(half[0])
        if joined is None or len(joined.shape) != 3 or joined.shape[1] % 2:
            return None
        count, rows, columns = joined.shape
        return replace(joined, shape=(count, rows // 2, columns))

    def _number(self, name: str) -> float | None:
        """A parameter that the metadata have, for each layer or one for all."""
        match = LAYER_OF.fullmatch(name)
        key = self.rules.numbers.get(match[2]) if match else None
        if match is None or key is None:
            return None
        values, layers = self.metadata.get(key), self.config["num_hidden_layers"]
        if isinstance(values, np.ndarray):
            if values.shape != (layers,):
                raise CheckpointError(
                    f"{self.path}: {key}: expected {layers} numbers, found {values.size}"
                )
            values = values[int(match[1])]
        if not isinstance(values, float | np.floating):
            raise CheckpointError(f"{self.path}: {key}: expected a number, found {values!r}")
        return float(values)

    def _expert(self, name: str, stored: GgufTensor) -> int | None:
        """The index of ``name`` in a tensor of all experts or heads; None if the tensor is not of
        all."""
        return expert_of(name)[1] if is_stacked(stored.name) else None

    def _find(self, name: str) -> GgufTensor:
        theirs, stored = self._stored(name)
        if stored is None:
            tried = (
                f"no tensor {theirs!r} in the file"
                if theirs
                else f"the architecture {self.rules.name!r} has no such tensor in GGUF files"
            )
            raise CheckpointError(f"{self.path}: {name} is missing: {tried}")
        return stored

    def _check_shape(self, name: str, stored: GgufTensor) -> None:
        expected = expected_shape(self.config, name.removesuffix(".weight"))
        if expected is not None and self._expert(name, stored) is not None:
            expected = (num_experts(self.config) or 0, *expected)
        if expected is not None and stored.shape != expected:
            raise self._fail(
                stored,
                f"{name}: expected shape {list(expected)} by the metadata, "
                f"found {list(stored.shape)}",
            )

    def _unread(self, name: str, stored: GgufTensor) -> Weight:
        opened, rows, columns = self._opened(), stored.shape[0], stored.shape[1]

        def read(start: int, count: int) -> Layout:
            data = opened.data(stored.name, part=(start, count))
            return decode_matrix(stored.type, data, columns, self._where(stored), start)

        unit, order = PIECE_ROWS, None
        if self._interleaved(name):
            heads = self._heads(name, stored)
            unit = math.lcm(rows // heads, PIECE_ROWS)  # a piece moves rows inside of heads
            places = np.arange(rows).reshape(heads, rows // heads // 2, 2)
            order = torch.from_numpy(np.ascontiguousarray(places.swapaxes(1, 2)).reshape(rows))
        step = max(_PIECE * rows // stored.nbytes // unit, 1) * unit
        spec = QuantSpec.parse(stored.type.name.lower())
        found = UnreadWeight(
            Pieces((rows, columns), read, step), spec, opened.stored_rows(stored.name)
        )
        return found if order is None else found.reordered(order)

    def _interleaved(self, name: str) -> bool:
        """Whether the file has the rows of a tensor in another order."""
        stem = name.removesuffix(".bias")
        return self.rules.interleaved_qk and stem.endswith(("q_proj", "k_proj"))

    def _rows(self, name: str, stored: GgufTensor, expert: int | None) -> NDArray[np.uint8]:
        """The packed rows, of one expert or all, in the order of the Hugging Face model."""
        data = self._opened().data(stored.name, expert)
        if expert is not None and len(data) == 2 * stored.shape[1]:  # gate and up, joined
            rows = stored.shape[1]
            data = data[rows:] if name.endswith("up_proj") else data[:rows]
        if not self._interleaved(name):
            return data
        heads = self._heads(name, stored)
        if name.endswith(".bias"):
            data = data.reshape(stored.shape[0], -1)
        rows, width = data.shape
        paired = data.reshape(heads, rows // heads // 2, 2, width)
        return np.ascontiguousarray(paired.swapaxes(1, 2)).reshape(rows, width)

    def _heads(self, name: str, stored: GgufTensor) -> int:
        """Of interleaved rows."""
        heads = interleaved_heads(self.config, name)
        if stored.shape[0] % (2 * heads):
            raise self._fail(
                stored,
                f"expected a multiple of {2 * heads} rows ({heads} heads), found {stored.shape[0]}",
            )
        return heads

    def _factor_beside(self, stored: GgufTensor, expert: int | None) -> float | None:
        """The factor of a whole matrix, which NVFP4 files store next to it (for all experts in one
        tensor).

        ``input_scale`` next to it is for engines that quantize activations to 4 bits.
        """
        stem = stored.name.removesuffix(".weight")
        tensors = self._opened().tensors
        if stem.partition(".")[2].partition(".")[2] + ".scale" in self.rules.tensors.values():
            return None  # the model has factors of its own there
        if f"{stem}.input_scale" in tensors:
            self._report(tensors[f"{stem}.input_scale"])
        scale = tensors.get(f"{stem}.scale")
        if scale is None:
            return None
        count = 1 if expert is None else stored.shape[0]
        if scale.shape != (count,) or scale.type.name != "F32":
            raise self._fail(
                scale, f"expected F32 [{count}], found {scale.type.name} {list(scale.shape)}"
            )
        factor = float(self._opened().data(scale.name).view("<f4")[0, expert or 0])
        if not math.isfinite(factor):
            raise self._fail(scale, f"expected a finite number, found {factor}")
        self._report(scale)
        return factor

    def _times(self, stored: GgufTensor, layout: Layout, factor: float) -> Layout:
        if not isinstance(layout, Affine) or layout.super_scale is not None:
            raise self._fail(
                stored,
                f"expected NVFP4 for a matrix with a .scale, found {stored.type.name}",
            )
        rows, columns = layout.shape
        return replace(layout, super_scale=torch.full((rows, 1), factor), super_group=columns)

    def _report(self, stored: GgufTensor) -> None:
        if stored.name in self._pulled:
            return
        self._pulled.add(stored.name)
        self._read(stored.nbytes)

    def _read(self, nbytes: int) -> None:
        self._done += nbytes
        if self.on_bytes is not None:
            self.on_bytes(self._done, self._total)


def _is_large(stored: GgufTensor) -> bool:
    """Whether a matrix is worth reading in pieces, and has the rows of the kernels' layout."""
    return _keeps_rows(stored) and stored.nbytes > _LARGE


def _keeps_rows(stored: GgufTensor) -> bool:
    kept = stored.type.name.lower() in BLOCK_TYPES or stored.type.name in FLOATS
    return kept and len(stored.shape) == 2
