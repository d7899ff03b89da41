"""The encoder of a model's images: layers of :class:`sdk.models.decoder.Layer` over patches.

A tile is one sequence, whose patches see each other both ways. Tiles of several images run together
and have the same bits as alone, because each row of an operator depends on its own sequence.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from sdk.kernels.host.torch_import import one_mode
from sdk.kernels.lazy_torch import Tensor, torch
from sdk.kernels.operators.ops import Ops
from sdk.models.architecture import Architecture
from sdk.models.configs.config import ModelConfig
from sdk.models.decoder import Layer
from sdk.models.mixers.attention import Step
from sdk.models.parallel import Mesh
from sdk.models.rope import RopeSpec
from sdk.models.source import Source
from sdk.models.vision.anyres import Packer
from sdk.models.vision.clipped import ClippedSource
from sdk.models.vision.config import MAX_SIDE, EncoderSpec, VisionConfig
from sdk.models.vision.family import Family, Queries, family_in, vision_of
from sdk.models.vision.image import ImageInput
from sdk.models.vision.inner import InnerMerger
from sdk.models.vision.memory import workspace_bytes
from sdk.models.vision.patches import Tile, checked, color_table, patch_rows, tile_groups, windowed
from sdk.models.vision.portions import Parts, after_inner, inner_size, parts_of
from sdk.models.vision.sequences import (
    PAGE_SIZE,
    SHORT,
    num_pages,
    sequence_batch,
    sequence_pages,
)
from sdk.models.vision.stored import stored
from sdk.quant.checkpoint import VISION_ROOT, Checkpoint

if TYPE_CHECKING:
    from sdk.kernels.operators.norm import Norm
    from sdk.models.parts import Tensors
    from sdk.models.vision.family import Projector
    from sdk.models.vision.positions import Array
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
    own = family_in(facts.family)
    layers = _layers(facts.tower)
    if not _in_float32(checkpoint):
        ops = ops.rounding()
    rules = Architecture(layers.model_type, layer=own.layer)
    view = VisionTensors(checkpoint)
    with one_mode():
        kind = ClippedSource if facts.clipped else Source
        source = kind(view, layers, Mesh(), ops, layers.max_position, shared=shared, own=rules)
        return Tower(source, facts, own)


def _in_float32(checkpoint: Checkpoint) -> bool:
    """Whether a matrix of a layer is stored in float32, so that less would lose what it has."""
    layers = f"{VISION_ROOT}layers."
    every = (entry for entry in checkpoint.entries() if entry.name.startswith(layers))
    return any(entry.format == "F32" and len(entry.shape) == 2 for entry in every)


def _layers(tower: EncoderSpec) -> ModelConfig:
    """The layers as those of an encoder of text, whose embeddings are given."""
    count = tower.num_layers
    kind = "none" if tower.rotary_dim is None else "default"
    return ModelConfig(
        model_type=tower.model_type,
        vocab_size=1,
        hidden_size=tower.hidden_size,
        intermediate_size=tower.intermediate_size,
        num_layers=count,
        num_heads=tower.num_heads,
        num_kv_heads=tower.num_heads,
        head_dim=tower.head_dim,
        norm_eps=tower.norm_eps,
        activation=tower.activation,
        activation_slope=tower.activation_slope,
        max_position=MAX_SIDE,
        ropes=(RopeSpec(tower.theta, tower.rotary_dim or 0, MAX_SIDE, kind),),
        rope_of_layer=(0,) * count,
        sliding_windows=(None,) * count,
        attention_scale=tower.attention_scale,
        attention_softcap=None,
        final_softcap=None,
        embedding_scale=1.0,
        residual_scale=1.0,
        logits_scale=1.0,
        attention_bias=tower.attention_bias,
        output_bias=tower.output_bias,
        mlp_bias=tower.mlp_bias,
        down_bias=tower.mlp_bias,
        tie_word_embeddings=True,
        causal=False,
    )


class Tower:
    """The encoder of images and its projector.

    ``linears``, ``vectors``: see :class:`sdk.models.decoder.Decoder`.
    """

    def __init__(self, source: Source, config: VisionConfig, own: Family) -> None:
        self.config, self.ops, self.family = config, source.ops, own
        self.num_layers: int = config.tower.num_layers
        self.colors = color_table(config)
        self.patches = source.given("model.patches", lambda: _patch_matrix(source, config))
        #: Rows of learned positions, float32 ``[positions, width]``.
        self.positions: Array | None = None
        if config.positions:
            self.positions = _position_table(source, config)
        #: What a tile begins with, with its position, float32 ``[width]``.
        self.class_row: Tensor | None = None
        if config.class_token:
            self.class_row = _class_row(source, config, self.positions)
        self.norm_before: Norm | None = None
        if config.norm_before:
            self.norm_before = source.norm("model.norm_before")
        self.layers = [
            Layer(source, f"model.layers.{i}", i, own.layer) for i in range(self.num_layers)
        ]
        #: What makes fewer rows of those of a layer.
        self.inner: InnerMerger | None = InnerMerger(source, config) if config.inner > 1 else None
        self.norm: Norm | None = source.norm("model.norm") if own.norm_after else None
        self.projector = own.projector(source, config)
        self.deepstack: list[Projector] = []
        if own.deepstack is not None:
            numbers = range(len(config.deepstack))
            self.deepstack = [own.deepstack(source, config, number) for number in numbers]
        self.packer: Packer | None = None
        if config.pictures:
            newline = stored(source, "projector.newline", (config.hidden_size,))
            self.packer = Packer(
                config.pictures,
                config.tile_side * config.patch,
                config.tile_side // config.merge,
                newline.to(self.ops.device),
                config.most_tiles,
            )
        self.turns: tuple[Tensor, Tensor] | None = None
        if own.frequencies is not None:
            frequencies, axes = map(torch.from_numpy, own.frequencies(config))
            self.turns = frequencies.to(self.ops.device), axes.to(self.ops.device)
        self.linears = source.linears
        self.vectors = source.vectors

    def begin(self, images: Sequence[ImageInput]) -> TowerRun:
        """Start to encode images: no layer has run.

        :raises ValueError: the tiles of an image are not what this tower reads.
        """
        return TowerRun(self, images)

    def workspace_bytes(self, patches: int) -> int:
        """See :func:`sdk.models.vision.memory.workspace_bytes`."""
        return workspace_bytes(self.config, patches)


def _position_table(source: Source, config: VisionConfig) -> Array:
    """Rows of learned positions, float32 ``[positions, width]``."""
    rows, width = config.positions, config.tower.hidden_size
    shapes = (rows, width), (1, rows, width), (2, rows // 2, width)
    found: Array = stored(source, "positions.weight", *shapes).numpy(force=True)
    return found.reshape(rows, width)


def _class_row(source: Source, config: VisionConfig, positions: Array | None) -> Tensor:
    width = config.tower.hidden_size
    row = stored(source, "class_token", (width,), (1, 1, width)).flatten()
    row = row if positions is None else row + torch.from_numpy(positions[0].copy())
    return row.to(source.ops.device)


def _patch_matrix(source: Source, config: VisionConfig) -> Tensor:
    """What the numbers of a patch are multiplied with, float32 ``[hidden, 3 * patch * patch]``. The
    pictures of a patch are equal, so the weights of each are added up. A matrix in a file is for
    pixels whose colors are neighbours."""
    side, hidden = config.patch, config.tower.hidden_size
    frames = () if config.frames == 1 else (config.frames,)
    shapes = (hidden, 3, *frames, side, side), (hidden, 3 * side * side)
    values = stored(source, "patches.weight", *shapes, keep=False)
    if values.dim() == 2:
        values = values.view(hidden, side, side, 3).permute(0, 3, 1, 2)
    elif frames:
        values = values.sum(dim=2)
    return values.reshape(hidden, -1)


class TowerRun:
    """Images that are being encoded, as many tiles at a time as have ``GROUP`` patches."""

    def __init__(self, tower: Tower, images: Sequence[ImageInput]) -> None:
        self._tower, self._images = tower, tuple(images)
        tiles = [tile for image in images for tile in checked(image, tower.config)]
        self._waiting = tile_groups(tiles)
        self._group: TileGroup | None = None
        self._found: list[Tensor] = []

    @property
    def patches(self) -> int:
        """Of the tiles that run next; 0: all is done."""
        if self._group is not None:
            return self._group.patches
        more = int(self._tower.config.class_token)
        tiles = self._waiting[0] if self._waiting else []
        return sum(len(where.rows) + more for _, where in tiles)

    def advance(self, parts: int) -> bool:
        """Run up to so many more parts, as :mod:`sdk.models.vision.portions` counts them; ``True``
        when everything is done."""
        with torch.inference_mode():
            while self._waiting or self._group is not None:
                if parts <= 0:
                    return False
                if self._group is None:
                    self._group = TileGroup(self._tower, self._waiting.pop(0))
                self._group.advance()
                parts -= 1
                if self._group.rows is not None:
                    self._found.append(self._group.rows)
                    self._group = None
        return True

    def rows(self) -> list[Tensor]:
        """For each image float32 ``[num_tokens, features * hidden]``, token by token.

        :raises ValueError: not all layers have run.
        """
        if self._waiting or self._group is not None:
            raise ValueError("rows: layers are left to run, advance() returns True when none is")
        every, found, first = torch.cat(self._found), [], 0
        pack = self._tower.packer
        for image in self._images:
            count = sum(down * across for down, across in image.grids)
            rows = every[first : first + count]
            found.append(rows if pack is None else pack(rows, image))
            first += count
        return found


class TileGroup:
    """Tiles that run together, each one a sequence."""

    def __init__(self, tower: Tower, tiles: Sequence[Tile]) -> None:
        self._tower = tower
        self._class = int(tower.class_row is not None)
        self._tiles = tiles
        self._lengths = lengths = [self._class + len(where.rows) for _, where in tiles]
        self.patches = sum(lengths)
        #: For each token its row, where windows reorder them.
        self._order: Tensor | None = None
        #: The rows of patches, where there are others.
        self._kept: Tensor | None = None
        windows = lengths
        if tower.config.window:
            tiles, windows = self._in_windows(tiles)
        c, ops = tower.config.tower, tower.ops
        size = SHORT if tower.config.window else PAGE_SIZE
        pages = max(num_pages(lengths, size), num_pages(windows, size))
        self._pages = [sequence_pages(pages, size, c.num_heads, c.head_dim, ops)]
        angles = self._angles(tiles)
        self._parts = parts_of(lengths, tower.config)
        #: Of layers that see whole tiles, and of those that see windows.
        self._full = self._windows = Steps(lengths, size, ops, angles, self._parts)
        if tower.config.window:
            self._windows = Steps(windows, size, ops, angles, self._parts)
        self._delta = self._embedded(tiles)
        self._residual: Tensor | None = None
        #: By layer, the results that are side by side in what the projector reads.
        self._read: dict[int, Tensor] = {}
        #: The tokens, float32 ``[tokens, features * hidden]``, when all parts have run.
        self.rows: Tensor | None = None
        self._run = self._each_part()
        next(self._run)

    def advance(self) -> None:
        """Run the next part of those that :mod:`sdk.models.vision.portions` counts."""
        next(self._run, None)

    def _each_part(self) -> Iterator[None]:
        """Each part begins with a yield."""
        tower, deepstack = self._tower, list[Tensor]()
        for number, layer in enumerate(tower.layers):
            steps = self._full if number in tower.config.full else self._windows
            if self._parts is None:
                yield
                self._delta, self._residual = layer(
                    self._delta, self._residual, steps.all, self._pages
                )
            else:
                yield from self._layer_in_parts(layer, steps)
            if number + 1 in tower.config.side_by_side:
                self._read[number + 1] = self._patches_alone(self._stream())
            if number in tower.config.deepstack:
                project = tower.deepstack[len(deepstack)]
                deepstack.append((yield from self._projected(project, self._stream())))
            if tower.inner is not None and number == tower.config.inner_after:
                yield from self._with_fewer_rows(tower.inner)
        if isinstance(tower.projector, Queries):
            rows = yield from self._queried(tower.projector, self._result())
        else:
            rows = yield from self._projected(tower.projector, self._result())
        if self._order is not None:
            rows = tower.ops.select_rows(rows, self._order)
        self.rows = torch.cat([rows, *deepstack], dim=1) if deepstack else rows

    def _layer_in_parts(self, layer: Layer, steps: Steps) -> Iterator[None]:
        [pages] = self._pages
        queries, sums, deltas = list[Tensor](), list[Tensor](), list[Tensor]()
        for (begin, end), step in steps.keys:
            yield
            before = None if self._residual is None else self._residual[begin:end]
            q, total = layer.queries(self._delta[begin:end], before, step, pages)
            queries.append(q)
            sums.append(total)
        q, residual = torch.cat(queries), torch.cat(sums)
        sums = []
        for (begin, end), step in steps.rest:
            yield
            delta, total = layer.rest(q[begin:end], residual[begin:end], step, pages)
            deltas.append(delta)
            sums.append(total)
        self._delta, self._residual = torch.cat(deltas), torch.cat(sums)

    def _with_fewer_rows(self, merger: InnerMerger) -> Iterator[None]:
        """Squares of rows become one row, and sequences shorter."""
        config, x, found = self._tower.config, self._stream(), list[Tensor]()
        size = len(x) if self._parts is None else inner_size(self._parts, config)
        for begin in range(0, len(x), size):
            if self._parts is not None:
                yield
            found.append(merger(x[begin : begin + size]))
        self._delta, self._residual = torch.cat(found), None
        lengths, ops = after_inner(self._lengths, config), self._tower.ops
        empty = ops.empty(sum(lengths), 0)
        self._parts = parts_of(lengths, config)
        self._full = self._windows = Steps(lengths, PAGE_SIZE, ops, (empty, empty), self._parts)

    def _projected(self, project: Projector, x: Tensor) -> Generator[None, None, Tensor]:
        """Tokens of patches."""
        if self._parts is None:
            return project(x)
        found, size = list[Tensor](), self._parts.projected
        for begin in range(0, len(x), size):
            yield
            found.append(project(x[begin : begin + size]))
        return torch.cat(found)

    def _queried(self, project: Queries, x: Tensor) -> Generator[None, None, Tensor]:
        """Tokens of tiles."""
        found, first = list[Tensor](), 0
        for _, where in self._tiles:
            count = len(where.rows)
            for rows in project.of_tile(x[first : first + count], where):
                if rows is None:
                    yield
                else:
                    found.append(rows)
            first += count
        return torch.cat(found)

    def _in_windows(self, tiles: Sequence[Tile]) -> tuple[list[Tile], list[int]]:
        """The tiles with their patches window by window, and the patches of each window."""
        found, every, back, first = list[Tile](), list[int](), [], 0
        for tile, where in tiles:
            places, lengths, order = windowed(where, self._tower.config)
            found.append((tile, places))
            every += lengths
            back.append(order + first)
            first += len(order)
        self._order = torch.from_numpy(np.concatenate(back)).to(self._tower.ops.device)
        return found, every

    def _angles(self, tiles: Sequence[Tile]) -> tuple[Tensor, Tensor]:
        ops, turns = self._tower.ops, self._tower.turns
        if turns is None:
            empty = ops.empty(self.patches, 0)
            return empty, empty
        at = np.stack(
            [
                np.concatenate([where.rows for _, where in tiles]),
                np.concatenate([where.columns for _, where in tiles]),
            ]
        )
        return ops.rope_angles(torch.from_numpy(at).to(ops.device), turns[0], 1.0, turns[1])

    def _embedded(self, tiles: Sequence[Tile]) -> Tensor:
        """What the first layer reads."""
        tower, ops = self._tower, self._tower.ops
        patch = tower.config.patch
        pixels = [patch_rows(tile, tower.colors, patch, where) for tile, where in tiles]
        x = tower.patches(torch.from_numpy(np.concatenate(pixels)).to(ops.device))
        if tower.positions is not None:
            add = tower.family.positions
            assert add is not None
            own = [add(tower.config, tower.positions, where) for _, where in tiles]
            x = ops.add(x, torch.from_numpy(np.concatenate(own)).to(ops.device))
        if tower.class_row is not None:
            x = self._with_class(x, tiles, tower.class_row)
        return x if tower.norm_before is None else ops.norm(x, tower.norm_before)

    def _with_class(self, x: Tensor, tiles: Sequence[Tile], row: Tensor) -> Tensor:
        """With a row before those of each tile, which the results leave out, or which alone they
        have (``VisionConfig.class_token``)."""
        whole, first, kept = self._tower.ops.empty(self.patches, x.shape[1]), 0, []
        for number, (_, where) in enumerate(tiles):
            count, begin = len(where.rows), first + number + 1
            whole[begin - 1] = row
            whole[begin : begin + count] = x[first : first + count]
            own = (begin - 1, begin) if self._tower.config.dual else (begin, begin + count)
            kept.append(np.arange(*own))
            first += count
        self._kept = torch.from_numpy(np.concatenate(kept)).to(x.device)
        return whole

    def _stream(self) -> Tensor:
        """What comes out of the last layer that ran, in memory of its own."""
        ops = self._tower.ops
        assert self._residual is not None
        stream = ops.add(ops.zeros(*self._delta.shape), self._residual)
        return ops.add(stream, self._delta)

    def _result(self) -> Tensor:
        """What the projector reads, float32 ``[patches, width]``."""
        tower, ops = self._tower, self._tower.ops
        assert self._residual is not None
        if self._read:
            return torch.cat([self._read[number] for number in tower.config.side_by_side], dim=1)
        if tower.norm is None:
            x = ops.add(self._residual, self._delta)
        else:
            x, _ = ops.add_norm(self._delta, self._residual, tower.norm, wide=True)
        return self._patches_alone(x)

    def _patches_alone(self, x: Tensor) -> Tensor:
        """Without the rows that begin tiles (of a dual encoder without those of patches)."""
        return x if self._kept is None else self._tower.ops.select_rows(x, self._kept)


#: Rows from the first to before the last, and the batch in which they run.
Part = tuple[tuple[int, int], Step]


class Steps:
    """The batches of layers whose sequences have these lengths: of all rows, and of the parts in
    which keys are written and in which they are read."""

    def __init__(
        self,
        lengths: Sequence[int],
        page_size: int,
        ops: Ops,
        angles: tuple[Tensor, Tensor],
        parts: Parts | None,
    ) -> None:
        self.all = Step(sequence_batch(lengths, page_size, ops), [angles])
        self.keys: list[Part] = []
        self.rest: list[Part] = []
        if parts is None:
            return
        total = sum(lengths)
        for whole, size, found in ((False, parts.keys, self.keys), (True, parts.rest, self.rest)):
            for begin in range(0, total, size):
                rows = begin, min(begin + size, total)
                turns = angles[0][slice(*rows)], angles[1][slice(*rows)]
                batch = sequence_batch(lengths, page_size, ops, rows, whole=whole)
                found.append((rows, Step(batch, [turns])))
