"""The operator of KV ladders: a page goes to a lower level."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from sdk.kernels.errors import KernelError
from sdk.kernels.kv_pages import KVPages
from sdk.kernels.ladder import page_level


class LadderOps:
    """The part of :class:`sdk.kernels.ops.Ops` that only KV ladders need."""

    def _kernel(self, op: str, **fields: Any) -> Any:
        raise NotImplementedError

    def page_recoder(self, layers: Sequence[KVPages]) -> Callable[[int, int], None]:
        """What writes a page of one level as one of a lower level, in all ``layers``.

        It takes two page ids, ``source`` and ``target``, whose memory must not overlap, and raises
        ``KernelError`` for a page that is not there or a target that is not lower. The same bits
        for any number of threads.
        """
        levels = layers[0].levels
        kernel = self._kernel("recode_page", head_dim=layers[0].head_dim, kv_dtype=layers[0].dtype)
        run = kernel.bind(layers)

        def recode(source: int, target: int) -> None:
            (above, index), (below, at) = page_level(source), page_level(target)
            if not 0 <= above < below < len(levels):
                raise KernelError(
                    "recode: expected a page of a higher and one of a lower of "
                    f"{len(levels)} levels, found levels {above} and {below}"
                )
            given, wanted = levels[above].k.shape[0], levels[below].k.shape[0]
            if index >= given or at >= wanted:
                raise KernelError(
                    f"recode: expected pages of {given} and {wanted}, found {index} and {at}"
                )
            run(above, index, below, at)

        return recode
