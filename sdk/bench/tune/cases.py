"""The layers that `embedlm tune` measures: of one model, or of models of many sizes."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from sdk.kernels.gpu.byte_rows import ByteRows
from sdk.kernels.gpu.tuning import Tiles, Tuning, type_of
from sdk.kernels.operators.ops import Ops
from sdk.kernels.operators.routes import Routes

if TYPE_CHECKING:
    from sdk.bench.gpu.card import Card
    from sdk.kernels.gpu.packing import Packed
    from sdk.models.projections import Linear

#: Rows and columns of the layers of 8B, 1B, 70B and 0.6B models: the most used first.
SHAPES = (
    ((28672, 4096), (4096, 14336), (6144, 4096), (4096, 4096)),
    ((16384, 2048), (2048, 8192), (3072, 2048), (2048, 2048)),
    ((28672, 8192), (8192, 28672)),
    ((6144, 1024), (1024, 3072)),
)
#: Number of experts, experts per token, rows and columns: Qwen3-30B-A3B, Mixtral 8x7B.
MIXTURES = (
    *((128, 8, (1536, 2048)), (128, 8, (2048, 768))),
    *((8, 2, (28672, 4096)), (8, 2, (4096, 14336))),
)
#: What is better must be faster by more than the noise of measuring.
GAIN = 0.98
#: The numbers of tiles that a search tries, in this order.
COORDINATES: dict[str, tuple[int, ...]] = {
    "block_n": (16, 32, 64, 128),
    "split": (1, 2, 3, 4, 6, 8, 12, 16),
    "warps": (1, 2, 4, 8),
    "stages": (1, 2, 3, 4, 5),
}
#: The numbers of tokens, or rows of an expert, that get tiles of their own. Bytes are multiplied as
#: such however many tokens there are; a step has 8,192 at most by default, and from 1,024 on a card
#: is full with any tiles. Their product has no variant for one token.
TOKENS = (1, 4, 8, 16, 32, 64, 128)
EXPERTS_TOKENS = (1, 2, 8, 32, 64, 128)
BYTES_TOKENS = (4, 8, 16, 32, 64, 128, 256, 512, 1024, 4096)
EXPERTS_BYTES_TOKENS = (2, 8, 32, 64, 128, 512)
#: The numbers of tokens that are measured for every format before any others are, with the first
#: of a kind of weights.
FIRST_TOKENS = (1, 16, 64)
#: ``multiply(kernel, packed, out)``, and the number of rows of ``out``.
Product = tuple[Callable[[Any, Any, Tensor], None], int]


@dataclass(frozen=True)
class Case:
    """Weights of one type and shape, packed by their kernel.

    ``tokens``: the numbers of tokens that get separate tiles, each down to the next smaller one.
    ``inputs``, ``outputs``: the types of an engine's inputs and results.
    """

    op: str
    type: str
    shape: tuple[int, int]
    kernel: Any
    packed: Sequence[Any]
    inputs: torch.dtype
    outputs: torch.dtype
    tokens: tuple[int, ...] = TOKENS

    @property
    def first(self) -> Packed:
        packed: Packed = self.packed[0]
        return packed

    @property
    def nbytes(self) -> int:
        """Bytes of one of ``packed``."""
        return self.first.nbytes

    def begins(self, card: Card, tokens: int) -> list[Tiles]:
        """The tiles among which the rule chooses, where the search starts."""
        return card.tuning.choices(self.first, tokens)

    def product(self, card: Card, tokens: int) -> Product:
        x = card.normal(tokens, self.shape[1], dtype=self.inputs)
        return lambda kernel, packed, out: kernel.matmul(packed, x, out), tokens


@dataclass(frozen=True)
class ExpertCase(Case):
    """Experts of one type and shape, of which a token uses ``used``; ``packed`` has a layer's.

    ``tokens`` counts the rows that an expert has on average; 1 means the rows of one token.
    """

    tokens: tuple[int, ...] = EXPERTS_TOKENS
    used: int = 1

    @property
    def first(self) -> Packed:
        packed: Packed = self.packed[0].first
        return packed

    @property
    def nbytes(self) -> int:
        return self.first.nbytes * int(self.packed[0].count)

    def begins(self, card: Card, tokens: int) -> list[Tiles]:
        busy = self.used if tokens == 1 else self.packed[0].count
        choices = card.tuning.choices(self.first, tokens, busy)
        return [tiles._replace(split=max(1, tiles.split // busy)) for tiles in choices]

    def product(self, card: Card, tokens: int) -> Product:
        count = self.packed[0].count
        given = 1 if tokens == 1 else tokens * count // self.used
        routes = routes_like(card, given, count, self.used)
        x = card.normal(given, self.shape[1], dtype=self.inputs)

        def multiply(kernel: Any, packed: Any, out: Tensor) -> None:
            kernel.matmul_routed(packed, x, routes, True, out)

        return multiply, given * self.used


def routes_like(card: Card, tokens: int, count: int, used: int) -> Routes:
    """Routes of this many tokens to ``used`` of ``count`` experts, by random logits."""
    ops = Ops(str(card.device), backends=["gpu"])
    routes = ops.moe.route(card.normal(tokens, count).float(), used)
    ops.close()
    return routes


def cases_of(card: Card, model: str | None) -> Iterator[Case]:
    return _default_cases(card) if model is None else _model_cases(card, model)


def default_makes(card: Card) -> tuple[Callable[[int, int], Any], ...]:
    """Weights of the most common formats, the most used first."""
    from sdk.bench.gpu.weights import affine, blocks, float8, int8

    makes: tuple[Callable[[int, int], Any], ...] = (
        lambda n, k: affine(card, n, k, 4, 128),
        lambda n, k: blocks(card, n, k, "q4_k"),
        lambda n, k: blocks(card, n, k, "q4_0"),
        lambda n, k: float8(card, n, k),
        lambda n, k: int8(card, n, k),
        lambda n, k: blocks(card, n, k, "q6_k"),
        lambda n, k: affine(card, n, k, 8, 128),
        lambda n, k: blocks(card, n, k, "q8_0"),
    )
    return makes[: card.size(len(makes), 1)]


def first_tokens(tokens: Sequence[int]) -> tuple[int, ...]:
    """The numbers of tokens of a case that are measured first."""
    return tuple(sorted({tokens[0], *(m for m in tokens if m in FIRST_TOKENS)}))


def _default_cases(card: Card) -> Iterator[Case]:
    """Breadth first: all formats in the largest shape of an 8B model, then in its others, at the
    first numbers of tokens; experts; the shapes of other models; then the same with all numbers."""
    makes = default_makes(card)
    models = SHAPES if not card.tiny else (((32, 256),),)
    mixtures = MIXTURES if not card.tiny else ((4, 2, (32, 256)),)
    for few in (True, False):
        for number, shapes in enumerate(models):
            for (n, k), make in itertools.product(shapes, makes):
                yield _begun(single_case(card, make, n, k), few)
            if number == 0:
                for (count, used, (n, k)), make in itertools.product(mixtures, makes[:2]):
                    yield _begun(_random_experts(card, partial(make, n, k), count, used), few)


def _begun(case: Case, few: bool) -> Case:
    return replace(case, tokens=first_tokens(case.tokens)) if few else case


def single_case(card: Card, make: Callable[[int, int], Any], n: int, k: int) -> Case:
    """A weight of its own."""
    from sdk.bench.gpu.weights import Weights

    weights = Weights(card, partial(make, n, k))
    # more rows than columns: q, k and v, or gate and up; others add to the residual stream
    outputs = card.activations if n > k else torch.float32
    return _case(weights.kernel, weights.packed, card.activations, outputs)


def _random_experts(card: Card, make: Callable[[], Any], count: int, used: int) -> Case:
    from sdk.kernels.registry import linear_problem

    first = make()
    kernel = card.choose(linear_problem(first, "auto", 8))
    packed = [kernel.pack(first), *(kernel.pack(make()) for _ in range(count - 1))]
    return _expert_case(kernel, packed, card.activations, used)


def _model_cases(card: Card, model: str) -> Iterator[Case]:
    """The model's own layers, grouped by shape."""
    from sdk.api.config import EngineConfig
    from sdk.loading.load import load

    device: Any = "auto" if card.tiny else "cuda"
    config = EngineConfig(model=model, device=device, max_model_len=64, skip_tokenizer_init=True)
    loaded = load(config)
    try:
        mixture = loaded.runner.model.config.experts
        found: dict[tuple[Any, ...], list[Case]] = {}
        for _, linear in loaded.runner.model.linears():
            for case in _parts(linear, mixture.per_token if mixture else 0):
                found.setdefault((case.op, case.type, case.shape), []).append(case)
        for cases in found.values():
            first = cases[0]
            some = cases[: card.copies(first.nbytes)]
            yield replace(first, packed=[case.packed[0] for case in some])
    finally:
        loaded.engine.close()


def _parts(layer: Linear, used: int) -> Iterator[Case]:
    """The parts of a layer that Triton kernels multiply; experts together if possible."""
    from sdk.kernels.gpu.linear import TritonLinear
    from sdk.quant.expert_weights import ExpertWeights
    from sdk.quant.weight import PackedWeight, StackedWeight

    weight, short = layer.weight, layer.ops.activations
    parts = weight.parts if isinstance(weight, StackedWeight) else (weight,)
    bound = [part.bound for part in parts if isinstance(part, PackedWeight)]
    bound = [one for one in bound if isinstance(one.choice.implementation, TritonLinear)]
    if not isinstance(weight, ExpertWeights):
        outputs = short if getattr(layer, "narrow", False) else torch.float32
        for one in bound:
            yield _case(one.choice.implementation, [one.packed], short, outputs)
    elif len(bound) == len(parts) and len({one.problem for one in bound}) == 1:
        packed = [one.packed for one in bound]
        yield _expert_case(bound[0].choice.implementation, packed, short, used)


def _case(kernel: Any, packed: Sequence[Any], inputs: torch.dtype, outputs: torch.dtype) -> Case:
    packed = [getattr(one, "own", one) for one in packed]  # a library may have the weight too
    first, op = packed[0], kernel.op_of(packed[0])
    tokens = BYTES_TOKENS if isinstance(first, ByteRows) else TOKENS
    return Case(op, type_of(first), first.shape, kernel, packed, inputs, outputs, tokens)


def _expert_case(kernel: Any, packed: Sequence[Any], short: torch.dtype, used: int) -> Case:
    first = packed[0]
    op = f"{kernel.op_of(first)}_experts"
    group = kernel.group(packed)
    tokens = EXPERTS_BYTES_TOKENS if isinstance(first, ByteRows) else EXPERTS_TOKENS
    return ExpertCase(
        op, type_of(first), first.shape, kernel, [group], short, short, tokens, used=used
    )


def neighbours(case: Case, tokens: int, tiles: Tiles, name: str) -> list[list[Tiles]]:
    """The tiles that differ from these in one number alone: those above and those below, nearest
    first."""
    now = getattr(tiles, name)
    values = [x for x in COORDINATES[name] if sensible(case, tokens, name, x)]
    above, below = [x for x in values if x > now], [x for x in values[::-1] if x < now]
    return [[tiles._replace(**{name: x}) for x in side] for side in (above, below)]


def sensible(case: Case, tokens: int, name: str, value: int) -> bool:
    """Whether this value can make a difference."""
    if name == "split":
        return value <= case.first.units
    return not (name == "stages" and tokens == 1)


def kernel_with(case: Case, tokens: int, tiles: Tiles) -> Any:
    """The case's kernel, with these tiles alone."""
    only = {(case.op, case.type, *case.shape): [(tokens, tiles)]}
    never = 1 << 30
    return case.kernel.tuned(Tuning(1, dense_from=never, experts_dense_from=never, table=only))
