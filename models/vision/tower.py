"""The encoder of a model's images: layers of :class:`sdk.models.decoder.Layer` over patches.

A tile is one sequence, whose patches see each other both ways. Tiles of several images run together
and have the same bits as alone, because each row of an operator depends on its own sequence.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from sdk.kernels.host.torch_import import one_mode
from sdk.kernels.lazy_torch import Tensor, torch
from sdk.kernels.ops import Ops
from sdk.models.architecture import Architecture
from sdk.models.attention import Step
from sdk.models.decoder import Layer
from sdk.models.layers import Source
from sdk.models.parallel import Mesh
from sdk.models.vision.config import VisionConfig
from sdk.models.vision.family import FAMILIES, Family, family, vision_of
from sdk.models.vision.image import ImageInput
from sdk.models.vision.patches import color_table, patch_rows
from sdk.models.vision.sequences import num_pages, sequence_batch, sequence_pages
from sdk.quant.checkpoint import VISION_ROOT, Checkpoint

if TYPE_CHECKING:
    from sdk.kernels.norm import Norm
    from sdk.models.layers import Projection
    from sdk.models.parts import Tensors
    from sdk.quant.weight import Weight


class VisionTensors:
    """A checkpoint in which ``model.…`` is the tower's ``vision.…``."""

    def __init__(self, checkpoint: Checkpoint) -> None:
        self._checkpoint = checkpoint
        self.path, self.format = checkpoint.path, checkpoint.format
        self.config, self.generation_config = checkpoint.config, checkpoint.generation_config
        self.kv_scales: Mapping[str, float] = {}
        self.processor: Mapping[str, Any] = checkpoint.processor
        self.on_bytes: Callable[[int, int], None] | None = None
        self.tokenizer: Any = None

    def weight(self, name: str) -> Weight:
        return self._checkpoint.weight(_ours(name))

    def tensor(self, name: str) -> Tensor:
        return self._checkpoint.tensor(_ours(name))

    def has(self, name: str) -> bool:
        return name.startswith("model.") and self._checkpoint.has(_ours(name))

    def alike(self, one: str, other: str) -> bool:
        return self._checkpoint.alike(_ours(one), _ours(other))

    def entries(self) -> Sequence[Any]:
        return self._checkpoint.entries()

    def unused(self) -> list[str]:
        return self._checkpoint.unused()

    def close(self) -> None:
        self._checkpoint.close()


def _ours(name: str) -> str:
    return VISION_ROOT + name.removeprefix("model.")


def build_tower(
    checkpoint: Checkpoint,
    mesh: Mesh,
    ops: Ops,
    *,
    config: Mapping[str, Any] | None = None,
    shared: Tensors | None = None,
) -> Tower | None:
    """Build the tower of a checkpoint; ``None`` if it has none.

    Every rank has the whole tower, so ``mesh`` only says whether this one needs it: the first stage
    embeds tokens. ``config`` replaces the checkpoint's own. ``shared``: the tensors of another
    engine's tower with the same weights.

    :raises CheckpointError: a tensor is missing or has a wrong shape, by name.
    """
    if not mesh.is_first:
        return None
    facts = vision_of(checkpoint.config if config is None else config)
    if facts is None:
        return None
    own = family(next(name for name, module in FAMILIES.items() if module == facts.family))
    assert own is not None
    rules = Architecture(facts.tower.model_type, layer=own.layer)
    view = VisionTensors(checkpoint)
    with one_mode():
        source = Source(
            view, facts.tower, Mesh(), ops, facts.tower.max_position, shared=shared, own=rules
        )
        return Tower(source, facts, own)


class Tower:
    """The encoder of images and its projector.

    ``linears``, ``vectors``: see :class:`sdk.models.decoder.Decoder`.
    """

    def __init__(self, source: Source, config: VisionConfig, own: Family) -> None:
        self.config, self.ops = config, source.ops
        c = config.tower
        self.num_layers = c.num_layers
        self._table = color_table(config)
        numbers = 3 * config.frames * config.patch**2
        self.patches: Projection = source.matrix("model.patches", c.hidden_size, numbers)
        self.positions: Weight | None = None
        if config.positions:
            self.positions = source.table("model.positions", config.positions)
        self.norm_before: Norm | None = (
            source.norm("model.norm_before") if own.norm_before else None
        )
        self.layers = [
            Layer(source, f"model.layers.{i}", i, own.layer) for i in range(self.num_layers)
        ]
        self.norm: Norm | None = source.norm("model.norm") if own.norm_after else None
        self.projector = own.projector(source, config)
        self.ropes = [source.rope(spec) for spec in c.ropes]
        self.linears = source.linears
        self.vectors = source.vectors

    def begin(self, images: Sequence[ImageInput]) -> TowerRun:
        """Start to encode images: their patches are embedded, no layer has run."""
        return TowerRun(self, images)

    def workspace_bytes(self, patches: int) -> int:
        """See :func:`workspace_bytes`."""
        return workspace_bytes(self.config, patches)


class TowerRun:
    """Images that are being encoded."""

    def __init__(self, tower: Tower, images: Sequence[ImageInput]) -> None:
        self._tower, self._images = tower, tuple(images)
        self._done = 0
        patch = tower.config.patch
        tiles = [tile for image in images for tile in image.tiles]
        self._shapes = [(tile.shape[0] // patch, tile.shape[1] // patch) for tile in tiles]
        lengths = [rows * columns for rows, columns in self._shapes]
        with torch.inference_mode():
            self._batch = sequence_batch(lengths, tower.ops)
            c = tower.config.tower
            self._pages = sequence_pages(num_pages(lengths), c.num_kv_heads, c.head_dim, tower.ops)
            self._delta = self._embedded(tiles)
            self._residual: Tensor | None = None
            angles = [rope.cos_sin(self._batch.positions, tower.ops) for rope in tower.ropes]
            self._step = Step(self._batch, angles)
        self._rows: list[Tensor] = []

    def _embedded(self, tiles: Sequence[Any]) -> Tensor:
        tower, ops = self._tower, self._tower.ops
        patch = tower.config.patch
        rows = [torch.from_numpy(patch_rows(tile, tower._table, patch)) for tile in tiles]
        x = tower.patches(torch.cat(rows).to(ops.device))
        if tower.positions is not None:
            x = ops.add(x, tower.positions.rows(self._batch.positions))
        return x if tower.norm_before is None else ops.norm(x, tower.norm_before)

    def advance(self, layers: int) -> bool:
        """Run up to ``layers`` more layers; ``True`` when all are done, and the projector too."""
        tower, end = self._tower, min(self._done + layers, self._tower.num_layers)
        with torch.inference_mode():
            for layer in tower.layers[self._done : end]:
                self._delta, self._residual = layer(
                    self._delta, self._residual, self._step, [self._pages]
                )
            self._done = end
            if end < tower.num_layers:
                return False
            if not self._rows:
                self._rows = self._projected()
        return True

    def _projected(self) -> list[Tensor]:
        tower, ops = self._tower, self._tower.ops
        assert self._residual is not None
        if tower.norm is None:
            x = ops.add(self._residual, self._delta)
        else:
            x, _ = ops.add_norm(self._delta, self._residual, tower.norm, wide=True)
        rows = tower.projector(x, self._shapes)
        found, first = [], 0
        for image in self._images:
            found.append(rows[first : first + image.num_tokens])
            first += image.num_tokens
        return found

    def rows(self) -> list[Tensor]:
        """For each image float32 ``[num_tokens, features * hidden]``, token by token."""
        if not self._rows:
            raise ValueError("the tower's layers have not all run: advance() says when they have")
        return self._rows


def workspace_bytes(config: VisionConfig, patches: int) -> int:
    """Memory of a run with this many patches beside the weights, at most, in bytes."""
    c = config.tower
    heads = c.num_heads * c.head_dim
    pages = 2 * heads * (patches + 127)
    pixels = 3 * config.patch**2 * patches
    block = max(4 * heads, 3 * c.intermediate_size)
    return 4 * (pages + max(pixels * 2, patches * (block + 3 * c.hidden_size)))
