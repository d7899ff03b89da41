"""The towers of vision models beside transformers': tiny random models of every family."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from sdk.kernels.ops import Ops
from sdk.loaders.open import open_checkpoint
from sdk.models.parallel import Mesh
from sdk.models.vision.tower import Tower, build_tower
from tests.models.tiny_vision import MODELS, expected_rows, image, vision_model

#: Sizes of the tiles of images, by family.
SIZES = {
    "gemma3": [[(56, 56)], [(56, 56), (56, 56)]],
    "qwen3_vl": [[(40, 24)], [(8, 104)], [(64, 56)]],
    "idefics3": [[(42, 42)] * 3, [(42, 42)]],
    "smolvlm": [[(56, 56)] * 2],
    "qwen2_5_vl": [[(40, 24)], [(8, 104)], [(64, 56)]],
    "internvl": [[(56, 56)] * 2, [(56, 56)]],
    "lfm2_vl": [[(28, 42), (70, 84)], [(14, 112)]],
    "llava": [[(56, 56)], [(56, 56)]],
    "mistral3": [[(40, 24)], [(8, 64)], [(64, 56)]],
    "qwen3_5": [[(40, 24)], [(8, 104)]],
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


@pytest.mark.parametrize("name", MODELS)
def test_a_tower_computes_what_transformers_does(name: str, tmp_path: Path, ops: Ops) -> None:
    oracle = vision_model(name)
    oracle.save_pretrained(tmp_path)
    tower = tower_of(tmp_path, ops)
    images = [image(tower.config, sizes, i) for i, sizes in enumerate(SIZES[name])]
    found = encode(tower, images)
    for own, rows, expected in zip(
        images, found, expected_rows(oracle, tower.config, images), strict=True
    ):
        width = tower.config.features * tower.config.hidden_size
        assert rows.shape == expected.shape == (own.num_tokens, width)
        assert rows.dtype == torch.float32
        assert 0.3 < expected.std() < 30
        assert (rows - expected).abs().max() <= 1e-5 * expected.abs().max()
    for own, rows in zip(images, found, strict=True):  # alone, and layer by layer: the same bits
        assert torch.equal(encode(tower, [own], layers=1)[0], rows)
