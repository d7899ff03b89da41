"""Adapters of a loaded model: from matrices by name to the tables of its projections.

A projection may multiply with several matrices of the checkpoint (q, k and v), a matrix may be
stored joined with others, and a rank may have only a part of it. :class:`ModelAdapters` knows all
of this from ``Projection.parts``.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from difflib import get_close_matches

from sdk.kernels.dataclass import dataclass
from sdk.kernels.lazy_torch import Tensor, torch
from sdk.kernels.operators.low_rank import AdapterTable, Factors, Shape, Update, factor_memory
from sdk.kernels.operators.ops import Ops
from sdk.models.decoder import CausalLM, Decoder
from sdk.models.embedding import Embedding
from sdk.models.parts import Part
from sdk.models.projections import ExpertProjection, Projection
from sdk.quant.adapter import Adapter, LowRank
from sdk.quant.errors import AdapterError

#: The path of the embedding in an :class:`~sdk.quant.adapter.Adapter`.
EMBEDDING = "model.embed_tokens"


class _Target:
    """A projection or the embedding with its table."""

    def __init__(self, layer: Projection | Embedding, table: AdapterTable) -> None:
        self.layer = layer
        self.table = table
        layer.adapters = table


@dataclass(frozen=True, eq=False)
class PackedAdapter:
    """An adapter in the memory layout of one rank's kernels.

    ``nbytes``: the memory it takes until it is in no slot and nothing refers to it.
    """

    name: str
    nbytes: int
    memory: Tensor
    updates: Mapping[int, Update]  # by index of the target


class ModelAdapters:
    """The adapters of one rank's model, in ``slots`` slots, which are empty at first.

    Create it before steps are recorded: only then are adapters part of them. :meth:`pack` does the
    work and may run in any thread while the model runs. :meth:`write` and :meth:`clear` only
    exchange pointers; they must run between two steps, and no request may use the slot.
    ``max_rank``: the largest rank of an adapter's matrices. ``dtype``: of factors in memory
    (default: chosen for the device); int8 only on a CPU.
    """

    def __init__(
        self,
        model: CausalLM,
        ops: Ops,
        slots: int,
        max_rank: int = 64,
        dtype: torch.dtype | None = None,
    ) -> None:
        if slots < 1 or max_rank < 1:
            raise ValueError(f"adapters: expected slots and ranks, found {slots}, {max_rank}")
        self.slots, self.max_rank = slots, max_rank
        self._ops, self._dtype = ops, dtype
        self._targets: list[_Target] = []
        self._parts: dict[str, tuple[int, Part]] = {}
        self._experts: list[str] = []
        #: See :meth:`features`: the matrices that only other stages have.
        self.elsewhere: Mapping[str, tuple[tuple[int, int], int]] = {}
        for path, linear in model.linears():
            if isinstance(linear, ExpertProjection):
                self._experts.append(path.rpartition(".")[0])
            elif isinstance(linear, Projection) and linear.parts:
                self._add(linear, linear.weight.shape, linear.parts)
        if isinstance(model, Decoder) and model.embedding is not None:
            embedding, config = model.embedding, model.config
            count, width = config.vocab_size, embedding.weight.shape[1]  # whole on every rank
            shape = (width, config.vocab_size)  # of ids, which are one-hot, to rows
            part = Part(EMBEDDING, shape, 0, ((0, width),), (0, count))
            self._add(embedding, (width, count), [part])

    def _add(
        self, layer: Projection | Embedding, shape: tuple[int, int], parts: Sequence[Part]
    ) -> None:
        for part in parts:
            self._parts[part.path] = (len(self._targets), part)
        (out, inputs), of_ids = shape, isinstance(layer, Embedding)
        whole = Shape(self.slots, inputs, out, len(parts), self.max_rank, of_ids)
        self._targets.append(_Target(layer, self._ops.adapter_table(whole, self._dtype)))

    @property
    def matrices(self) -> dict[str, tuple[int, int]]:
        """The matrices that an adapter may change, by path: the shapes ``(out, in)`` of the whole
        matrices; of the embedding ``(vocab, hidden)``."""
        found = {path: shape for path, (shape, _) in self.elsewhere.items()}
        found |= {path: part.shape for path, (_, part) in self._parts.items()}
        if EMBEDDING in found:
            found[EMBEDDING] = found[EMBEDDING][::-1]
        return found

    @property
    def _value_bytes(self) -> int:
        dtype: torch.dtype = self._targets[0].table.dtype
        return dtype.itemsize

    @property
    def features(self) -> dict[str, tuple[tuple[int, int], int]]:
        """This rank's matrices by path: the shape of the whole matrix, and how many of its input
        and output features are here."""
        return {
            path: (part.shape, part.columns[1] + sum(count for _, count in part.rows))
            for path, (_, part) in self._parts.items()
        }

    def nbytes_elsewhere(self, adapter: Adapter) -> int:
        """About how many bytes the adapter will take on the ranks of other stages."""
        total = 0
        for path, matrix in adapter.matrices.items():
            if path in self.elsewhere:
                _, features = self.elsewhere[path]
                total += self._value_bytes * len(matrix.a) * features
        return total

    def nbytes(self, adapter: Adapter) -> int:
        """Bytes that the adapter will take on this rank.

        :raises AdapterError: it does not fit the model.
        """
        return sum(self._sizes(self._split(adapter)).values())

    def pack(self, adapter: Adapter) -> PackedAdapter:
        """Check an adapter and convert this rank's part of it.

        :raises AdapterError: it names a matrix that the model does not have, that cannot have an
            adapter, or a shape that does not fit.
        :raises KernelError: no memory is left.
        """
        split = self._split(adapter)
        for path, matrix in adapter.matrices.items():
            for name, tensor in matrix._asdict().items():
                if tensor is not None and not bool(tensor.isfinite().all()):
                    where = f"adapter {adapter.name!r}, {path}"
                    raise AdapterError(f"{where}: {name} contains numbers that are not finite")
        sizes = self._sizes(split)
        whole = memory = factor_memory(sum(sizes.values()), self._ops.device)
        updates: dict[int, Update] = {}
        for index, (factors, bias) in split.items():
            own, memory = memory[: sizes[index]], memory[sizes[index] :]
            updates[index] = self._targets[index].table.pack(factors, bias, own)
        if memory.is_cuda:  # the steps may run on another stream than this thread's
            torch.cuda.current_stream(memory.device).synchronize()
        return PackedAdapter(adapter.name, sum(sizes.values()), whole, updates)

    def write(self, slot: int, packed: PackedAdapter) -> None:
        """Put an adapter into a slot, in place of what was there."""
        if self._ops.card is not None:  # the factors were packed in another stream
            self._ops.card.keep(packed.memory)
        for index, target in enumerate(self._targets):
            target.table.write(slot, packed.updates.get(index))

    def clear(self, slot: int) -> None:
        """Empty a slot."""
        for target in self._targets:
            target.table.write(slot, None)

    def _split(self, adapter: Adapter) -> dict[int, tuple[list[Factors], Tensor | None]]:
        """This rank's factors and biases of each target, by index."""
        if not adapter.matrices:
            raise AdapterError(
                f"adapter {adapter.name!r}: expected at least one matrix, found none"
            )
        found: dict[int, tuple[list[Factors], Tensor | None]] = {}
        for path, matrix in adapter.matrices.items():
            where = f"adapter {adapter.name!r}, {path}"
            if path in self.elsewhere:
                continue
            if path not in self._parts:
                raise AdapterError(f"{where}: {self._why_missing(path)}")
            index, part = self._parts[path]
            if path == EMBEDDING:
                matrix = _of_ids(where, matrix)
            _check(where, path, matrix, part)
            if len(matrix.a) > self.max_rank:
                raise AdapterError(
                    f"{where}: expected a rank of at most {self.max_rank}, found {len(matrix.a)}"
                )
            factors, bias = found.setdefault(index, ([], None))
            columns = slice(part.columns[0], sum(part.columns))
            factors.append(Factors(matrix.a[:, columns], _rows(matrix.b, part), part.first))
            if matrix.bias is not None:
                own = _rows(matrix.bias, part)
                found[index] = factors, self._joined_bias(index, part, own, bias)
        return found

    def _joined_bias(
        self, index: int, part: Part, bias: Tensor, others: Tensor | None
    ) -> Tensor | None:
        """``others``, what the target's bias changes by, with a part's new ``bias``."""
        linear = self._targets[index].layer
        assert isinstance(linear, Projection)
        if linear.part_of_sum and linear.mesh.rank:
            return None  # the ranks' results get summed
        change = torch.zeros(linear.weight.shape[0]) if others is None else others
        own = slice(part.first, part.first + len(bias))
        change[own] += bias.float().cpu()
        if linear.bias is not None:
            change[own] -= linear.bias[own].cpu()
        return change

    def _sizes(self, split: Mapping[int, tuple[list[Factors], Tensor | None]]) -> dict[int, int]:
        """Bytes of each target's update."""
        return {
            index: self._targets[index].table.nbytes(factors, bias=bias is not None)
            for index, (factors, bias) in split.items()
        }

    def _why_missing(self, path: str) -> str:
        if any(path.startswith(experts) for experts in self._experts):
            return "adapters of experts are not supported"
        if path == EMBEDDING:
            return "adapters of the embedding are not supported for this model"
        near = get_close_matches(path, self._parts, 1)
        example = near[0] if near else next(iter(self._parts), "none")
        return f"the model has no such matrix that an adapter can change; it has {example}, ..."


def _rows(x: Tensor, part: Part) -> Tensor:
    """The rows of ``x`` that a projection has, in its order."""
    rows = [x[start : start + count] for start, count in part.rows]
    found = torch.cat(rows) if len(rows) > 1 else rows[0]
    return found if part.order is None else found[part.order]


def _of_ids(where: str, matrix: LowRank) -> LowRank:
    """The factors of an embedding as those of a product with one-hot ids."""
    if matrix.bias is not None:
        raise AdapterError(f"{where}: an embedding has no bias, found one")
    return LowRank(matrix.b.t(), matrix.a.t())


def _check(where: str, path: str, matrix: LowRank, part: Part) -> None:
    """:raises AdapterError: unless the factors fit the matrix."""
    a, b, bias = matrix
    out, inputs = part.shape
    rank = a.shape[0] if a.dim() == 2 else 0
    fits = rank >= 1 and a.shape == (rank, inputs) and b.shape == (out, rank)
    if not fits:
        names = ("b", "a") if path == EMBEDDING else ("a", "b")
        expected = f"[r, {inputs}] and [{out}, r]"
        found = f"{list(a.shape)} and {list(b.shape)}"
        if path == EMBEDDING:
            expected = f"[{inputs}, r] and [r, {out}]"
            found = f"{list(a.shape)[::-1]} and {list(b.shape)[::-1]}"
        raise AdapterError(
            f"{where}: expected {names[0]} and {names[1]} of shapes {expected}, found {found}"
        )
    if bias is not None and bias.shape != (out,):
        raise AdapterError(f"{where}: expected a bias [{out}], found {list(bias.shape)}")
    for name, tensor in (("a", a), ("b", b), ("bias", bias)):
        if tensor is not None and not tensor.is_floating_point():
            raise AdapterError(f"{where}: expected floats in {name}, found {tensor.dtype}")
