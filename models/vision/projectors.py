"""What makes tokens of text of a tower's patches. Names of weights begin with ``model.projector``.

The patches of a token are neighbours (:func:`sdk.models.vision.patches.places`), so each result
depends on a run of rows, and images have the same bits alone and with others.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from sdk.kernels.lazy_torch import Tensor
from sdk.kernels.norm import Norm
from sdk.models.vision.config import VisionConfig

if TYPE_CHECKING:
    from sdk.kernels.mlp_activations import Activation
    from sdk.models.source import Source

PATH = "model.projector"


class PooledLinear:
    """The mean of a token's patches, RMSNorm, one matrix (Gemma 3).

    ``offset``: added to the stored weight of the norm.
    """

    def __init__(self, source: Source, config: VisionConfig, *, offset: float) -> None:
        self.ops, self.patches = source.ops, config.merge**2
        width = config.tower.hidden_size
        weight = source.vector(f"{PATH}.norm.weight", width)
        self.norm = Norm(weight + offset if offset else weight, config.tower.norm_eps)
        self.linear = source.matrix(f"{PATH}.linear", config.hidden_size, width)

    def __call__(self, x: Tensor) -> Tensor:
        """See :class:`sdk.models.vision.family.Projector`."""
        pooled = x.view(-1, self.patches, x.shape[1]).mean(dim=1)
        return self.linear(self.ops.norm(pooled, self.norm))


class StandardizedLinear:
    """The mean of a token's patches times ``sqrt(width)``, in some models shifted and multiplied by
    vectors, RMSNorm without a weight, one matrix (Gemma 4)."""

    def __init__(self, source: Source, config: VisionConfig) -> None:
        self.ops, self.patches = source.ops, config.merge**2
        width = config.tower.hidden_size
        self.scale = width**0.5
        #: What is subtracted and what multiplies the rest, float32 ``[width]``.
        self.standard: tuple[Tensor, Tensor] | None = None
        if config.standardized:
            self.standard = (
                source.vector(f"{PATH}.bias", width),
                source.vector(f"{PATH}.scale", width),
            )
        self.norm = Norm(None, config.tower.norm_eps)
        self.linear = source.matrix(f"{PATH}.linear", config.hidden_size, width)

    def __call__(self, x: Tensor) -> Tensor:
        """See :class:`sdk.models.vision.family.Projector`."""
        x = x.view(-1, self.patches, x.shape[1]).mean(dim=1) * self.scale
        if self.standard is not None:
            x = (x - self.standard[0]) * self.standard[1]
        return self.linear(self.ops.norm(x, self.norm))


class MergerMLP:
    """Norm, the patches of a token side by side, two matrices with an activation between (Qwen).

    ``wide``: the norm is of all patches of a token, else of each one.
    """

    def __init__(
        self,
        source: Source,
        config: VisionConfig,
        path: str = PATH,
        *,
        wide: bool = False,
        activation: Activation = "gelu",
    ) -> None:
        self.ops, self.wide, self.activation = source.ops, wide, activation
        width = config.tower.hidden_size
        self.width = width * config.merge**2
        self.norm = source.norm(f"{path}.norm", self.width if wide else width)
        self.first = source.matrix(f"{path}.linear_fc1", self.width, self.width)
        self.second = source.matrix(f"{path}.linear_fc2", config.hidden_size, self.width)

    def __call__(self, x: Tensor) -> Tensor:
        """See :class:`sdk.models.vision.family.Projector`."""
        if self.wide:
            x = self.ops.norm(x.view(-1, self.width), self.norm)
        else:
            x = self.ops.norm(x, self.norm).view(-1, self.width)
        return self.second(self.ops.activation(self.first(x), self.activation))


class JoinedLinear:
    """The patches of a token side by side ("pixel shuffle"), one matrix (Idefics 3, PaliGemma)."""

    def __init__(self, source: Source, config: VisionConfig) -> None:
        self.width = config.tower.hidden_size * config.merge**2
        self.linear = source.matrix(f"{PATH}.linear", config.hidden_size, self.width)

    def __call__(self, x: Tensor) -> Tensor:
        """See :class:`sdk.models.vision.family.Projector`."""
        return self.linear(x.view(-1, self.width))


class MergedMLP:
    """RMSNorm, one matrix for the patches of a token, feature by feature, two with an activation
    between (Mistral 3)."""

    def __init__(self, source: Source, config: VisionConfig) -> None:
        self.ops, self.patches = source.ops, config.merge**2
        self.activation = config.projector_activation
        width, hidden = config.tower.hidden_size, config.hidden_size
        self.norm = source.norm(f"{PATH}.norm", width, config.projector_eps)
        self.merge = source.matrix(f"{PATH}.merge", width, width * self.patches)
        self.first = source.matrix(f"{PATH}.linear_1", hidden, width)
        self.second = source.matrix(f"{PATH}.linear_2", hidden, hidden)

    def __call__(self, x: Tensor) -> Tensor:
        """See :class:`sdk.models.vision.family.Projector`."""
        x = self.ops.norm(x, self.norm).view(-1, self.patches, x.shape[1])
        x = self.merge(x.transpose(1, 2).contiguous().view(len(x), -1))
        return self.second(self.ops.activation(self.first(x), self.activation))


class JoinedMLP:
    """The patches of a token side by side, a LayerNorm in some models, two matrices with an
    activation between (LLaVA, InternVL, LFM2-VL)."""

    def __init__(self, source: Source, config: VisionConfig, *, norm: bool) -> None:
        self.ops, self.activation = source.ops, config.projector_activation
        self.width = config.tower.hidden_size * config.merge**2
        middle = config.projector_width or config.hidden_size
        self.norm: Norm | None = None
        if norm:
            own = source.norm(f"{PATH}.norm", self.width)
            self.norm = replace(own, eps=config.projector_eps)
        self.first = source.matrix(f"{PATH}.linear_1", middle, self.width)
        self.second = source.matrix(f"{PATH}.linear_2", config.hidden_size, middle)

    def __call__(self, x: Tensor) -> Tensor:
        """See :class:`sdk.models.vision.family.Projector`."""
        x = x.view(-1, self.width)
        x = x if self.norm is None else self.ops.norm(x, self.norm)
        return self.second(self.ops.activation(self.first(x), self.activation))
