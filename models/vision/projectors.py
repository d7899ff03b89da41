"""What makes tokens of text of a tower's patches. Names of weights begin with ``model.projector``.

The patches of a token are neighbours (:func:`sdk.models.vision.patches.places`), so each result
depends on a run of rows, and images have the same bits alone and with others.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np

from sdk.kernels.lazy_torch import Tensor, torch
from sdk.kernels.operators.norm import Norm
from sdk.models.vision.config import VisionConfig
from sdk.models.vision.portions import queried_rows
from sdk.models.vision.stored import stored

if TYPE_CHECKING:
    from sdk.kernels.operators.mlp_activations import Activation
    from sdk.models.source import Source
    from sdk.models.vision.patches import Places

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
    activation between (LLaVA, InternVL, LFM2-VL, MiniCPM-V 4.6)."""

    def __init__(self, source: Source, config: VisionConfig, *, norm: bool) -> None:
        self.ops, self.activation = source.ops, config.projector_activation
        self.width = config.projected_width * config.joined
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


class Linear:
    """One matrix without a bias (CLIP, whose images are their class token)."""

    def __init__(self, source: Source, config: VisionConfig) -> None:
        self.linear = source.matrix(f"{PATH}.linear", config.hidden_size, config.tower.hidden_size)

    def __call__(self, x: Tensor) -> Tensor:
        """See :class:`sdk.models.vision.family.Projector`."""
        return self.linear(x)


class AttentionPool:
    """A learned query that attends to all patches of a tile, LayerNorm, an MLP that is added
    (SigLIP's "multihead attention pooling").

    The query is the same for every image, so the matrix of keys is folded into it: it becomes a row
    for each head, whose products with patches are the scores. A bias of keys adds the same number
    to all scores of a head. Values are those of the weighted mean of patches.
    """

    def __init__(self, source: Source, config: VisionConfig) -> None:
        tower = config.tower
        self.ops, self.patches = source.ops, config.merge**2
        self.heads, self.width = tower.num_heads, tower.hidden_size
        self.activation, self.slope = tower.activation, tower.activation_slope
        self.biases = source.vector(f"{PATH}.attention.in_proj_bias", 3 * self.width)
        self.scores = source.given(f"{PATH}.scores", lambda: self._folded(source))
        self.values = source.given(f"{PATH}.values", lambda: self._inputs(source)[2])
        self.out = source.matrix(f"{PATH}.attention.out_proj", self.width, self.width)
        self.norm = source.norm(f"{PATH}.layernorm")
        self.first = source.matrix(f"{PATH}.mlp.fc1", tower.intermediate_size, self.width)
        self.second = source.matrix(f"{PATH}.mlp.fc2", config.hidden_size, tower.intermediate_size)

    def _inputs(self, source: Source) -> Tensor:
        """The matrices of queries, keys and values, float32 ``[3, width, width]``."""
        shape = (3 * self.width, self.width)
        found = stored(source, "projector.attention.in_proj_weight", shape, keep=False)
        return found.view(3, self.width, self.width)

    def _folded(self, source: Source) -> Tensor:
        """float32 ``[heads, width]``."""
        probe = stored(source, "projector.probe", (1, 1, self.width), keep=False)
        every, biases, start = (
            x.numpy(force=True).astype(np.float64)
            for x in (self._inputs(source), self.biases, probe.flatten())
        )
        query = every[0] @ start + biases[: self.width]
        size = self.width // self.heads
        keys = every[1].reshape(self.heads, size, self.width)
        scores = np.einsum("hs,hsw->hw", query.reshape(self.heads, size), keys) * size**-0.5
        return torch.from_numpy(scores.astype(np.float32))

    def __call__(self, x: Tensor) -> Tensor:
        """See :class:`sdk.models.vision.family.Projector`; whole tiles."""
        return self.pooled(x, self.patches)

    def pooled(self, x: Tensor, patches: int) -> Tensor:
        """The vectors of tiles that have ``patches`` patches each."""
        pooled = self.values(self._means(x, patches)).view(-1, self.heads, self.heads, self._head)
        own = torch.arange(self.heads, device=x.device)
        joined = pooled[:, own, own].reshape(-1, self.width) + self.biases[2 * self.width :]
        x = self.out(joined)
        y = self.ops.scale(self.first(self.ops.norm(x, self.norm)), self.slope)
        y = self.ops.scale(self.ops.activation(y, self.activation), 1 / self.slope)
        return self.ops.add(x, self.second(y))

    @property
    def _head(self) -> int:
        return self.width // self.heads

    def _means(self, x: Tensor, patches: int) -> Tensor:
        """The mean of a tile's patches by the weights of each head, float32 ``[tiles * heads,
        width]``. In numpy, tile by tile, so that an image has the same bits alone and with
        others."""
        scores = self.scores(x).numpy(force=True).reshape(-1, patches, self.heads)
        rows = x.numpy(force=True).reshape(-1, patches, self.width)
        found = np.empty((len(rows), self.heads, self.width), np.float32)
        for tile, (own, values) in enumerate(zip(scores, rows, strict=True)):
            weights = np.exp(own - own.max(axis=0))
            weights /= weights.sum(axis=0)
            np.einsum("ph,pw->hw", weights, values, out=found[tile])
        return torch.from_numpy(found.reshape(-1, self.width)).to(x.device)


class AttentionPoolOfTiles(AttentionPool):
    """The same over tiles of any shape (SigLIP 2 NaFlex): see
    :class:`sdk.models.vision.family.Queries`."""

    def __init__(self, source: Source, config: VisionConfig) -> None:
        super().__init__(source, config)
        self.rows = queried_rows(config)

    def of_tile(self, x: Tensor, where: Places) -> Iterator[Tensor | None]:
        """See :class:`sdk.models.vision.family.Queries`; a tile is one part."""
        for _ in range(0, len(x), self.rows):
            yield None
        yield self.pooled(x, len(x))
