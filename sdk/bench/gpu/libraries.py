"""Kernels of libraries that may replace ours: how fast ours are beside them.

They run as in an engine, with the copies that they need, and are compared with the reference before
they are timed. The row ``fp8`` has torch's ``_scaled_mm``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

from sdk.bench.gpu.card import Card
from sdk.bench.gpu.products import GROUP, product_shape
from sdk.bench.gpu.rows import Finding, ratio, without
from sdk.bench.gpu.weights import affine
from sdk.bench.tune.cases import MIXTURES, single_case
from sdk.bench.tune.libraries import Contest, cudnn_contest, grouped_contest, humming_contest

_GROUPED_ROWS = (64, 512)
_CUDNN_QUERIES = (1024, 4096)
_HUMMING_TOKENS = (16, 64, 512)


def measure_grouped(card: Card) -> Iterator[Finding]:
    """Experts of a prompt in 16-bit floats."""
    count, used, (n, k) = MIXTURES[0] if not card.tiny else (4, 2, (32, 256))
    what = f"{count} experts {n}x{k}, {{}} rows each"
    make = lambda: grouped_contest(card, count, used, n, k)  # noqa: E731
    yield from _measured(card, make, what, "grouped_mm", _GROUPED_ROWS)


def measure_cudnn(card: Card) -> Iterator[Finding]:
    """One prompt, launched from the host as engines do."""
    dtype, head_dim = "float16", card.size(128, 64)
    what = f"prompt attention, {dtype} pages, {{}} tokens"
    make = lambda: cudnn_contest(card, dtype, head_dim)  # noqa: E731
    yield from _measured(card, make, what, "cuDNN", _CUDNN_QUERIES)


def measure_humming(card: Card) -> Iterator[Finding]:
    """4 bits in groups of 128, results in 16 bits. The package compiles its kernels before."""
    n, k = product_shape(card) if not card.tiny else (64, 512)
    case = single_case(card, lambda n, k: affine(card, n, k, 4, GROUP), n, k)
    what = f"W4A16 g{GROUP} {n}x{k}, {{}} tokens, 16-bit results"
    make = lambda: humming_contest(card, case, lambda: card.tuning)  # noqa: E731
    yield from _measured(card, make, what, "humming-kernels", _HUMMING_TOKENS)


def _measured(
    card: Card, make: Callable[[], Contest], what: str, against: str, tokens: tuple[int, ...]
) -> Iterator[Finding]:
    """``what``: with a place for a number of tokens."""

    def findings() -> Iterator[Finding]:
        contest = make()
        checked(contest)
        for number in tokens:
            ours, theirs = contest.calls(number)
            own, other = (card.time(calls, graph=contest.graph) for calls in (ours, theirs))
            speed = other / own
            yield ratio(what.format(number), against, speed, us=own * 1e6, peer_us=other * 1e6)

    yield from without(findings(), what.format(tokens[0]), against)


def checked(contest: Contest) -> None:
    """:raises Exception: the library's results are wrong."""
    contest.check()
