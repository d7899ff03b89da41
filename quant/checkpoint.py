"""What a model file looks like to a model: names are pulled, nothing is pushed.

``loaders`` builds these objects and ``models`` use them; neither knows the other. Names are those
of the Hugging Face model, whatever the file calls them: ``model.layers.0.self_attn.q_proj`` for a
matrix (no ``.weight``), ``model.norm.weight`` for a plain tensor.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:  # headers are read without torch
    from torch import Tensor

    from sdk.quant.weight import Weight


@dataclass(frozen=True, slots=True)
class TensorEntry:
    """One tensor of a file, or the tensors of one packed layer, from the headers: nothing is read.

    ``shape`` counts weights, not bytes; ``format`` is ``"F16"``, ``"q4_k"``, ``"gptq-w4g128"``.
    ``nbytes`` are those in the file, ``held`` those once it is loaded, where these are others.
    """

    name: str
    shape: tuple[int, ...]
    format: str
    nbytes: int
    held: int | None = None

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
    ``"gguf"`` or ``"safetensors"``; ``kv_scales`` are scales for an 8-bit KV cache, by name, which
    are shown and not used. Set ``on_bytes(done, total)`` to follow (or, by raising, to stop) the
    reading.
    """

    path: Path
    format: str
    config: Mapping[str, Any]
    generation_config: Mapping[str, Any]
    kv_scales: Mapping[str, float]
    on_bytes: Callable[[int, int], None] | None

    @property
    def tokenizer(self) -> Any:
        """The :class:`sdk.quant.tokenizer.Tokenizer` of the model, or ``None`` when it has none."""

    def weight(self, name: str) -> Weight:
        """One matrix, packed as in the file. :raises CheckpointError: when missing or broken."""

    def tensor(self, name: str) -> Tensor:
        """One small plain tensor (norm, bias) as float32. :raises CheckpointError: as above."""

    def has(self, name: str) -> bool:
        """Whether ``weight(name)`` or ``tensor(name)`` would find something."""

    def entries(self) -> Sequence[TensorEntry]:
        """Every tensor of the file under the name the file gives it; a packed layer is one."""

    def unused(self) -> list[str]:
        """Tensors nothing has pulled yet, under the file's names."""

    def close(self) -> None:
        """Unmap the files. Idempotent; weights already pulled stay valid."""
