"""A page of a ladder taken to a lower level: ``native/recode.hpp``."""

from __future__ import annotations

from sdk.kernels.cpu.library import Engine, OpKind
from sdk.kernels.cpu.page_args import RecodeArgs
from sdk.kernels.cpu.pages import check_pages, page_sides, reject
from sdk.kernels.kv_pages import KVPages
from sdk.kernels.registry import Problem


class RecodePage:
    """See :meth:`sdk.kernels.ops.Ops.recode_page`."""

    name = "cpu.recode_page"

    def __init__(self, engine: Engine) -> None:
        self._engine = engine

    def reject(self, problem: Problem) -> str | None:
        return reject(problem)

    def run(self, source: KVPages, index: int, target: KVPages, at: int) -> None:
        kv_heads, head_dim = source.k.shape[1], source.head_dim
        for pages in (source, target):
            check_pages(pages, kv_heads, head_dim)
        args = RecodeArgs(
            page_sides(source), page_sides(target), index, at, kv_heads, head_dim, source.page_size
        )
        self._engine.run(OpKind.RECODE, args, kv_heads * source.page_size, "recode_page")
