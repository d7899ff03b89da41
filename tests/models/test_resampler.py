"""MiniCPM-V up to 4.5, whose tokens are queries to the patches of a tile, beside float64."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch

from sdk import LLM
from sdk.images.processors import image_processor
from sdk.kernels.operators.ops import Ops
from sdk.loaders.gguf_files.checkpoint import GgufCheckpoint
from sdk.loaders.open import open_checkpoint
from sdk.models.parallel import Mesh
from sdk.models.vision.family import VISION, WHOLE
from sdk.models.vision.image import ImageInput
from sdk.models.vision.portions import units
from sdk.models.vision.tower import Tower, build_tower
from sdk.quant.errors import CheckpointError, UnsupportedError
from tests.models.test_vision_towers import encode
from tests.tiny_minicpmv import QUERIES, TinyMiniCPM


@pytest.fixture
def ops() -> Iterator[Ops]:
    found = Ops(num_threads=1, compute="exact")
    yield found
    found.close()


def image(sizes: list[tuple[int, int]], seed: int) -> ImageInput:
    noise = np.random.default_rng(seed)
    tiles = tuple(noise.integers(0, 256, (*size, 3), np.uint8) for size in sizes)
    grids = ((1, QUERIES),) * len(tiles)
    return ImageInput(tiles, grids, QUERIES * len(tiles), bytes([seed]) * 32)


def tower_of(path: Path, ops: Ops) -> Tower:
    found = build_tower(open_checkpoint(path), Mesh(), ops)
    assert found is not None
    return found


#: One tile has fewer patches than there are queries.
IMAGES = [image([(56, 84), (35, 28)], 1), image([(7, 14)], 2)]


def test_queries_find_what_they_do_in_float64(tmp_path: Path, ops: Ops) -> None:
    model = TinyMiniCPM()
    model.save(tmp_path)
    tower = tower_of(tmp_path, ops)
    found = encode(tower, IMAGES)
    for own, rows in zip(IMAGES, found, strict=True):
        expected = model.rows(own.tiles)
        assert rows.shape == expected.shape and 0.3 < expected.std() < 30
        assert (rows - expected).abs().max() <= 1e-5 * expected.abs().max()
    for own, rows in zip(IMAGES, found, strict=True):  # alone, and part by part: the same bits
        assert torch.equal(encode(tower, [own], layers=1)[0], rows)


def test_parts_have_the_bits_of_the_whole_and_are_counted(
    tmp_path: Path, ops: Ops, monkeypatch: pytest.MonkeyPatch
) -> None:
    TinyMiniCPM().save(tmp_path)
    tower = tower_of(tmp_path, ops)
    own = IMAGES[0]
    [whole] = encode(tower, [own])
    hidden = tower.config.tower.hidden_size
    monkeypatch.setattr("sdk.models.vision.portions.PART_OPERATIONS", 24 * hidden**2 * 22)
    run, parts = tower.begin([own]), 1
    while not run.advance(1):
        parts += 1
    lengths = [tile.shape[0] * tile.shape[1] // 49 for tile in own.tiles]
    assert parts == units(lengths, tower.config) > 3 * tower.num_layers
    assert torch.equal(run.rows()[0], whole)


@pytest.mark.parametrize("version", ["2.6", "4.0", "4.5"])
def test_a_file_has_the_tower_of_its_folder(version: str, tmp_path: Path, ops: Ops) -> None:
    model = TinyMiniCPM(version)
    model.save(tmp_path / "folder")
    (tmp_path / "files").mkdir()
    checkpoint = open_checkpoint(model.save_files(tmp_path / "files"))
    assert isinstance(checkpoint, GgufCheckpoint) and checkpoint.mmproj is not None
    own, folder = build_tower(checkpoint, Mesh(), ops), tower_of(tmp_path / "folder", ops)
    assert own is not None
    assert not [x for x in checkpoint.unused() if x.startswith(("v.", "resampler."))]
    assert own.config.token_id == (90 if version == "4.5" else 0)  # as in Llama's vocabulary
    found, expected = encode(own, IMAGES), encode(folder, IMAGES)
    for one, other in zip(found, expected, strict=True):
        assert (one - other).abs().max() <= 2e-6 * other.abs().max()
    whole = {**checkpoint.config[WHOLE], VISION: checkpoint.config[VISION]}
    processor = image_processor(whole, checkpoint.processor)
    assert processor.num_tokens(56, 56) == QUERIES


def test_what_is_not_the_model_described_here_is_refused(tmp_path: Path, ops: Ops) -> None:
    model = TinyMiniCPM()
    path = model.save_files(tmp_path, version=2)
    with pytest.raises(UnsupportedError, match=r"minicpmv_version: expected one of 3, .* found 2"):
        open_checkpoint(path, mmproj=tmp_path / "mmproj-model-f32.gguf")
    folder = tmp_path / "folder"
    model.save(folder, drop_vision_last_layer=True)
    with pytest.raises(UnsupportedError, match="drop_vision_last_layer: expected False, found 'Tr"):
        open_checkpoint(folder)
    model.save(folder, scale_emb=12)
    with pytest.raises(UnsupportedError, match="scale_emb: expected none, found 12"):
        open_checkpoint(folder)
    model.save(folder, query_num=QUERIES + 1)
    with pytest.raises(CheckpointError, match=r"projector.query: expected shape \[17, 256\]"):
        tower_of(folder, ops)
    model.save(folder)
    (folder / "tokenizer.json").write_text("{}")
    with pytest.raises(CheckpointError, match="expected a token <unk>, which stands for images"):
        open_checkpoint(folder)
    model.save(folder, version=2.5)
    with pytest.raises(UnsupportedError, match=r"code beside its weights .MiniCPM-V up to 2\.5"):
        LLM.plan(str(folder))
    model.save(folder)
    tower = tower_of(folder, ops)
    with pytest.raises(ValueError, match=r"sides in multiples of 7 pixels and 1 x 16 tokens"):
        tower.begin([IMAGES[0]._replace(grids=((1, 16), (4, 4)))])
