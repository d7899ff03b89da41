"""The weights of one rank in the cache: taken from a file, or kept for the next opening."""

from __future__ import annotations

import contextlib
import ctypes
import json
import logging
import math
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from sdk.api.sizes import format_bytes
from sdk.engine.rank.runner_config import RunnerConfig
from sdk.engine.weight_cache.expert_uses import ExpertUses, keep_uses, read_uses, uses_name
from sdk.engine.weight_cache.folder import WEIGHTS, opened, weights_folder
from sdk.engine.weight_cache.index import DamagedError, Index
from sdk.engine.weight_cache.weights_key import weights_key
from sdk.engine.weight_cache.writer import NotKept, WeightWriter
from sdk.kernels.cpu import CpuBackend
from sdk.kernels.cpu.packed_record import bound_of, record_of, tensor_of
from sdk.kernels.cpu.weight_map import PIECE, WeightMap
from sdk.kernels.errors import KernelError
from sdk.kernels.lazy_torch import torch
from sdk.kernels.operators.ops import Ops
from sdk.kernels.weights.bound import BoundLinear
from sdk.models.architecture import architecture
from sdk.models.auto import model_type
from sdk.models.parallel import Mesh
from sdk.models.parts import Matrix, Tensors
from sdk.quant import weight_record
from sdk.quant.checkpoint import Checkpoint
from sdk.quant.expert_weights import ExpertWeights

if TYPE_CHECKING:
    from sdk.kernels.cpu.expert_cache import ExpertCache

#: What a file that others wrote may make of its reader, besides our own errors.
_UNREADABLE = (
    *(DamagedError, KernelError, ValueError, TypeError, KeyError, IndexError),
    *(AttributeError, RecursionError),
)
logger = logging.getLogger("sdk")


class WeightStore(Mapping[str, Matrix]):
    """Matrices by path. A matrix that was taken is not here any more: it is taken once.

    ``str()``: what the cache does for this rank.
    """

    def __init__(self, ops: Ops, report: Callable[[int, int], None] | None) -> None:
        self._ops, self._report = ops, report
        #: Experts that are not all in memory.
        self.experts: ExpertCache | None = None
        #: Nobody multiplies with experts that were written, but waits for the file.
        self.drops_experts = False
        #: Called while the disk is waited for.
        self.alive: Callable[[], None] = lambda: None
        self._writer: WeightWriter | None = None
        self._map: WeightMap | None = None
        self._records: dict[str, Any] = {}  # not taken yet
        self._written: dict[str, Any] = {}
        self._waiting: list[tuple[dict[str, Any], Any]] = []
        self._kept: set[int] = set()
        self._index = Index()
        self._taken = 0
        self._path = Path()
        #: Of the file that says how often experts were used.
        self._uses = ""
        self._process = os.getpid()
        #: Why nothing is kept.
        self.reason = ""
        ops.context.closing.append(self._close)

    @property
    def tensors(self) -> Tensors:
        """What a model pulls from."""
        return Tensors(self, {}, self._keep)

    def _close(self) -> None:
        """The engine is closed: the mapping ends with the last of its weights."""
        self._map = None
        if self._writer is not None:
            self._writer.close()
        if self.experts is not None and self._uses and os.getpid() == self._process:
            keep_uses(self._path.parent, self._uses, ExpertUses.of(self.experts.history()))
            self._uses = ""

    # ---- from a file -----------------------------------------------------------------------------

    def read_from(
        self, file: int, path: Path, threads: int, library: ctypes.CDLL, uses: str = ""
    ) -> None:
        """Take matrices from an open file, which is closed then. ``uses``: the name of the file
        that says how often experts were used.

        :raises DamagedError: it is not what was written. :raises KernelError: it cannot be mapped.
        """
        try:
            self._index = Index.read(file, path.stem, library)
            os.utime(file)  # it is used
        except BaseException:
            os.close(file)
            raise
        self._path = path
        if self.experts is None:
            self._map = WeightMap(file, self._index.begin, threads, library)
        else:
            used = list(_others(self._index.matrices))
            self._map = WeightMap(file, self._index.begin, threads, library, used)
            self.experts.place(self._map.base)
            self._uses = uses
        self._records = dict(self._index.matrices)

    def attach(self, backend: CpuBackend) -> None:
        """Let a forked child of the backend look after the file too."""
        backend.mapped = self._map
        backend.experts = self.experts

    def __getitem__(self, path: str) -> Matrix:
        record = self._records.pop(path)
        before = self._taken
        try:
            layer = path.rpartition(".")[0] if "experts" in record["weight"] else ""
            weight = weight_record.weight_of_record(
                record["weight"], self._ops, partial(self._bound, layer), self._index.tensor
            )
            bias, order = record["bias"], record["order"]
            found = Matrix(
                weight,
                None if bias is None else self._index.tensor(bias),
                None if order is None else self._index.tensor(order),
            )
        except _UNREADABLE as error:
            logger.debug("%s: %s is packed again: %s", self._path, path, error)
            self._taken = before
            raise KeyError(path) from error
        if self._report is not None:
            self._report(self._taken, self._index.begin)
        return found

    def __iter__(self) -> Iterator[str]:
        return iter(self._records)

    def __len__(self) -> int:
        return len(self._records)

    def _bound(self, layer: str, record: Mapping[str, Any]) -> BoundLinear:
        """``layer``: of which the weight is an expert."""
        assert self._map is not None
        at, nbytes, first = record["at"], record["bytes"], record["sum"]
        sums = np.array(self._index.sums[first : first - (-nbytes // PIECE)], np.uint64)
        if not 0 < nbytes <= nbytes + at <= self._index.begin or len(sums) != -(-nbytes // PIECE):
            raise DamagedError("a weight lies outside of the file")
        tensors = {}
        for name, (start, dtype, shape) in record["tensors"].items():
            size = getattr(torch, dtype).itemsize * math.prod(shape)
            if not 0 <= start <= start + size <= nbytes:
                raise DamagedError("a tensor lies outside of its weight")
            tensors[name] = tensor_of(self._map.bytes_at(at + start, size), dtype, tuple(shape))
        later = bool(layer) and self.experts is not None
        check = self._map.check(at, nbytes, sums, ahead=not later)
        if later and self.experts is not None:
            self.experts.know(check, layer)
        self._taken += nbytes
        return bound_of(record, tensors, check, self._ops.context)

    # ---- into a file -----------------------------------------------------------------------------

    def write_with(self, writer: WeightWriter) -> None:
        """Keep what is packed from now on."""
        self._writer = writer

    def _keep(self, path: str, matrix: Matrix) -> None:
        """A matrix that was just bound: others before it are packed by now."""
        writer = self._writer
        if writer is None or path in self._written or id(matrix.weight) in self._kept:
            return
        found: list[tuple[dict[str, Any], Any]] = []

        def packed(bound: BoundLinear) -> dict[str, Any] | None:
            one = record_of(bound)
            if one is None:
                return None
            found.append(one)
            return one[0]

        record = weight_record.record_of(matrix.weight, packed, writer.small)
        if record is None:
            return
        self._kept.add(id(matrix.weight))
        self._written[path] = {
            "weight": record,
            "bias": None if matrix.bias is None else writer.small(matrix.bias),
            "order": None if matrix.order is None else writer.small(matrix.order),
        }
        self._add_waiting()
        self._waiting = found
        if self.drops_experts and isinstance(matrix.weight, ExpertWeights):
            matrix.weight.forget()
            writer.drain(self.alive)

    def _add_waiting(self) -> None:
        assert self._writer is not None
        for record, tensors in self._waiting:
            self._writer.add(record, tensors)
        self._waiting = []

    # ---- both ------------------------------------------------------------------------------------

    def loaded(self, unused: list[str]) -> list[str]:
        """The model is loaded, and packing has ended: the tensors of its files that nothing uses,
        of which ``unused`` were not pulled now."""
        if self._writer is not None:
            self._add_waiting()
            self._writer.finish(self._written, unused)
            self._kept.clear()  # numbers of objects that may end
        if self._map is None:
            return unused
        if self.experts is not None:
            self._open_experts(self.experts)
        self._map.read_ahead(partial(_remove_damaged, self._path))
        if self._report is not None:
            self._report(self._index.begin, self._index.begin)
        left = set(unused)
        return [name for name in self._index.unused if name in left]

    def _open_experts(self, experts: ExpertCache) -> None:
        """:raises KernelError: some are not in the file, or cannot be multiplied from slots."""
        if self._records_of_experts(self._records) or experts.left or not experts.matrices:
            raise KernelError(
                "memory: expected experts that are read from the cache of weights, found some that "
                "it cannot keep, or that have several formats in a layer: give enough memory for "
                "all weights"
            )
        experts.open()
        known = read_uses(self._path.parent, self._uses)
        if known is not None and tuple(map(len, known.chosen)) == experts.experts:
            experts.begin_with(known.shares())

    @staticmethod
    def _records_of_experts(records: Mapping[str, Any]) -> bool:
        return any("experts" in record["weight"] for record in records.values())

    def wait(self) -> None:
        """Until the file is complete, or is given up."""
        if self._writer is not None:
            self._writer.wait(self.alive)

    def __str__(self) -> str:
        if self._map is not None:
            size = format_bytes(self._index.begin)
            if self.experts is not None:
                slots, count = sum(self.experts.slots.values()), self.experts.matrices
                return (
                    f"{size} in {self._path}; {slots} of {count} matrices of experts stay in "
                    f"memory ({format_bytes(self.experts.nbytes)}), others are read for each use"
                )
            if self._map.copied:
                return f"{size} copied from {self._path}: {self._map.copied}"
            return f"{size} mapped from {self._path}, which all processes share"
        if self._writer is not None:
            return self._writer.state
        return f"not used: {self.reason or 'the engine is closed'}"


def weight_store(
    config: RunnerConfig,
    mesh: Mesh,
    checkpoint: Checkpoint,
    ops: Ops,
    *,
    drops_experts: bool = False,
) -> WeightStore:
    """What the cache has for a rank, or a store that fills it, or says why there is none.

    An error never fails the load: the weights are packed then. ``drops_experts``: only the file is
    wanted. If experts do not all stay in memory, a store does not fill the cache.

    :raises CheckpointError: the model's files cannot be read.
    """
    store = WeightStore(ops, checkpoint.on_bytes)
    store.drops_experts = drops_experts
    backends: Sequence[Any] = ops.context.backends
    backend = next((one for one in backends if isinstance(one, CpuBackend)), None)
    values = {**checkpoint.config, **config.hf_overrides}
    if backend is None:
        store.reason = f"only the CPU's kernels have one, not {ops.context.backend_names[0]}"
    elif config.disk_bytes:
        store.reason = "weights that are offloaded to the disk have a file of their own"
    elif architecture(model_type(values)) is None:
        store.reason = "transformers' code runs this model"
    elif not checkpoint.path.exists():
        store.reason = "the model has no file"
    else:
        _find(store, config, mesh, checkpoint, backend)
    return store


def _remove_damaged(path: Path) -> None:
    logger.error("%s is damaged and was removed; load the model again", path)
    with contextlib.suppress(OSError):
        path.unlink()


def _others(matrices: Mapping[str, Any]) -> list[tuple[int, int]]:
    """Where the weights lie that are not experts: their beginnings in the file, and bytes.

    :raises KeyError: it is not what was written, as other errors of :data:`_UNREADABLE` do.
    """

    def parts(record: Mapping[str, Any]) -> Iterator[tuple[int, int]]:
        if "packed" in record:
            yield record["packed"]["at"], record["packed"]["bytes"]
        elif "permuted" in record:
            yield from parts(record["permuted"])
        elif "experts" not in record:
            for part in record["parts"]:
                yield from parts(part)

    return sorted(one for record in matrices.values() for one in parts(record["weight"]))


def _find(
    store: WeightStore,
    config: RunnerConfig,
    mesh: Mesh,
    checkpoint: Checkpoint,
    backend: CpuBackend,
) -> None:
    runtime = backend.runtime
    try:
        folder = weights_folder()
        key = weights_key(checkpoint.path, config, mesh, runtime.level)
        path = folder / f"{key}{WEIGHTS}"
        if _read(store, config, path, checkpoint, backend):
            return
        if config.expert_bytes:
            store.reason = "the file of the cache was removed"
            return
        about = {"model": checkpoint.path.name, "level": runtime.level}
        about["uses"] = _uses_of(config, checkpoint)
        if mesh.size > 1 or mesh.stages > 1:
            about["rank"] = f"{mesh.number + 1} of {mesh.size * mesh.stages}"
        text = json.dumps(about).encode()
        most, waits = config.weight_cache, store.drops_experts
        store.write_with(WeightWriter(folder, key, text, most, runtime.library, waits=waits))
    except (OSError, RuntimeError, NotKept) as error:
        store.reason = str(error)
        logger.debug("the cache of weights is not used: %s", error)


def _uses_of(config: RunnerConfig, checkpoint: Checkpoint) -> str:
    """The name of the file that says how often the model's experts were used."""
    return uses_name(checkpoint.path, config.quantization, config.hf_overrides)


def _read(
    store: WeightStore,
    config: RunnerConfig,
    path: Path,
    checkpoint: Checkpoint,
    backend: CpuBackend,
) -> bool:
    """Whether the weights are taken from the file of the cache.

    :raises OSError: it cannot be opened.
    """
    uses = _uses_of(config, checkpoint) if config.expert_bytes else ""  # 1.2 ms
    if (file := opened(path)) is None:
        return False
    runtime = backend.runtime
    try:
        if config.expert_bytes:
            from sdk.kernels.cpu.expert_cache import ExpertCache

            store.experts = ExpertCache(
                runtime, file, str(path), config.expert_bytes, config.least_experts
            )
        store.read_from(file, path, config.num_threads, runtime.library, uses)
    except _UNREADABLE as error:
        logger.warning("%s is damaged, the weights are packed again: %s", path, error)
        path.unlink(missing_ok=True)
        if store.experts is not None:
            store.experts.close()
            store.experts = None
        return False
    checkpoint.on_bytes = None  # the store reports
    store.attach(backend)
    return True
