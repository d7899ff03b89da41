"""Recodes a page of one tier of a tiered cache as a page of a lower tier, in torch."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from sdk.kernels.backend import Problem
from sdk.kernels.kv.pages import KVPages
from sdk.kernels.lazy_torch import torch
from sdk.kernels.reference.page_codes import page_floats


class RecodePage:
    """See :func:`sdk.kernels.kv.recoder.page_recoder`."""

    name = "reference.recode_page"

    def reject(self, problem: Problem) -> str | None:
        return None

    def bind(self, layers: Sequence[KVPages]) -> Callable[[int, int, int, int], None]:
        """Recodes page ``index`` of tier ``above`` as page ``at`` of tier ``below``."""

        def run(above: int, index: int, below: int, at: int) -> None:
            for pages in layers:
                self._run(pages.tiers[above], index, pages.tiers[below], at)

        return run

    def _run(self, source: KVPages, index: int, target: KVPages, at: int) -> None:
        floats = page_floats(source, torch.tensor([index], device=source.k.device))
        sides = (
            (target.k, target.k_scale, target.k_type),
            (target.v, target.v_scale, target.v_type),
        )
        for x, (codes, scales, kind) in zip(floats, sides, strict=True):
            assert scales is not None  # lower tiers are integers
            codes[at], words = kind.encode(x[0], scales.shape[1] // codes.shape[1])
            assert words is not None
            scales[at] = words.transpose(1, 2).flatten(0, 1)
