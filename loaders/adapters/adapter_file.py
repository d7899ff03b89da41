"""An adapter on disk, known by its headers: what it updates, how large it is, how to read it."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import NamedTuple

from sdk.kernels.lazy_torch import Tensor, torch
from sdk.loaders.model_file import ModelFile
from sdk.quant.adapter import Adapter, LowRank
from sdk.quant.errors import CheckpointError

MAX_RANK = 1 << 14
_PIECE = 16 * 2**20


class MatrixShape(NamedTuple):
    """The size of one update: ``b [outputs, rank] @ a [rank, inputs]``, and perhaps a bias.

    For the embedding ``outputs`` is the vocabulary and ``inputs`` the hidden size.
    """

    rank: int
    inputs: int
    outputs: int
    has_bias: bool = False

    @property
    def num_values(self) -> int:
        """Numbers of the two factors."""
        return self.rank * (self.inputs + self.outputs)


@dataclass(frozen=True, slots=True)
class StoredMatrix:
    """One update in a file; ``read`` returns it."""

    shape: MatrixShape
    read: Callable[[], LowRank]


class AdapterFile(AbstractContextManager["AdapterFile"]):
    """An adapter whose headers were checked. Close it, or use it as a context manager.

    ``matrices`` are by the paths of :class:`sdk.quant.adapter.Adapter`. ``files`` are all that
    decide about its values; ``close_files`` closes them.
    """

    def __init__(
        self,
        path: Path,
        matrices: Mapping[str, StoredMatrix],
        files: tuple[Path, ...],
        close_files: Callable[[], None],
    ) -> None:
        self.path = path
        self.matrices = matrices
        self._files = files
        self._close_files = close_files

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    @property
    def rank(self) -> int:
        """The largest rank."""
        return max(stored.shape.rank for stored in self.matrices.values())

    @property
    def shapes(self) -> dict[str, MatrixShape]:
        return {path: stored.shape for path, stored in self.matrices.items()}

    def digest(self) -> str:
        """A hash of the bytes of all files: equal for equal adapters. Reads them."""
        digest = hashlib.blake2b(digest_size=16)
        for path in self._files:
            for piece in _pieces(path):
                digest.update(piece)
        return digest.hexdigest()

    def stamp(self) -> tuple[tuple[int, int, int], ...]:
        """Sizes, times and numbers of the files: equal while nobody has changed them.

        :raises CheckpointError: one is gone.
        """
        return stamp_of(self._files)

    @property
    def files(self) -> tuple[Path, ...]:
        return self._files

    def read(self, name: str) -> Adapter:
        """Read all matrices. :raises CheckpointError: a value is not finite, or reading fails."""
        return Adapter(name, {path: stored.read() for path, stored in self.matrices.items()})

    def close(self) -> None:
        self._close_files()


def stamp_of(files: tuple[Path, ...]) -> tuple[tuple[int, int, int], ...]:
    """See :meth:`AdapterFile.stamp`."""
    try:
        found = [path.stat() for path in files]
    except OSError as error:
        raise CheckpointError(f"{error.filename}: cannot be read: {error.strerror}") from error
    return tuple((one.st_ino, one.st_size, one.st_mtime_ns) for one in found)


def _pieces(path: Path) -> Iterator[memoryview]:
    file = ModelFile(path)
    try:
        yield memoryview(file.size.to_bytes(8, "little"))
        for start in range(0, file.size, _PIECE):
            yield file.read(start, min(_PIECE, file.size - start)).data
    finally:
        file.close()


def check_shapes(
    source: str, shape: MatrixShape, other_rank: int, expected: tuple[int, int] | None
) -> None:
    """Check an update against the model's matrix ``(out, in)``; ``None``: it is not known.

    ``other_rank``: the rank of the second factor.

    :raises CheckpointError: the shapes contradict each other.
    """
    if not 1 <= shape.rank == other_rank <= MAX_RANK:
        raise CheckpointError(
            f"{source}: expected two factors of one rank from 1 to {MAX_RANK}, found "
            f"{shape.rank} and {other_rank}"
        )
    if expected is not None and (shape.outputs, shape.inputs) != expected:
        raise CheckpointError(
            f"{source}: expected a matrix {list(expected)} as in the model, found "
            f"{[shape.outputs, shape.inputs]}: the adapter was made for another model"
        )


def low_rank(a: Tensor, b: Tensor, scale: float, source: str) -> LowRank:
    """The update ``scale * b @ a``; ``source`` names it in errors.

    A power of two changes no digit of ``b``, so that 16-bit factors stay what they are. Otherwise
    both become float32.

    :raises CheckpointError: a value is not finite.
    """
    for name, factor in (("A", a), ("B", b)):
        if not bool(torch.isfinite(factor).all()):
            raise CheckpointError(f"{source}: factor {name} has values that are not finite")
    exact = math.frexp(scale)[0] == 0.5
    if a.dtype == b.dtype and a.dtype != torch.float64 and exact:
        scaled = b * scale
        if bool(torch.isfinite(scaled).all()) and _keeps_small(b, scaled, scale):
            return LowRank(a.contiguous(), scaled.contiguous())
    a, b = a.to(torch.float32), b.to(torch.float32) * scale
    if not bool(torch.isfinite(b).all()):
        raise CheckpointError(f"{source}: the scaled factor B exceeds the range of float32")
    return LowRank(a.contiguous(), b.contiguous())


def _keeps_small(b: Tensor, scaled: Tensor, scale: float) -> bool:
    """Whether no digit was lost at the lower end of the type's range."""
    return scale >= 1.0 or bool((scaled / scale == b).all())
