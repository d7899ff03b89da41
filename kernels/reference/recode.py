"""A page of one level of a ladder written as one of a lower level, in torch."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from sdk.kernels.backend import Problem
from sdk.kernels.kv_pages import KVPages
from sdk.kernels.reference.page_codes import page_floats, round_groups


class RecodePage:
    """See :meth:`sdk.kernels.ops.Ops.page_recoder`."""

    name = "reference.recode_page"

    def reject(self, problem: Problem) -> str | None:
        return None

    def bind(self, layers: Sequence[KVPages]) -> Callable[[int, int, int, int], None]:
        """Page ``index`` of level ``above`` to page ``at`` of level ``below``, in all layers."""

        def run(above: int, index: int, below: int, at: int) -> None:
            for pages in layers:
                self._run(pages.levels[above], index, pages.levels[below], at)

        return run

    def _run(self, source: KVPages, index: int, target: KVPages, at: int) -> None:
        floats = page_floats(source, torch.tensor([index], device=source.k.device))
        sides = (target.k, target.k_scale), (target.v, target.v_scale)
        for x, (codes, scales) in zip(floats, sides, strict=True):
            assert scales is not None  # lower levels are integers
            groups = scales.shape[1] // codes.shape[1]
            found, words = round_groups(x[0], codes.dtype, groups)
            codes[at] = found
            scales[at] = words.transpose(1, 2).flatten(0, 1)
