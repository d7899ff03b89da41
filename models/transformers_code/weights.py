"""Weights of a module tree of transformers: packed for matrices and embeddings, else float32.

Only :mod:`sdk.models.transformers_code.backend` uses it, while it builds a model.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from sdk.kernels.operators.mlp_activations import Activation
from sdk.kernels.operators.norm import Norm
from sdk.kernels.operators.ops import Ops
from sdk.kernels.weights.layouts import Dense
from sdk.models.parallel import Mesh
from sdk.models.parts import Matrix, joined_parts, whole
from sdk.models.projections import ExpertProjection, Linear, Projection
from sdk.models.transformers_code.known import NormFacts, gated_activation, norm_facts
from sdk.quant.checkpoint import Checkpoint
from sdk.quant.errors import CheckpointError, UnsupportedError
from sdk.quant.expert_weights import ExpertWeights
from sdk.quant.weight import DenseWeight, Weight, concat


class PackedLinear(nn.Module):
    """Replaces an ``nn.Linear``."""

    def __init__(self, linear: Projection) -> None:
        super().__init__()
        self.linear = linear

    @property
    def weight(self) -> Tensor:
        """The type and shape, which some models' code reads; it has no data."""
        return torch.empty(self.linear.weight.shape, device="meta")

    def forward(self, x: Tensor) -> Tensor:
        y = self.linear(x.reshape(-1, x.shape[-1]))
        return y.view(*x.shape[:-1], y.shape[-1])


class PackedNorm(nn.Module):
    """Replaces an RMSNorm or a LayerNorm."""

    def __init__(self, norm: Norm, ops: Ops) -> None:
        super().__init__()
        self.norm = norm
        self.ops = ops

    @property
    def weight(self) -> Tensor | None:
        """What some models' code reads the type of."""
        return self.norm.weight

    def forward(self, x: Tensor) -> Tensor:
        if x.dim() == 4 and x.stride(1) < x.stride(2):  # [1, heads, T, head_dim]: rows are tokens
            return self.forward(x.transpose(1, 2)).transpose(1, 2)
        rows = x[0] if x.dim() == 4 else x.reshape(-1, x.shape[-1])
        return self.ops.norm(rows, self.norm).view(x.shape)


class PackedMLP(nn.Module):
    """Replaces a gated MLP; gate and up are one projection."""

    def __init__(self, gate_up: Projection, down: Projection, activation: Activation) -> None:
        super().__init__()
        self.gate_up = gate_up
        self.down = down
        self.activation = activation

    def forward(self, x: Tensor) -> Tensor:
        rows = x.reshape(-1, x.shape[-1])
        return self.down(self.gate_up.gated(rows, self.activation)).view(x.shape)


class PackedEmbedding(nn.Module):
    """Replaces an ``nn.Embedding``, also one that scales its rows (Gemma)."""

    def __init__(self, packed: Weight, scale: Tensor | float | None) -> None:
        super().__init__()
        self.packed = packed
        self.scale = scale

    def forward(self, ids: Tensor) -> Tensor:
        rows = self.packed.rows(ids.reshape(-1)).view(*ids.shape, -1)
        return rows if self.scale is None else rows * self.scale


class PackedExperts(nn.Module):
    """Replaces the experts of a layer that transformers has as two tensors of three dimensions.

    The router stays transformers' own. ``gate`` is the method of the replaced module that turns
    rows ``[R, 2 * inner]``, gate before up, into ``[R, inner]``.
    """

    def __init__(
        self,
        gate_up: ExpertProjection,
        down: ExpertProjection,
        gate: Callable[[Tensor], Tensor],
        ops: Ops,
    ) -> None:
        super().__init__()
        self.gate_up = gate_up
        self.down = down
        self.gate = gate
        self.ops = ops

    def forward(self, hidden: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
        """``hidden [T, H]``; ``chosen`` and ``weights [T, k]``: the experts of each token."""
        routes = self.ops.moe.routes(chosen, weights, len(self.gate_up.weight.parts))
        inner = self.gate(self.gate_up(hidden, routes))
        return self.ops.moe.combine(self.down(inner.contiguous(), routes), routes)


class Filling:
    """Gives every parameter of a module tree its weight while the model is built."""

    def __init__(self, checkpoint: Checkpoint, ops: Ops, tied: bool, model: Any) -> None:
        self.checkpoint = checkpoint
        self.ops = ops
        self.model = model
        self.head = model.get_output_embeddings()
        self.tied_to = model.get_input_embeddings() if tied else None
        self.linears: list[tuple[str, Linear]] = []
        self.tied: Weight | None = None
        self.renamings = _renamings(model)

    def fill(self) -> list[tuple[str, Linear]]:
        """Replace or load all modules, in the order of the tree; returns the linears."""
        from transformers.pytorch_utils import Conv1D

        done = ""
        for name, module in list(self.model.named_modules()):
            if done and name.startswith(done):  # inside of an MLP that was replaced as a whole
                continue
            if (norm := norm_facts(module)) is not None:
                new: nn.Module = self._norm(name, module, norm)
            elif (gated := gated_activation(module)) is not None:
                new, done = self._mlp(name, module, gated), f"{name}."
            elif _is_embedding(module):
                weight = self._pull(name, tuple(module.weight.shape))
                if module is self.tied_to:
                    self.tied = weight
                new = PackedEmbedding(weight, getattr(module, "embed_scale", None))
            elif _are_experts(module):
                new = self._experts(name, module)
            elif type(module) is nn.Linear:
                shared = self.tied if module is self.head else None
                weight = shared or self._pull(name, tuple(module.weight.shape))
                new = PackedLinear(self._linear(name, weight, module))
            elif type(module) is Conv1D:
                new = PackedLinear(self._linear(name, self._transposed(name, module), module))
            else:
                self._load_plain(name, module)
                continue
            self.model.set_submodule(name, new)
        return self.linears

    def _name(self, name: str) -> str:
        """The file's name for ``name``.

        GPT-2's files hold only the body, without its prefix; GPT-NeoX's call the head embed_out.
        transformers renames older names of other models while it loads.
        """
        prefix = f"{self.model.base_model_prefix}."
        spellings = (name, name.removeprefix(prefix), name.replace("lm_head", "embed_out"))
        found = next((n for n in spellings if self.checkpoint.has(n)), None)
        return found or self._older_name(name) or name

    def _older_name(self, name: str) -> str | None:
        """The name before transformers' renamings, if the file has a tensor of that name.

        A layer's name has no ``.weight``, but a pattern may require it.
        """
        for suffix in ("", ".weight"):
            older = name + suffix
            for renaming in self.renamings:
                older = renaming.rename_source_key(older)[0]
            if older != name + suffix and self.checkpoint.has(older.removesuffix(".weight")):
                return older.removesuffix(suffix)
        return None

    def _shaped(self, name: str, shape: tuple[int, ...]) -> Weight:
        weight = self.checkpoint.weight(self._name(name))
        if weight.shape != shape:
            raise CheckpointError(
                f"{name}: expected shape {list(shape)}, found {list(weight.shape)}"
            )
        return weight

    def _pull(self, name: str, shape: tuple[int, ...]) -> Weight:
        weight = self._shaped(name, shape)
        weight.bind(self.ops)
        return weight

    def _transposed(self, name: str, module: Any) -> Weight:
        """GPT-2's files hold floats as ``[in, out]``; quantizers always write ``[out, in]``."""
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

    def _norm(self, name: str, module: Any, facts: NormFacts) -> PackedNorm:
        own = {
            key: self._tensor(f"{name}.{key}", parameter)
            for key, parameter in module.named_parameters(recurse=False)
        }
        weight = own["weight"] + facts.offset if "weight" in own else None
        norm = Norm(weight, facts.eps, own.get("bias"), facts.centred)
        return PackedNorm(norm, self.ops)

    def _mlp(self, name: str, module: Any, activation: Activation) -> PackedMLP:
        hidden = module.gate_proj.weight.shape[1]
        paths = [f"{name}.gate_proj", f"{name}.up_proj"]
        pairs = list(zip(paths, (module.gate_proj, module.up_proj), strict=True))
        weight = concat([self._shaped(path, tuple(one.weight.shape)) for path, one in pairs])
        weight.bind(self.ops)
        biases = [self._own_bias(path, one) for path, one in pairs]
        bias = None
        if any(own is not None for own in biases):
            zeros = [torch.zeros(one.weight.shape[0], device=self.ops.device) for _, one in pairs]
            given = zip(biases, zeros, strict=True)
            bias = torch.cat([zero if own is None else own for own, zero in given])
        width = module.up_proj.weight.shape[0]
        parts = [("gate_proj", width, 0, width), ("up_proj", width, 0, width)]
        path = f"{name}.gate_up_proj"
        joined = joined_parts(name, path, parts, hidden)
        gate_up = Projection(Matrix(weight, bias), Mesh(), self.ops, parts=joined)
        self.linears.append((path, gate_up))
        own = f"{name}.down_proj"
        down = self._pull(own, tuple(module.down_proj.weight.shape))
        return PackedMLP(gate_up, self._linear(own, down, module.down_proj), activation)

    def _linear(self, name: str, weight: Weight, module: Any) -> Projection:
        matrix = Matrix(weight, self._own_bias(name, module))
        linear = Projection(matrix, Mesh(), self.ops, parts=[whole(name, weight.shape)])
        self.linears.append((name, linear))
        return linear

    def _own_bias(self, name: str, module: Any) -> Tensor | None:
        if module.bias is None or self._may_lack(f"{name}.bias"):
            return None
        return self._tensor(f"{name}.bias", module.bias)

    def _may_lack(self, bias: str) -> bool:
        """Whether the file has no such bias and needs none: see :meth:`Source._bias`."""
        return self.checkpoint.format == "gguf" and not self.checkpoint.has(self._name(bias))

    def _experts(self, name: str, module: Any) -> PackedExperts:
        """All experts of a layer, from one tensor each or from one of all."""
        count, wide, hidden = module.gate_up_proj.shape
        shape, down_shape = (wide // 2, hidden), (hidden, wide // 2)
        gate_up: list[Weight] = []
        down: list[Weight] = []
        if self.checkpoint.has(f"{name}.0.down_proj"):
            for expert in range(count):
                path = f"{name}.{expert}"
                parts = [self._shaped(f"{path}.{part}_proj", shape) for part in ("gate", "up")]
                gate_up.append(concat(parts))
                gate_up[-1].bind(self.ops)
                down.append(self._shaped(f"{path}.down_proj", down_shape))
                down[-1].bind(self.ops)
        else:
            gate_up = self._cut(f"{name}.gate_up_proj", (count, wide, hidden))
            down = self._cut(f"{name}.down_proj", (count, *down_shape))
        first = self._bound_experts(f"{name}.gate_up_proj", gate_up, by_token=True)
        second = self._bound_experts(f"{name}.down_proj", down, by_token=False)
        return PackedExperts(first, second, module._apply_gate, self.ops)

    def _cut(self, name: str, shape: tuple[int, int, int]) -> list[Weight]:
        """The experts of one tensor ``[E, out, in]``, each bound."""
        whole = self._tensor(name, torch.empty(shape, device="meta"))
        weights: list[Weight] = [DenseWeight(Dense(own.contiguous())) for own in whole]
        for weight in weights:
            weight.bind(self.ops)
        return weights

    def _bound_experts(self, name: str, parts: list[Weight], *, by_token: bool) -> ExpertProjection:
        weight = ExpertWeights(parts)
        weight.bind(self.ops)
        linear = ExpertProjection(weight, None, self.ops, by_token=by_token)
        self.linears.append((name, linear))
        return linear

    def _load_plain(self, name: str, module: nn.Module) -> None:
        """Load a module's own parameters (not its children's) and the buffers that the file has."""
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
        """A parameter as float32; a checkpoint has matrices under their module's name."""
        stem = name.removesuffix(".weight")
        if like.dim() == 2 and stem != name:
            tensor = self.checkpoint.weight(self._name(stem)).dequantize()
        elif like.dim() == 3 and not self.checkpoint.has(self._name(name)):
            raise UnsupportedError(
                f"{name}: expected one tensor with all experts, found none of that name: mixtures "
                "whose experts are stored one by one are not supported yet"
            )
        else:
            tensor = self.checkpoint.tensor(self._name(name))
        if tensor.shape != like.shape:
            raise CheckpointError(
                f"{name}: expected shape {list(like.shape)}, found {list(tensor.shape)}"
            )
        return tensor.to(self.ops.device, torch.float32)


def _is_embedding(module: nn.Module) -> bool:
    """A plain embedding, or one whose class only multiplies its rows by ``embed_scale``."""
    if type(module) is nn.Embedding:
        return True
    return isinstance(module, nn.Embedding) and hasattr(module, "embed_scale")


def _are_experts(module: Any) -> bool:
    """Whether a module is a layer's experts in the form that :class:`PackedExperts` computes.

    transformers marks its expert classes with these flags; classes with biases, transposed or
    interleaved tensors stay unchanged.
    """
    flags = ("has_gate", "is_concatenated")
    others = ("has_bias", "is_transposed", "has_post_expert_norm")
    return (
        all(getattr(module, flag, False) for flag in flags)
        and not any(getattr(module, flag, False) for flag in others)
        and {name for name, _ in module.named_parameters()} == {"gate_up_proj", "down_proj"}
        and hasattr(module, "_apply_gate")
    )


def _renamings(model: Any) -> list[Any]:
    """transformers' renamings of tensors of older files, from current names to older ones."""
    try:
        from transformers.conversion_mapping import get_model_conversion_mapping
        from transformers.core_model_loading import WeightRenaming
    except ImportError:  # other releases have them elsewhere: files with current names still load
        return []
    known = get_model_conversion_mapping(model, add_legacy=False)
    return [r.reverse_transform() for r in reversed(known) if isinstance(r, WeightRenaming)]
