"""Pulls what a model is built from out of a checkpoint.

``Source`` narrows each matrix to this rank's part, fuses projections of the same input (q, k and v;
gate and up) and packs the result for its kernel at once, so that at most one matrix exists twice
while a model loads.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from sdk.kernels.lazy_torch import Tensor, torch
from sdk.kernels.operators.norm import Norm
from sdk.kernels.operators.ops import Ops
from sdk.kernels.weights.layouts import Dense
from sdk.models.architecture import Architecture, architecture
from sdk.models.configs.config import ModelConfig
from sdk.models.embedding import Embedding
from sdk.models.experts.parallel import ExpertShare
from sdk.models.parallel import HeadShard, Mesh
from sdk.models.parts import Matrix, Part, Tensors, joined_parts, offsets_of, whole
from sdk.models.projections import ExpertProjection, Head, Linear, Projection
from sdk.models.rope import Rope, RopeSpec
from sdk.quant.checkpoint import Checkpoint
from sdk.quant.errors import AlignmentError, CheckpointError
from sdk.quant.expert_weights import ExpertWeights
from sdk.quant.stored import by_row
from sdk.quant.weight import Side, Weight, concat, weight_of

#: Prefixes of the body and of the head: of plain models, then the two of multimodal ones.
ROOTS = (
    ("model.", ""),
    ("language_model.model.", "language_model."),
    ("model.language_model.", ""),
)
_QKV = ("q_proj", "k_proj", "v_proj")
#: Activation bits of the projections that matter most per multiplication. Quantizing activations to
#: 8 bits moves SmolLM2's logits by 0.034 of their norm, 0.020 of it through q, k and v (an eighth
#: of the work of a layer), 0.018 through the head, which runs for sampled tokens only.
ACCURATE = 16


class Source:
    """One rank's view of a checkpoint, from which a model pulls its weights.

    ``layers``: the numbers of those that the rank's stage runs (default: all). ``shared``: what a
    model of another engine with the same weights has; nothing is pulled then. ``own``: what the
    model is, if its type does not say it.
    Every method raises :class:`CheckpointError` for a tensor that is missing or has a wrong shape,
    and :class:`AlignmentError` for one that cannot be split over the ranks, with its name.
    ``linears`` collects all projections with their paths.
    """

    def __init__(
        self,
        checkpoint: Checkpoint,
        config: ModelConfig,
        mesh: Mesh,
        ops: Ops,
        max_model_len: int,
        layers: range | None = None,
        shared: Tensors | None = None,
        own: Architecture | None = None,
    ) -> None:
        self.checkpoint = checkpoint
        self._shared = shared or Tensors({}, {})
        self.vectors: dict[str, Tensor] = {}
        self.config = config
        self.mesh = mesh
        self.ops = ops
        self.max_model_len = max_model_len
        self.layers = range(config.num_layers) if layers is None else layers
        self.heads = mesh.heads(config.num_heads, config.num_kv_heads)
        self.linears: list[tuple[str, Linear]] = []
        self._rules = own or architecture(config.model_type) or Architecture(config.model_type)
        found = (root for root in ROOTS if checkpoint.has(f"{root[0]}embed_tokens"))
        self._body, self._outer = next(found, ROOTS[0])

    def _name(self, path: str) -> str:
        """The checkpoint's name of ``model.…`` or ``lm_head``."""
        if path.startswith("model."):
            return self._body + path.removeprefix("model.")
        return self._outer + path

    def pull(self, path: str, shape: tuple[int, int], *, more_rows: bool = False) -> Weight:
        """A matrix as the checkpoint has it. ``more_rows``: it may have more than those of
        ``shape``."""
        weight = self.checkpoint.weight(self._name(path))
        rows, columns = weight.shape
        if columns != shape[1] or rows < shape[0] or (rows > shape[0] and not more_rows):
            raise CheckpointError(
                f"{self._name(path)}: expected shape {list(shape)}, found {list(weight.shape)}"
            )
        return weight

    def _cut(self, path: str, weight: Weight, side: Side, start: int, count: int) -> Weight:
        if (start, count) == (0, weight.shape[0 if side == "out" else 1]):
            return weight
        try:
            return weight.narrow(side, start, count)
        except AlignmentError as error:
            raise AlignmentError(
                f"{self._name(path)}, tensor parallel size {self.mesh.size}: {error}"
            ) from error

    def heads_of(self, layer: int) -> HeadShard:
        """This rank's heads of a layer."""
        c = self.config
        return self.mesh.heads(c.heads_of(layer), c.attention_of(layer).kv_heads)

    def has(self, path: str) -> bool:
        """Whether the checkpoint has a tensor or a matrix."""
        return self.checkpoint.has(self._name(path))

    def vector(self, path: str, *shape: int | None) -> Tensor:
        """A plain tensor, float32; ``[1]`` may lack its dimension in the file. ``None``: any."""
        found = self._shared.vectors.get(path)
        if found is None:
            tensor = self.checkpoint.tensor(self._name(path)).to(torch.float32)
            tensor = tensor if tensor.dim() else tensor.reshape(1)
            # ERNIE has the bias of a router as one row.
            if tensor.dim() == 2 and len(tensor) == 1 and len(shape) == 1:
                tensor = tensor[0]
            sizes = list(tensor.shape)
            if len(sizes) != len(shape) or sizes != [
                w or n for w, n in zip(shape, sizes, strict=True)
            ]:
                name = self._name(path)
                raise CheckpointError(f"{name}: expected shape {list(shape)}, found {sizes}")
            found = tensor.to(self.ops.device)
        self.vectors[path] = found
        return found

    def name_of(self, path: str) -> str:
        """What the checkpoint calls a tensor, for messages."""
        return self._name(path)

    def stored(self, path: str) -> Tensor:
        """A tensor as the checkpoint has it, on the host, which the model does not keep."""
        return self.checkpoint.tensor(self._name(path))

    def plain(self, path: str) -> Tensor:
        """A plain tensor of any shape, float32, on the host."""
        found = self._shared.vectors.get(path)
        if found is None:
            found = self.checkpoint.tensor(self._name(path)).to(torch.float32)
        self.vectors[path] = found
        return found

    def norm(self, path: str, size: int | None = None, eps: float | None = None) -> Norm:
        """One of the model's norms, over ``size`` (default: hidden) features. ``eps``: its own."""
        size, kind = size or self.config.hidden_size, self._rules.layer.norm
        weight = self.vector(f"{path}.weight", size) if kind.weight else None
        offset = self._rules.tensors.norm_offset(path)
        if weight is not None and offset:
            weight = weight + offset
        bias = self.vector(f"{path}.bias", size) if kind.bias else None
        return Norm(weight, eps or self.config.norm_eps, bias, kind.centred)

    def rope(self, spec: RopeSpec) -> Rope:
        """The angles of a rotary embedding for requests of up to ``max_model_len`` tokens."""
        return Rope(spec, self.max_model_len, self.ops.device)

    def _bias(self, path: str, size: int, required: bool) -> Tensor | None:
        """A bias that the config requires or that the file has anyway.

        GGUF files have no key for biases: any subset of them is legal, as in llama.cpp.
        """
        required = required and self.checkpoint.format != "gguf"
        if not required and not self.checkpoint.has(self._name(f"{path}.bias")):
            return None
        return self.vector(f"{path}.bias", size)

    def _bound(
        self,
        path: str,
        pull: Callable[[], Matrix],
        parts: Sequence[Part],
        *,
        reduce: bool = False,
        narrow: bool = False,
        activation_bits: int = 8,
    ) -> Projection:
        matrix = self.matrix_of(path, pull, activation_bits)
        if matrix.order is not None:  # that of the products, after what adapters add to them
            parts = [part._replace(order=None) for part in parts]
        linear = Projection(matrix, self.mesh, self.ops, parts=parts, reduce=reduce, narrow=narrow)
        self.linears.append((path, linear))
        return linear

    def matrix_of(self, path: str, pull: Callable[[], Matrix], activation_bits: int = 8) -> Matrix:
        """A matrix for this engine's operators: pulled and bound, or shared."""
        found = self._shared.matrices.get(path)
        if found is not None:
            return found._replace(weight=found.weight.shared(self.ops))
        pulled = pull()
        pulled.weight.bind(self.ops, activation_bits)
        self._shared.keep(path, pulled)
        return pulled

    def columns(
        self,
        path: str,
        fused: str,
        parts: Sequence[tuple[str, int, int, int]],
        *,
        bias: bool = False,
        accurate: bool = False,
        order: Tensor | None = None,
        inputs: int | None = None,
    ) -> Projection:
        """Projections of one input, of ``inputs`` features (default: hidden), as one
        column-parallel projection.

        ``parts``: ``(name, out_features, start, count)`` with this rank's range of each, or several
        ranges one after the other. A file that holds them joined under ``fused`` (Phi-3) gives the
        same result. ``accurate``: with ``ACCURATE`` activation bits (see :meth:`Ops.linear`).
        ``order``, int64: feature j of the result is feature ``order[j]`` of this rank's parts one
        after another, which is in the same part.
        """
        whole, hidden = f"{path}.{fused}", inputs or self.config.hidden_size

        def pull() -> Matrix:
            found = self._columns(path, fused, parts, hidden, bias)
            return found if order is None else found.ordered(order)

        return self._bound(
            whole,
            pull,
            joined_parts(path, whole, parts, hidden, order),
            narrow=True,
            activation_bits=ACCURATE if accurate else 8,
        )

    def column_halves(
        self,
        path: str,
        fused: str,
        parts: Sequence[tuple[str, int, int, int]],
        *,
        bias: bool = False,
    ) -> tuple[Projection, Projection]:
        """Like :meth:`columns`, for an input of two joined vectors of the hidden size each.

        There is one projection for each of them, because no operator joins vectors. The sum of
        their results is that of the whole. The first one has the bias.
        """
        hidden = self.config.hidden_size
        weight, joined, _ = self._columns(path, fused, parts, 2 * hidden, bias)
        first = Matrix(weight.narrow("in", 0, hidden), joined)
        second = Matrix(weight.narrow("in", hidden, hidden), None)
        return (
            self._bound(f"{path}.{fused}", lambda: first, (), activation_bits=ACCURATE),
            self._bound(f"{path}.{fused}.second", lambda: second, (), activation_bits=ACCURATE),
        )

    def _columns(
        self,
        path: str,
        fused: str,
        parts: Sequence[tuple[str, int, int, int]],
        inputs: int,
        bias: bool,
    ) -> Matrix:
        """This rank's part of the matrix and of the bias of :meth:`columns`."""
        whole = f"{path}.{fused}"
        offsets, total = offsets_of(parts)
        weights: list[Weight] = []
        biases: list[Tensor | None] = []
        if self.checkpoint.has(self._name(whole)):
            weight = self.pull(whole, (total, inputs))
            joined = self._bias(whole, total, bias)
            if sum(count for *_, count in parts) == total:
                return Matrix(weight, joined)
            for name, _, start, count in parts:
                first = offsets[name] + start
                weights.append(self._cut(whole, weight, "out", first, count))
                biases.append(None if joined is None else joined[first : first + count])
        else:
            for name, size, start, count in parts:
                part = f"{path}.{name}"
                weights.append(
                    self._cut(part, self.pull(part, (size, inputs)), "out", start, count)
                )
                gate = fused == "qkv_proj" and name not in _QKV  # gates of attention have none
                own = self._bias(part, size, bias and not gate)
                biases.append(None if own is None else own[start : start + count])
        present = [b for b in biases if b is not None]
        if present:  # a projection without a bias gets zeros where another one has a bias
            present = [
                torch.zeros(w.shape[0], device=self.ops.device) if b is None else b
                for b, w in zip(biases, weights, strict=True)
            ]
        return Matrix(concat(weights), torch.cat(present) if present else None)

    def row(
        self,
        path: str,
        in_features: int,
        start: int,
        count: int,
        *,
        bias: bool = False,
        reduce: bool = True,
    ) -> Projection:
        """A row-parallel projection to the hidden size: this rank's inputs, summed over ranks.

        Without ``reduce`` the caller sums, so only rank 0 has the bias then.
        """
        hidden = self.config.hidden_size

        def pull() -> Matrix:
            weight = self.pull(path, (hidden, in_features))
            weight = self._cut(path, weight, "in", start, count)
            found = self._bias(path, hidden, bias)
            return Matrix(weight, found if reduce or self.mesh.rank == 0 else None)

        part = Part(path, (hidden, in_features), 0, ((0, hidden),), (start, count))
        linear = self._bound(path, pull, (part,), reduce=reduce)
        linear.part_of_sum = True
        return linear

    def summed_rows(
        self,
        path: str,
        name: str,
        shape: tuple[int, int],
        rows: tuple[int, int],
        columns: tuple[int, int],
    ) -> Projection:
        """Like :meth:`row`, to ``rows`` of a matrix of ``shape`` that several projections have
        parts of: ``(start, count)``, as this rank's ``columns``. ``name``: of this one, beside
        ``path``. With ``ACCURATE`` activation bits."""

        def pull() -> Matrix:
            weight = self._cut(path, self.pull(path, shape), "out", *rows)
            return Matrix(self._cut(path, weight, "in", *columns), None)

        where = f"{path.rpartition('.')[0]}.{name}"
        part = Part(path, shape, 0, (rows,), columns)
        linear = self._bound(where, pull, (part,), reduce=True, activation_bits=ACCURATE)
        linear.part_of_sum = True
        return linear

    def matrix(self, path: str, out_features: int, in_features: int) -> Projection:
        """A projection that every rank has as a whole, with a bias if the file has one."""

        def pull() -> Matrix:
            weight = self.pull(path, shape)
            return Matrix(weight, self._bias(path, out_features, False))

        shape = (out_features, in_features)
        return self._bound(path, pull, (whole(path, shape),), activation_bits=ACCURATE)

    def given(self, path: str, values: Callable[[], Tensor]) -> Projection:
        """Like :meth:`matrix`, for a matrix ``[out, in]`` that is computed from tensors."""

        def pull() -> Matrix:
            matrix = values()
            return Matrix(weight_of(Dense(matrix)), self._bias(path, len(matrix), False))

        return self._bound(path, pull, (), activation_bits=ACCURATE)

    def expert_share(self, path: str) -> ExpertShare | None:
        """This rank's experts of the layer ``path``; ``None``: it has a part of each one."""
        spec = self.config.experts
        if self.mesh.redundant_experts is None or spec is None:
            return None
        return ExpertShare.of_rank(self.mesh, spec.count, layer=int(path.split(".")[2]))

    def expert_columns(
        self, path: str, names: tuple[str, ...], experts: Sequence[int], start: int, count: int
    ) -> ExpertProjection:
        """Projections of one input for each of ``experts``: a range of the outputs, joined."""
        fused = "_".join(name.removesuffix("_proj") for name in names) + "_proj"
        loaded = (self.expert_column(path, names, expert, start, count) for expert in experts)
        return self._bound_experts(f"{path}.{fused}", loaded, by_token=True)

    def expert_column(
        self, path: str, names: tuple[str, ...], expert: int, start: int, count: int
    ) -> tuple[Weight, Tensor | None]:
        """What one expert has of :meth:`expert_columns`: its weight and its bias."""
        spec = self.config.experts
        assert spec is not None
        hidden = spec.inputs or self.config.hidden_size
        parts = [f"{path}.{expert}.{name}" for name in names]
        whole = [self.pull(part, (spec.width, hidden)) for part in parts]
        cut = [
            self._cut(part, weight, "out", start, count)
            for part, weight in zip(parts, whole, strict=True)
        ]
        weight = concat(cut)
        weight.bind(self.ops)
        biases = [self._bias(part, spec.width, False) for part in parts]
        present = [bias[start : start + count] for bias in biases if bias is not None]
        if len(present) not in (0, len(parts)):
            name = self._name(parts[0])
            raise CheckpointError(f"{name}: expected a bias of all parts or of none")
        return weight, torch.cat(present) if present else None

    def expert_rows(
        self, path: str, name: str, experts: Sequence[int], start: int, count: int
    ) -> ExpertProjection:
        """The projection back to the hidden size for each of ``experts``: a range of the inputs."""
        loaded = (self.expert_row(path, name, expert, start, count) for expert in experts)
        return self._bound_experts(f"{path}.{name}", loaded, by_token=False)

    def expert_row(
        self, path: str, name: str, expert: int, start: int, count: int
    ) -> tuple[Weight, Tensor | None]:
        """What one expert has of :meth:`expert_rows`: its weight and its bias.

        Results of parts of an expert get summed, so only rank 0 has the bias then.
        """
        spec = self.config.experts
        assert spec is not None
        hidden = spec.inputs or self.config.hidden_size
        part = f"{path}.{expert}.{name}"
        weight = self._cut(part, self.pull(part, (hidden, spec.width)), "in", start, count)
        weight.bind(self.ops)
        bias = self._bias(part, hidden, False)
        return weight, bias if self.mesh.rank == 0 or count == spec.width else None

    def _bound_experts(
        self, path: str, loaded: Iterable[tuple[Weight, Tensor | None]], *, by_token: bool
    ) -> ExpertProjection:
        """``loaded``: the weight and the bias of each expert; all have a bias or none."""

        def pull() -> Matrix:
            each = list(loaded)
            present = [bias for _, bias in each if bias is not None]
            if len(present) not in (0, len(each)):
                raise CheckpointError(
                    f"{self._name(path)}: expected a bias for every expert or none"
                )
            weight = ExpertWeights([own for own, _ in each])
            return Matrix(weight, torch.stack(present) if present else None)

        weight, joined, _ = self.matrix_of(path, pull)
        assert isinstance(weight, ExpertWeights)
        linear = ExpertProjection(weight, joined, self.ops, by_token=by_token)
        self.linears.append((path, linear))
        return linear

    def head(self, embedding: Embedding | None) -> Head:
        """The last matrix of the model. If tied, it shares the weight of ``embedding``; ``None``:
        the embedding is in another stage."""
        if not self.config.tie_word_embeddings:
            weight = self._by_token("lm_head")
        else:
            weight = embedding.weight if embedding else self._by_token("model.embed_tokens")
        width = self.config.embedding_width
        shape = (self.config.vocab_size, width)
        part = Part("lm_head", shape, 0, (self._tokens,), (0, width))
        bias: Tensor | None = None
        if self.config.head_bias:
            start, count = self._tokens
            bias = self.vector("lm_head.bias", self.config.vocab_size)[start : start + count]
        return Head(self._bound("lm_head", lambda: Matrix(weight, bias), (part,)), self.config)

    def embedding(self, path: str = "model.embed_tokens") -> Embedding:
        """The first matrix of the model."""
        weight, (start, _) = self._by_token(path), self._tokens
        found = Embedding(weight, start, self.config, self.mesh, self.ops)
        if self._rules.embedding.unweighted_norm:
            found.norm = Norm(None, self.config.norm_eps)
        return found

    def table(
        self,
        path: str,
        rows: int,
        first: int = 0,
        width: int | None = None,
        plus: tuple[str, int] | None = None,
    ) -> Weight:
        """``rows`` rows from ``first`` on of a table ``[first + rows, width]``, on all ranks.
        ``width``: of one whose rows may stay in the file, if every token has one, and which may
        have more of them (Gemma 4's ``vocab_size_per_layer_input``); default: features of
        what is added to embeddings of tokens. ``plus``: another table and its rows, whose first
        one is added to all of these."""

        def pull() -> Matrix:
            if width is not None:
                weight = self.pull(path, (first + rows, width), more_rows=True)
                return Matrix(weight if self.config.layer_rows else by_row(weight), None)
            tokens_alone = self._rules.embedding.projected == "tokens"
            size = self.config.hidden_size if tokens_alone else self.config.embedding_width
            weight = self._cut(path, self.pull(path, (first + rows, size)), "out", first, rows)
            if plus is not None:
                row = self.pull(plus[0], (plus[1], size)).dequantize()[:1]
                weight = weight_of(Dense(weight.dequantize() + row))
            return Matrix(weight, None)

        return self.matrix_of(path, pull, ACCURATE).weight

    @property
    def _tokens(self) -> tuple[int, int]:
        """This rank's range ``(start, count)`` of the vocabulary."""
        return self.mesh.vocabulary(self.config.vocab_size)

    def _by_token(self, path: str) -> Weight:
        """This rank's rows of a matrix with one row for each token."""

        def pull() -> Matrix:
            weight = self.pull(path, (self.config.vocab_size, self.config.embedding_width))
            return Matrix(self._cut(path, weight, "out", *self._tokens), None)

        return self.matrix_of(path, pull, ACCURATE).weight
