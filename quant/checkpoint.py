"""The interface of an opened model file: models pull their tensors by name.

``loaders`` implement it and ``models`` use it; neither imports the other. Names are those of the
Hugging Face model, whatever the file calls them: ``model.layers.0.self_attn.q_proj`` for a matrix
(no ``.weight``), ``model.norm.weight`` for a plain tensor.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from sdk.kernels.dataclass import dataclass
from sdk.quant.errors import CheckpointError

if TYPE_CHECKING:  # headers are read without torch
    from torch import Tensor

    from sdk.quant.weight import Weight


#: What the names of the tensors of an encoder of images, and of its projector, begin with.
VISION_ROOT = "vision."


@dataclass(frozen=True, slots=True)
class TensorEntry:
    """One tensor of a file, or the tensors of one packed layer, known from the headers alone.

    ``shape`` counts weights, not bytes; ``format`` is like ``"F16"``, ``"q4_k"``,
    ``"gptq-w4g128"``. ``nbytes`` is its size in the file, ``held`` its size in memory if different.
    ``read``: how many bytes of the file are in memory at a time, if a CPU packs it in pieces.
    ``packed``: the type that it is quantized to while it is loaded, like ``"w8a16g64s"``.
    """

    name: str
    shape: tuple[int, ...]
    format: str
    nbytes: int
    held: int | None = None
    read: int | None = None
    packed: str | None = None

    @property
    def num_elements(self) -> int:
        count = 1
        for size in self.shape:
            count *= size
        return count

    @property
    def bits_per_weight(self) -> float:
        return self.nbytes * 8 / max(self.num_elements, 1)


class Checkpoint(Protocol):
    """An opened model file or folder.

    ``config`` is a dict with the keys of the Hugging Face model's ``config.json``; ``format`` is
    ``"gguf"`` or ``"safetensors"``; ``kv_scales`` holds the file's scales for an 8-bit KV cache by
    name, which are reported but not used. ``processor``: the keys of the image processor of a
    vision model, as in its ``preprocessor_config.json``; empty if there is none. Set
    ``on_bytes(done, total)`` to follow the reading, or to stop it by raising.
    """

    path: Path
    format: str
    config: Mapping[str, Any]
    generation_config: Mapping[str, Any]
    kv_scales: Mapping[str, float]
    processor: Mapping[str, Any]
    on_bytes: Callable[[int, int], None] | None

    @property
    def tokenizer(self) -> Any:
        """The model's :class:`sdk.quant.tokenizer.Tokenizer`, or ``None`` if there is none."""

    def weight(self, name: str) -> Weight:
        """One matrix, packed as in the file. :raises CheckpointError: missing or damaged."""

    def tensor(self, name: str) -> Tensor:
        """One small plain tensor (norm, bias) as float32. :raises CheckpointError: as above."""

    def has(self, name: str) -> bool:
        """Whether the file has a matrix or tensor ``name``."""

    def alike(self, one: str, other: str) -> bool:
        """Whether two matrices are one stored twice, as far as some parts of them show."""

    def entries(self) -> Sequence[TensorEntry]:
        """All tensors under the file's own names; a packed layer is one entry."""

    def unused(self) -> list[str]:
        """Tensors that have not been pulled yet, under the file's own names."""

    def close(self) -> None:
        """Close the files. Idempotent; weights that were read stay valid. Large ones are read when
        they are bound (:class:`sdk.quant.unread.UnreadWeight`): after this that raises."""


class LoadedCheckpoint:
    """The headers of a :class:`Checkpoint` whose weights are in an engine; it has no files."""

    tokenizer = None
    on_bytes: Callable[[int, int], None] | None = None

    def __init__(self, checkpoint: Checkpoint) -> None:
        self.path = checkpoint.path
        self.format = checkpoint.format
        self.config = checkpoint.config
        self.generation_config = checkpoint.generation_config
        self.kv_scales = checkpoint.kv_scales
        self.processor = checkpoint.processor
        source = getattr(checkpoint, "inner", checkpoint)
        #: Of a GGUF file: llama.cpp's number of its mixture of types, if it has one.
        self.file_type = getattr(source, "metadata", {}).get("general.file_type")
        self._entries = checkpoint.entries()

    def weight(self, name: str) -> Weight:
        raise self._has_none(name)

    def tensor(self, name: str) -> Tensor:
        raise self._has_none(name)

    def has(self, name: str) -> bool:
        return False

    def alike(self, one: str, other: str) -> bool:
        return False

    def entries(self) -> Sequence[TensorEntry]:
        return self._entries

    def unused(self) -> list[str]:
        return []

    def close(self) -> None:
        """Nothing is open."""

    def _has_none(self, name: str) -> CheckpointError:
        return CheckpointError(f"{self.path}: {name}: the weights are in an engine")
