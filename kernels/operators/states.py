"""The recurrent states of one layer, and which of them the requests of a step read and write."""

from __future__ import annotations

from collections.abc import Mapping

from sdk.kernels.dataclass import dataclass
from sdk.kernels.errors import KernelError
from sdk.kernels.lazy_torch import Tensor, torch
from sdk.kernels.operators.checks import expect


@dataclass(frozen=True, slots=True)
class LayerState:
    """The slots of one layer: by name a tensor ``[num_slots, *shape]`` for each part of its state.

    A slot is contiguous; slots of one layer are ``tensor.stride(0)`` elements apart, because all
    layers of a slot are next to each other. Slot 0 is for padding rows: its content is arbitrary.
    """

    parts: Mapping[str, Tensor]

    def __getitem__(self, name: str) -> Tensor:
        return self.parts[name]


@dataclass(frozen=True, slots=True)
class RwkvKeys:
    """What an RWKV-7 makes of keys, float32 ``[heads, dim]`` each: see
    :meth:`sdk.kernels.operators.state_ops.StateOps.rwkv`."""

    norm: Tensor
    mix: Tensor
    read: Tensor


@dataclass(frozen=True, slots=True)
class StateBatch:
    """Which slots the R requests of a step use, next to
    :class:`~sdk.kernels.operators.batch.AttentionBatch`.

    Request r begins with the state in slot ``initial[r]``, or with zeros if that is -1. Its states
    after some of its tokens are written: for i in ``save_start[r] : save_start[r + 1]`` the state
    after token ``save_token[i]`` (of the flat step) goes to slot ``save_slot[i]``. The tokens of a
    request's saves ascend, and the last one is that of its last token. A save may go to the
    request's own initial slot, but no other request of the step reads a slot that one writes.

    - ``initial``: int32 ``[R]``.
    - ``save_start``: int32 ``[R + 1]``.
    - ``save_token``, ``save_slot``: int32 ``[S or more]``.
    """

    initial: Tensor
    save_start: Tensor
    save_token: Tensor
    save_slot: Tensor

    def check(self, requests: int) -> None:
        """Check types and shapes. Operators check the contents when they use them.

        :raises KernelError: a tensor is not as described above.
        """
        expect("states initial", self.initial, torch.int32, requests)
        expect("states save_start", self.save_start, torch.int32, requests + 1)
        expect("states save_token", self.save_token, torch.int32, None)
        expect("states save_slot", self.save_slot, torch.int32, self.save_token.shape[0])
        for x in (self.initial, self.save_start, self.save_token, self.save_slot):
            if not x.is_contiguous():
                raise KernelError(f"states: expected contiguous rows, found strides {x.stride()}")
