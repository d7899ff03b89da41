"""Weights for a module tree of transformers: packed where it multiplies or looks up, else float32.

Used by :mod:`sdk.models.hf_backend` while it builds a model, and only then.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from sdk.kernels.layouts import Dense
from sdk.kernels.ops import Ops
from sdk.models.layers import Linear
from sdk.models.parallel import Mesh
from sdk.quant.checkpoint import Checkpoint
from sdk.quant.errors import CheckpointError, UnsupportedError
from sdk.quant.weight import DenseWeight, Weight


class PackedLinear(nn.Module):
    """Stands where an ``nn.Linear`` was."""

    def __init__(self, linear: Linear) -> None:
        super().__init__()
        self.linear = linear

    def forward(self, x: Tensor) -> Tensor:
        y = self.linear(x.reshape(-1, x.shape[-1]))
        return y.view(*x.shape[:-1], y.shape[-1])


class PackedEmbedding(nn.Module):
    """Stands where an ``nn.Embedding`` was."""

    def __init__(self, packed: Weight) -> None:
        super().__init__()
        self.packed = packed

    def forward(self, ids: Tensor) -> Tensor:
        return self.packed.rows(ids.reshape(-1)).view(*ids.shape, -1)


class Filling:
    """Gives every parameter of a model tree its weight; lives only while the model is built."""

    def __init__(self, checkpoint: Checkpoint, ops: Ops, tied: bool, model: Any) -> None:
        self.checkpoint = checkpoint
        self.ops = ops
        self.model = model
        self.head = model.get_output_embeddings()
        self.tied_to = model.get_input_embeddings() if tied else None
        self.linears: list[tuple[str, Linear]] = []
        self.tied: Weight | None = None

    def fill(self) -> list[tuple[str, Linear]]:
        """Replace or load all modules, in the order of the tree; returns the linears."""
        from transformers.pytorch_utils import Conv1D

        for name, module in list(self.model.named_modules()):
            if type(module) is nn.Embedding:
                weight = self._pull(name, tuple(module.weight.shape))
                if module is self.tied_to:
                    self.tied = weight
                new: nn.Module = PackedEmbedding(weight)
            elif type(module) is nn.Linear:
                shared = self.tied if module is self.head else None
                weight = shared or self._pull(name, tuple(module.weight.shape))
                new = PackedLinear(self._linear(name, weight, module))
            elif type(module) is Conv1D:
                new = PackedLinear(self._linear(name, self._turned(name, module), module))
            else:
                self._load_plain(name, module)
                continue
            self.model.set_submodule(name, new)
        return self.linears

    def _name(self, name: str) -> str:
        """What the file calls ``name``.

        GPT-2's files hold the body alone, without its prefix; GPT-NeoX's call the head embed_out.
        """
        prefix = f"{self.model.base_model_prefix}."
        spellings = (name, name.removeprefix(prefix), name.replace("lm_head", "embed_out"))
        return next((n for n in spellings if self.checkpoint.has(n)), name)

    def _pull(self, name: str, shape: tuple[int, ...]) -> Weight:
        weight = self.checkpoint.weight(self._name(name))
        if weight.shape != shape:
            raise CheckpointError(
                f"{name}: expected shape {list(shape)}, found {list(weight.shape)}"
            )
        weight.bind(self.ops)
        return weight

    def _turned(self, name: str, module: Any) -> Weight:
        """GPT-2's files hold ``[in, out]`` in floats; quantizers write ``[out, in]`` as for all."""
        weight = self.checkpoint.weight(self._name(name))
        if weight.spec.kind == "float":
            weight = DenseWeight(Dense(weight.dequantize().t().contiguous()))
        shape = tuple(module.weight.shape)[::-1]
        if weight.shape != shape:
            raise CheckpointError(
                f"{name}: expected shape {list(shape)}, found {list(weight.shape)}"
            )
        weight.bind(self.ops)
        return weight

    def _linear(self, name: str, weight: Weight, module: Any) -> Linear:
        bias = None if module.bias is None else self._tensor(f"{name}.bias", module.bias)
        linear = Linear(weight, bias, Mesh(), self.ops)
        self.linears.append((name, linear))
        return linear

    def _load_plain(self, name: str, module: nn.Module) -> None:
        """A module's own parameters (not its children's) and the buffers its file has."""
        prefix = f"{name}." if name else ""
        for key, parameter in list(module.named_parameters(recurse=False)):
            value = nn.Parameter(self._tensor(prefix + key, parameter), requires_grad=False)
            module.register_parameter(key, value)
        for key, buffer in list(module.named_buffers(recurse=False)):
            if key not in module._non_persistent_buffers_set:
                module.register_buffer(key, self._tensor(prefix + key, buffer))
            elif buffer.device != self.ops.device:
                module.register_buffer(key, buffer.to(self.ops.device), persistent=False)

    def _tensor(self, name: str, like: Tensor) -> Tensor:
        """A parameter as float32; matrices live under their module's name in a checkpoint."""
        stem = name.removesuffix(".weight")
        if like.dim() == 2 and stem != name:
            tensor = self.checkpoint.weight(self._name(stem)).dequantize()
        elif like.dim() == 3 and not self.checkpoint.has(self._name(name)):
            raise UnsupportedError(
                f"{name}: expected the experts joined in one tensor, found none of that name: "
                "mixtures whose experts are stored one by one do not run yet"
            )
        else:
            tensor = self.checkpoint.tensor(self._name(name))
        if tensor.shape != like.shape:
            raise CheckpointError(
                f"{name}: expected shape {list(like.shape)}, found {list(tensor.shape)}"
            )
        return tensor.to(self.ops.device, torch.float32)
