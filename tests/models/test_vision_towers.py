"""The towers of vision models beside transformers': tiny random models of every family."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from sdk.kernels.operators.ops import Ops
from sdk.loaders.open import open_checkpoint
from sdk.models.mlp import MLP
from sdk.models.parallel import Mesh
from sdk.models.projections import Projection
from sdk.models.vision.anyres import packed_tokens
from sdk.models.vision.memory import tower_bytes
from sdk.models.vision.portions import units
from sdk.models.vision.tower import Tower, build_tower
from sdk.quant.errors import CheckpointError
from tests.models.test_activation_memory import Counting
from tests.models.tiny_mmproj import save_both
from tests.models.tiny_vision import (
    DUAL,
    FREE,
    MODELS,
    expected_rows,
    image,
    picture,
    vision_model,
)

#: Sizes of the tiles of images, by family.
SIZES = {
    "gemma3": [[(56, 56)], [(56, 56), (56, 56)]],
    "gemma4": [[(40, 24)], [(8, 104)], [(64, 56)]],
    "gemma4-e": [[(40, 24)], [(16, 8)], [(64, 56)]],
    "qwen3_vl": [[(40, 24)], [(8, 104)], [(64, 56)]],
    "idefics3": [[(42, 42)] * 3, [(42, 42)]],
    "smolvlm": [[(56, 56)] * 2],
    "qwen2_5_vl": [[(40, 24)], [(8, 104)], [(64, 56)]],
    "internvl": [[(56, 56)] * 2, [(56, 56)]],
    "lfm2_vl": [[(28, 42), (70, 84)], [(14, 112)]],
    "llava": [[(56, 56)], [(56, 56)]],
    # sizes of whole images
    "llava_next": [[(90, 40)], [(57, 113)], [(100, 101)]],
    "llava-layers": [[(56, 56)], [(56, 56)]],
    "llava-siglip": [[(56, 56)], [(56, 56)]],
    "llava-pixtral": [[(40, 24)], [(8, 64)], [(64, 56)]],
    "llava_next-siglip": [[(90, 40)], [(57, 113)], [(100, 101)]],
    "llava_onevision": [[(300, 30)], [(57, 113)], [(160, 170)]],
    "minicpmv4_6": [[(56, 84), (28, 112)], [(56, 56)]],
    "minicpmv4_6-4x": [[(28, 70), (56, 56)]],
    "mistral3": [[(40, 24)], [(8, 64)], [(64, 56)]],
    "qwen3_vl_moe": [[(40, 24)], [(64, 56)]],
    "paligemma": [[(56, 56)], [(56, 56)]],
    "qwen3_5": [[(40, 24)], [(8, 104)]],
    "clip": [[(56, 56)], [(56, 56)]],
    "siglip2": [[(28, 42)], [(7, 14)], [(70, 21)]],
    "siglip": [[(56, 56)], [(56, 56)]],
}


@pytest.fixture
def ops() -> Iterator[Ops]:
    found = Ops(num_threads=1, compute="exact")
    yield found
    found.close()


def tower_of(folder: Path, ops: Ops) -> Tower:
    found = build_tower(open_checkpoint(folder), Mesh(), ops)
    assert found is not None
    return found


def encode(tower: Tower, images: Any, layers: int = 1000) -> list[torch.Tensor]:
    run = tower.begin(images)
    while not run.advance(layers):
        pass
    return run.rows()


@pytest.mark.parametrize("name", [*MODELS, *DUAL])
def test_a_tower_computes_what_transformers_does(name: str, tmp_path: Path, ops: Ops) -> None:
    oracle = vision_model(name)
    oracle.save_pretrained(tmp_path)
    tower = tower_of(tmp_path, ops)
    make: Any = picture if tower.config.pictures else image
    images = [
        make(tower.config, sizes[0] if make is picture else sizes, i)
        for i, sizes in enumerate(SIZES[name])
    ]
    wanted = expected_rows(oracle, tower.config, images)
    if tower.config.pictures:  # what the processor would say
        images = [own._replace(num_tokens=len(r)) for own, r in zip(images, wanted, strict=True)]
    found = encode(tower, images)
    for own, rows, expected in zip(images, found, wanted, strict=True):
        width = tower.config.features * tower.config.hidden_size
        assert rows.shape == expected.shape == (own.num_tokens, width)
        assert rows.dtype == torch.float32
        assert 0.3 < expected.std() < 30
        assert (rows - expected).abs().max() <= 1e-5 * expected.abs().max()
    for own, rows in zip(images, found, strict=True):  # alone, and layer by layer: the same bits
        assert torch.equal(encode(tower, [own], layers=1)[0], rows)


def test_portions_count_layers_of_groups_of_tiles(
    tmp_path: Path, ops: Ops, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Tiles run in groups, so that many of them need no more memory; their bits do not change."""
    vision_model("gemma3").save_pretrained(tmp_path)
    tower = tower_of(tmp_path, ops)
    pictures = [image(tower.config, [(56, 56)] * count, count) for count in (3, 2)]
    expected = encode(tower, pictures)
    monkeypatch.setattr("sdk.models.vision.portions.GROUP", 128)  # two tiles of 64 patches
    run = tower.begin(pictures)
    portions, patches = [], []
    while True:
        patches.append(run.patches)
        portions.append(run.advance(2))
        if portions[-1]:
            break
    # three groups of three layers each, nine layers: two at a time
    assert portions == [False] * 4 + [True] and patches[:3] == [128, 128, 128]
    assert run.patches == 0
    for own, rows in zip(run.rows(), expected, strict=True):
        assert torch.equal(own, rows)


@pytest.mark.parametrize("name", [*MODELS, *DUAL])
def test_parts_of_a_layer_have_the_bits_of_the_whole_and_a_bound(
    name: str, tmp_path: Path, ops: Ops, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No part multiplies more rows with matrices, or compares more queries with keys, than its
    number of operations allows."""
    vision_model(name).save_pretrained(tmp_path)
    tower = tower_of(tmp_path, ops)
    make: Any = picture if tower.config.pictures else image
    sizes = SIZES[name][-1]
    own = make(tower.config, sizes[0] if make is picture else sizes, 5)
    if make is picture:
        own = own._replace(num_tokens=packed_tokens(own, tower.config))
    [whole] = encode(tower, [own])
    hidden = tower.config.tower.hidden_size
    most = 24 * hidden**2 * 22
    monkeypatch.setattr("sdk.models.vision.portions.PART_OPERATIONS", most)
    work = [0]
    attention, mlp = ops.attention, MLP.__call__

    def counted_attention(q: Any, pages: Any, batch: Any, **how: Any) -> Any:
        work[0] += sum(4 * hidden * count * context for count, context in batch.lengths)
        return attention(q, pages, batch, **how)

    def counted_mlp(self: Any, x: Any) -> Any:
        work[0] += len(x) * 18 * hidden**2
        return mlp(self, x)

    monkeypatch.setattr(ops, "attention", counted_attention)
    monkeypatch.setattr(MLP, "__call__", counted_mlp)
    run, parts, busy = tower.begin([own]), 0, 0
    done = False
    while not done:
        work[0] = 0
        done, parts = run.advance(1), parts + 1
        busy += work[0] > 0
        assert work[0] <= most
    assert parts > busy > tower.num_layers
    tiles = [tile.shape[0] * tile.shape[1] // tower.config.patch**2 for tile in own.tiles]
    lengths = [one + tower.config.class_token for one in tiles]
    assert parts == units(lengths, tower.config)  # as the scheduler counts them
    assert torch.equal(run.rows()[0], whole)


def test_what_a_tower_does_not_read_is_refused(tmp_path: Path, ops: Ops) -> None:
    vision_model("gemma3").save_pretrained(tmp_path)
    tower = tower_of(tmp_path, ops)
    good = image(tower.config, [(56, 56)], 1)
    with pytest.raises(ValueError, match="a tile of 56 x 56 pixels and 4 x 3 tokens, expected"):
        tower.begin([good._replace(grids=((4, 3),))])
    with pytest.raises(ValueError, match="a tile of 8 x 4 patches, expected 8 x 8"):
        tower.begin([image(tower.config, [(56, 28)], 1)])
    with pytest.raises(ValueError, match="15 tokens, expected 16"):
        tower.begin([good._replace(num_tokens=15)])
    run = tower.begin([good])
    with pytest.raises(ValueError, match="layers are left to run"):
        run.rows()


def test_the_weights_of_a_tower_are_counted_from_headers(tmp_path: Path, ops: Ops) -> None:
    vision_model("qwen3_vl").save_pretrained(tmp_path)
    checkpoint = open_checkpoint(tmp_path)
    found = build_tower(checkpoint, Mesh(), ops)
    assert found is not None
    weights = {id(linear.weight): linear.weight.nbytes for _, linear in found.linears}
    held = sum(weights.values()) + sum(4 * own.numel() for own in found.vectors.values())
    # The second picture of a patch is added to the first one; rows are packed in blocks of 16, of
    # which these matrices of 72 and 104 rows fill the last one to a half.
    second = 4 * 3 * found.config.patch**2 * found.config.tower.hidden_size
    counted = tower_bytes(checkpoint.entries()) - second
    assert abs(counted - held) <= 0.02 * held


@pytest.mark.parametrize("name", ["gemma3", "gemma4-e", "qwen2_5_vl", "qwen3_vl", "internvl"])
def test_a_run_needs_no_more_memory_than_planned(name: str, tmp_path: Path) -> None:
    ops = Ops("cpu", backends=("reference",), num_threads=1)
    counting = Counting(ops)
    vision_model(name).save_pretrained(tmp_path)
    tower = tower_of(tmp_path, ops)
    sizes = SIZES[name][-1] if name in FREE else SIZES[name][0] * 3
    picture_of = image(tower.config, sizes, 3)
    run = tower.begin([picture_of])
    patches, pages = run.patches, 0
    while not run.advance(1):
        group = run._group
        assert group is not None
        pages = sum(own.k.nbytes + own.v.nbytes for own in group._pages)
    ops.close()
    planned = tower.workspace_bytes(patches)
    assert counting.most + pages <= planned <= 4 * (counting.most + pages)


@pytest.mark.parametrize(
    ("values", "why"),
    [
        ([0.5, 0.7], "k_proj.input_max: expected one number, found"),
        ([-2.0], "k_proj: expected ranges of inputs and results, found"),
        ([float("nan")], "k_proj: expected ranges of inputs and results, found"),
    ],
)
def test_a_range_that_is_none_is_refused(
    values: list[float], why: str, tmp_path: Path, ops: Ops
) -> None:
    model = vision_model("gemma4-e")
    attention = model.model.vision_tower.encoder.layers[1].self_attn
    attention.k_proj.input_max = torch.tensor(values)
    model.save_pretrained(tmp_path)
    with pytest.raises(CheckpointError, match=why):
        tower_of(tmp_path, ops)


def test_without_ranges_projections_are_plain_and_without_the_flag_none_is_read(
    tmp_path: Path, ops: Ops
) -> None:
    model = vision_model("gemma4-e")
    model.save_pretrained(tmp_path / "clipped")
    for name, buffer in model.named_buffers():
        if name.endswith(("_min", "_max")):
            buffer.fill_(-torch.inf if name.endswith("min") else torch.inf)
    model.save_pretrained(tmp_path / "open")
    config = tmp_path / "clipped" / "config.json"
    config.write_text(config.read_text().replace('"use_clipped_linears": true', '"x": 0'))
    for folder in ("clipped", "open"):
        tower = tower_of(tmp_path / folder, ops)
        layers: Any = tower.layers
        kinds = {type(own) for one in layers for own in (one.mlp.down, one.mixers[0].qkv)}
        assert kinds == {Projection}


def test_towers_run_without_torch(tmp_path: Path) -> None:
    """Of a model that does not rotate, and of one that does."""
    for name in ("gemma3", "qwen3_vl"):
        (tmp_path / name).mkdir()
        path = save_both(vision_model(name), name, tmp_path / name)
        source = f"""
import sys
import numpy as np
from sdk.kernels.operators.ops import Ops
from sdk.loaders.open import open_checkpoint
from sdk.models.mlp import MLP
from sdk.models.parallel import Mesh
from sdk.models.vision.anyres import packed_tokens
from sdk.models.vision.image import ImageInput
from sdk.models.vision.tower import build_tower

tower = build_tower(open_checkpoint({str(path)!r}), Mesh(), Ops(num_threads=1))
side = tower.config.patch * tower.config.merge * 4
picture = ImageInput((np.zeros((side, side, 3), np.uint8),), ((4, 4),), 16, b"")
run = tower.begin([picture])
assert run.advance(100) and run.rows()[0].shape == (16, 64 * tower.config.features)
assert "torch" not in sys.modules
"""
        subprocess.run([sys.executable, "-c", source], check=True)
