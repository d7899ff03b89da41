"""Operations of torch that only make views, while a step is recorded: see ``graph.py``."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from torch.utils._python_dispatch import TorchDispatchMode

from sdk.kernels.errors import CaptureError

#: Torch operations that move no data.
VIEWS = frozenset(
    f"aten.{name}"
    for name in (
        *("alias", "as_strided", "detach", "expand", "lift_fresh", "permute", "select", "slice"),
        *("split", "split_with_sizes", "squeeze", "t", "transpose", "unsqueeze", "view"),
        *("_unsafe_view", "_reshape_alias"),
    )
)


class OnlyViews(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Raises :class:`CaptureError` for every torch operation that touches data."""

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """False: otherwise torch would import its compiler (800 modules) to skip this class."""
        return False

    def __torch_dispatch__(
        self, func: Any, types: Iterable[type], args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if str(func).rpartition(".")[0] in VIEWS:
            return func(*args, **kwargs)
        with self:  # flatten, reshape, contiguous: made of views, or of views and a copy
            result = func.decompose(*args, **kwargs)
        if result is NotImplemented:
            raise CaptureError(f"a step with {func} cannot be recorded: it is not our operator")
        return result
