"""Moves pages of keys and values to a lower tier: see :mod:`sdk.kernels.kv.tiers`."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from sdk.kernels.context import Context
from sdk.kernels.errors import KernelError
from sdk.kernels.kv.pages import KVPages
from sdk.kernels.kv.tiers import page_tier


def page_recoder(context: Context, layers: Sequence[KVPages]) -> Callable[[int, int], None]:
    """A function that rewrites a page of one tier as a page of a lower tier, in all ``layers``.

    It takes two page ids, ``source`` and ``target``, whose memory must not overlap. It raises
    ``KernelError`` if a page does not exist or the target's tier is not lower. The result is
    the same for any number of threads.
    """
    tiers = layers[0].tiers
    kernel = context.kernel("recode_page", **layers[0].problem())
    run = kernel.bind(layers)

    def recode(source: int, target: int) -> None:
        (above, index), (below, at) = page_tier(source), page_tier(target)
        if not 0 <= above < below < len(tiers):
            raise KernelError(
                "recode: expected a source page in a higher tier than the target page, of "
                f"{len(tiers)} tiers, found tiers {above} and {below}"
            )
        pages = tiers[above].k.shape[0], tiers[below].k.shape[0]
        if index >= pages[0] or at >= pages[1]:
            raise KernelError(
                f"recode: expected pages below {pages[0]} and {pages[1]}, found {index} and {at}"
            )
        run(above, index, below, at)

    return recode
