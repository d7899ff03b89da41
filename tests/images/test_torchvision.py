"""LFM2-VL and Pixtral beside transformers' code with torchvision, whose outputs are in a file."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from sdk.images.processors import image_processor
from tests.images.families import FAMILIES, image, shown
from tests.images.torchvision_outputs import LFM2_SIZES, LFM2_VL, PIXTRAL_GRIDS

GOLDEN = Path(__file__).parent / "torchvision.npz"
LFM2_CONFIG = {"model_type": "lfm2_vl", "vision_config": {"patch_size": 4}, "downsample_factor": 2}


@pytest.mark.parametrize(
    ("name", "keys"), [("lfm2", {}), ("lfm2-whole", {"do_image_splitting": False})]
)
def test_lfm2_has_the_tiles_and_the_text_of_transformers(name: str, keys: dict[str, bool]) -> None:
    """Pixels differ by up to 1 of 255: its class exists with torchvision only, which rounds the
    weights of a bilinear filter otherwise than Pillow."""
    processor = image_processor(LFM2_CONFIG, {**LFM2_VL, **keys})
    with np.load(GOLDEN) as golden:
        for height, width in LFM2_SIZES:
            key = f"{name}-{height}x{width}"
            read = processor.read(image(height, width))
            layout = processor.layout(read)
            assert shown(layout, "<image>") == str(golden[f"{key}-text"])
            numbers = [part for part in layout if isinstance(part, int)]
            assert numbers == [rows * columns for rows, columns in read.grids]
            assert f"{key}-{len(read.tiles)}" not in golden
            for index, tile in enumerate(read.tiles):
                expected = golden[f"{key}-{index}"]
                assert tile.shape == expected.shape
                assert np.abs(tile.astype(int) - expected.astype(int)).max() <= 1


def test_pixtral_has_the_marks_of_transformers() -> None:
    processor = FAMILIES["pixtral"].ours()
    with np.load(GOLDEN) as golden:
        for rows, columns in PIXTRAL_GRIDS:
            read = processor.read(image(rows * 28, columns * 28))
            expected = str(golden[f"pixtral-{rows}x{columns}"])
            assert shown(processor.layout(read), "[IMG]") == expected
