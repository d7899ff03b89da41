"""Kernels of libraries beside ours: what `embedlm tune` measures for the section ``libraries``.

A library's kernel is entered only if its result was right and it is faster from some number of
tokens on. Where it is not, the table says why (``slower``).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from sdk.api.errors import SdkError
from sdk.bench.tune.cases import GAIN, MIXTURES, Case, ExpertCase, default_makes, routes_like
from sdk.kernels.errors import KernelError
from sdk.kernels.gpu.byte_rows import ByteRows
from sdk.kernels.gpu.humming import HummingWeight, installed
from sdk.kernels.gpu.tuning import Tuning
from sdk.kernels.registry import linear_problem

if TYPE_CHECKING:
    from sdk.bench.gpu.card import Card

#: Numbers of tokens for which both are measured; for experts, rows of one on average; for attention
#: queries of a prompt.
PRODUCT_TOKENS = (64, 256, 1024, 4096)
HUMMING_TOKENS = (4, 16, 64, 256, 1024)
EXPERT_ROWS = (16, 64, 256, 512)
QUERIES = (512, 1024, 2048, 4096)
#: Types of pages and sizes of heads, the most used first: float16 is an engine's default.
HEADS = (("float16", 128), ("bfloat16", 128), ("float16", 64))
Call = Callable[[], Any]


class Unavailable(SdkError):
    """A library does not run here, or not for such a problem."""


@dataclass(frozen=True)
class Contest:
    """A library's kernel and ours, which compute the same.

    ``fields``: those by which an entry of the library is found. ``check`` raises if the library is
    wrong. ``calls`` of a number of tokens: ours, and the library's. ``graph``: whether an engine
    replays them from graphs, else the host launches them one by one.
    """

    library: str
    fields: Mapping[str, Any]
    tokens: tuple[int, ...]
    check: Callable[[], None]
    calls: Callable[[int], tuple[Sequence[Call], Sequence[Call]]]
    graph: bool = True

    @property
    def key(self) -> tuple[Any, ...]:
        """See ``Tuning.libraries``."""
        return (self.library, *self.fields.values())


def from_tokens(card: Card, contest: Contest) -> int | str:
    """From how many tokens on the library is faster, or why it is not.

    The largest number comes first, so that a library that is slower even there takes little time.
    """
    try:
        contest.check()
        best = 0
        for tokens in reversed(contest.tokens[: card.size(len(contest.tokens), 1)]):
            ours, theirs = contest.calls(tokens)
            own = card.time(ours, graph=contest.graph)
            if card.time(theirs, graph=contest.graph) >= own * GAIN:
                return best or f"not faster with {tokens}"
            best = tokens
        return best
    except torch.cuda.OutOfMemoryError:
        raise
    except Exception as error:
        card.synchronize()  # raises if the card itself was lost
        return f"{type(error).__name__}: {str(error).strip().partition(chr(10))[0]}"[:200]


def with_contests(
    card: Card, cases: Iterator[Case], model: str | None, measured: Callable[[], Tuning]
) -> Iterator[Case | Contest]:
    """``cases``, each before the libraries that multiply its weights; libraries for what has no
    tiles come when all formats have been measured once. ``measured``: the tuning so far."""
    own = own_contests(card, model)
    count = len(default_makes(card))
    for number, case in enumerate(cases, 1):
        yield case
        yield from contests_of(card, case, measured)
        if number == count:
            yield from own
    yield from own


def contests_of(card: Card, case: Case, measured: Callable[[], Tuning]) -> Iterator[Contest]:
    """The libraries that multiply weights like the case's."""
    first: Any = case.first
    of_weight = scaled_mm_contest if isinstance(first, ByteRows) else humming_contest
    if not isinstance(case, ExpertCase):
        with suppress(Unavailable):
            yield of_weight(card, case, measured)


def own_contests(card: Card, model: str | None) -> Iterator[Contest]:
    """Attention of prompts, and experts in 16-bit floats: of a model, or of common ones."""
    heads: Sequence[tuple[str, int]] = HEADS if not card.tiny else (("float16", 64),)
    mixtures: Sequence[Any] = MIXTURES if not card.tiny else ((4, 2, (32, 256)),)
    if model is not None:
        heads, mixtures = _of_model(model)
    for dtype, head_dim in heads:
        with suppress(Unavailable):
            yield cudnn_contest(card, dtype, head_dim)
    for count, used, (n, k) in mixtures:
        with suppress(Unavailable):
            yield grouped_contest(card, count, used, n, k)


def _of_model(model: str) -> tuple[list[tuple[str, int]], list[tuple[int, int, tuple[int, int]]]]:
    """The heads of a model, and its experts if they are 16-bit floats."""
    from sdk.api.config import EngineConfig
    from sdk.memory.resolve import model_config, open_model
    from sdk.memory.weights import matrix_formats

    config = EngineConfig(model=model, device="cpu", max_model_len=64, skip_tokenizer_init=True)
    checkpoint = open_model(config)
    try:
        sizes = model_config(config, checkpoint)
        formats = matrix_formats(config, checkpoint)[0]
    finally:
        checkpoint.close()
    experts, hidden, found = sizes.experts, sizes.hidden_size, []
    if experts is not None and formats & {"f16", "bf16"}:
        for shape in ((2 * experts.width, hidden), (hidden, experts.width)):
            found.append((experts.count, experts.per_token, shape))
    return [("float16", sizes.head_dim)], found


def expect_taken(why: str | None) -> None:
    """:raises Unavailable: a library's kernel rejects a problem, for the reason ``why``."""
    if why is not None:
        raise Unavailable(why)


def _kernel(card: Card, op: str, name: str) -> Any:
    found = (one for each in card.backends for one in each.implementations(op))
    return next(one for one in found if one.name == name)


def scaled_mm_contest(card: Card, case: Case, measured: Callable[[], Tuning]) -> Contest:
    from sdk.kernels.gpu import scaled_mm

    w: Any = case.first
    fields = dict(zip(("n", "k"), case.shape, strict=True))
    always = Tuning(1, libraries={("scaled_mm", *case.shape): 1})
    theirs = _kernel(card, "linear", "gpu.scaled_mm").tuned(always)
    expect_taken(theirs.reject(linear_problem(theirs.unpack(w), "auto", 8)))

    def check() -> None:
        for dtype in scaled_mm.WRITTEN:
            scaled_mm.check(w, dtype)

    def calls(tokens: int) -> tuple[list[Call], list[Call]]:
        multiply, rows = case.product(card, card.size(tokens, 2))
        out = torch.empty(rows, case.shape[0], dtype=case.outputs, device=card.device)
        ours = case.kernel.tuned(replace(measured(), libraries={}))

        def each(kernel: Any) -> list[Call]:
            return [partial(multiply, kernel, w, out) for w in case.packed]

        return each(ours), each(theirs)

    return Contest("scaled_mm", fields, PRODUCT_TOKENS, check, calls)


def humming_contest(card: Card, case: Case, measured: Callable[[], Tuning]) -> Contest:
    if not installed():  # before weights are unpacked to be asked about
        raise Unavailable("humming-kernels is not installed")
    fields = {"type": case.type, "n": case.shape[0], "k": case.shape[1]}
    always = Tuning(1, libraries={("humming", *fields.values()): 1})
    theirs = _kernel(card, "linear", "gpu.humming").tuned(always)
    layouts = [theirs.unpack(w) for w in case.packed]
    expect_taken(theirs.reject(linear_problem(layouts[0], "auto", 8)))
    made: list[Any] = []

    def check() -> None:
        """``pack`` raises if its product is wrong."""
        made.extend(theirs.pack(layout) for layout in layouts)
        if not isinstance(made[0], HummingWeight):
            raise KernelError("the package does not take such weights")

    def calls(tokens: int) -> tuple[list[Call], list[Call]]:
        tokens = card.size(tokens, 2)
        x = card.normal(tokens, case.shape[1], dtype=card.activations)
        out = torch.empty(tokens, case.shape[0], dtype=card.activations, device=card.device)
        ours = case.kernel.tuned(replace(measured(), libraries={}))

        def each(kernel: Any, weights: Sequence[Any]) -> list[Call]:
            return [partial(kernel.matmul, w, x, out) for w in weights]

        return each(ours, case.packed), each(theirs, made)

    return Contest("humming", fields, HUMMING_TOKENS, check, calls)


def grouped_contest(card: Card, count: int, used: int, n: int, k: int) -> Contest:
    from sdk.kernels.gpu import grouped_mm
    from sdk.kernels.weights.layouts import Dense

    dtype = str(card.activations).removeprefix("torch.")
    fields = {"type": dtype, "n": n, "k": k}
    always = Tuning(1, libraries={("grouped_mm", dtype, n, k): 1})
    ours = _kernel(card, "linear", "gpu.dense")
    theirs = _kernel(card, "linear", "gpu.grouped_mm").tuned(always)
    small = Dense(torch.empty(n, k, dtype=card.activations, device="meta"))
    expect_taken(theirs.reject(linear_problem(small, "auto", 8)))
    made: list[Tensor] = []

    def weights() -> Tensor:
        """Of all experts, made when they are asked for: a layer has up to 2 GB."""
        if not made:
            made.append(card.normal(count, n, k, dtype=card.activations))
        return made[0]

    def calls(rows: int) -> tuple[list[Call], list[Call]]:
        tokens = card.size(rows * count // used, 3)
        routes = routes_like(card, tokens, count, used)
        x = card.normal(tokens, k, dtype=card.activations)
        out = torch.empty(tokens * used, n, dtype=card.activations, device=card.device)
        layouts = [Dense(values) for values in weights()]

        def one(kernel: Any) -> list[Call]:
            group = kernel.group(layouts)
            return [lambda: kernel.matmul_routed(group, x, routes, True, out)]

        return one(ours), one(theirs)

    return Contest("grouped_mm", fields, EXPERT_ROWS, lambda: grouped_mm.check(weights()[0]), calls)


def cudnn_contest(card: Card, dtype: str, head_dim: int) -> Contest:
    from sdk.bench.gpu.attention import USUAL, check_case, make_case
    from sdk.kernels.backend import Problem

    heads = USUAL._replace(width=head_dim)
    always = Tuning(card.tuning.programs, libraries={("cudnn_attention", dtype, head_dim): 1})
    ours = _kernel(card, "attention", "gpu.attention")
    theirs = _kernel(card, "attention", "gpu.cudnn_attention").tuned(always)
    expect_taken(theirs.reject(Problem("attention", head_dim=head_dim, kv_dtype=dtype)))

    def check() -> None:
        """A prompt, and a chunk behind a prefix."""
        for context, queries in ((80, 80), (1040, 24)):
            case = make_case(card, dtype, 1, context, queries, heads)
            out = torch.full_like(case.q.flatten(1), torch.nan)
            case.run(theirs, out)
            check_case(card, case, out, theirs.name)

    def calls(queries: int) -> tuple[list[Call], list[Call]]:
        queries = card.size(queries, 48)
        case = make_case(card, dtype, 1, queries, queries, heads)
        out = torch.empty_like(case.q.flatten(1))
        return [lambda: case.run(ours, out)], [lambda: case.run(theirs, out)]

    fields = {"type": dtype, "head_dim": head_dim}
    return Contest("cudnn_attention", fields, QUERIES, check, calls, graph=False)
