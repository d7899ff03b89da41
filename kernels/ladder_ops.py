"""The operator of KV ladders: a page goes to a lower level."""

from __future__ import annotations

from typing import Any

from sdk.kernels.errors import KernelError
from sdk.kernels.kv_pages import KVPages
from sdk.kernels.ladder import page_level


class LadderOps:
    """The part of :class:`sdk.kernels.ops.Ops` that only KV ladders need."""

    def _kernel(self, op: str, **fields: Any) -> Any:
        raise NotImplementedError

    def recode_page(self, pages: KVPages, source: int, target: int) -> None:
        """Write a page of one level as one of a lower level; their memory must not overlap.

        ``source`` and ``target`` are page ids. The same bits for any number of threads.

        :raises KernelError: a page that is not there, or a target that is not lower.
        """
        levels = pages.levels
        (above, index), (below, at) = page_level(source), page_level(target)
        if not 0 <= above < below < len(levels):
            raise KernelError(
                f"recode: expected a page of a higher and one of a lower of {len(levels)} levels, "
                f"found levels {above} and {below}"
            )
        given, wanted = levels[above], levels[below]
        if index >= given.k.shape[0] or at >= wanted.k.shape[0]:
            raise KernelError(
                f"recode: expected pages of {given.k.shape[0]} and {wanted.k.shape[0]}, "
                f"found {index} and {at}"
            )
        kernel = self._kernel("recode_page", head_dim=pages.head_dim, kv_dtype=pages.dtype)
        kernel.run(given, index, wanted, at)
