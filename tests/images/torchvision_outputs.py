"""What transformers makes of images where only its code with torchvision can: writes
``torchvision.npz``, with which test_torchvision.py compares.

    python tests/images/torchvision_outputs.py      # transformers 5.24, torch 2.13, torchvision
"""

from __future__ import annotations

import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np

HERE = Path(__file__).parent
#: Small tiles, all paths: enlarged, as it is, reduced, cut with a thumbnail.
LFM2_VL = {
    "tile_size": 32,
    "encoder_patch_size": 4,
    "downsample_factor": 2,
    "min_image_tokens": 4,
    "max_image_tokens": 16,
    "max_tiles": 4,
}
LFM2_SIZES = ((1, 1), (1, 60), (8, 40), (17, 23), (31, 33), (45, 46), (46, 46), (64, 96), (150, 61))
PIXTRAL_GRIDS = ((1, 1), (1, 3), (3, 1), (2, 5))


def lfm2(pixels: np.ndarray[Any, Any], **keys: Any) -> tuple[list[np.ndarray[Any, Any]], str]:
    """Tiles and text of LFM2-VL."""
    import torch
    from transformers.models.lfm2_vl import Lfm2VlImageProcessor, Lfm2VlProcessor

    theirs = Lfm2VlImageProcessor(**{**LFM2_VL, **keys}, return_row_col_info=True)
    out = theirs(torch.from_numpy(pixels).permute(2, 0, 1), input_data_format="channels_first")
    tiles = []
    for values, (rows, columns) in zip(out["pixel_values"], out["spatial_shapes"], strict=True):
        patch = theirs.encoder_patch_size
        tile = values[: rows * columns].reshape(rows, columns, patch, patch, 3)
        tile = tile.permute(0, 2, 1, 3, 4).reshape(rows * patch, columns * patch, 3)
        tiles.append(np.rint((tile.numpy() * 0.5 + 0.5) * 255).astype(np.uint8))
    this = SimpleNamespace(
        image_processor=theirs,
        image_token="<image>",
        image_start_token="<|image_start|>",
        image_end_token="<|image_end|>",
        image_thumbnail_token="<|img_thumbnail|>",
    )
    for name in vars(Lfm2VlProcessor):
        if name.startswith(("_get", "_build", "_compute")):
            setattr(this, name, getattr(Lfm2VlProcessor, name).__get__(this))
    text = Lfm2VlProcessor.replace_image_token(this, out, 0, use_image_special_tokens=True)
    return tiles, text


def pixtral(rows: int, columns: int) -> str:
    """The text of an image of Pixtral with this many tokens."""
    from transformers.models.pixtral import PixtralProcessor

    this = SimpleNamespace(
        patch_size=14,
        spatial_merge_size=2,
        image_token="[IMG]",
        image_break_token="[IMG_BREAK]",
        image_end_token="[IMG_END]",
    )
    text: str = PixtralProcessor.replace_image_token(
        this, {"image_sizes": [(rows * 28, columns * 28)]}, 0
    )
    return text


def main() -> None:
    sys.path.insert(0, str(HERE.parents[1]))
    from tests.images.families import image

    found: dict[str, Any] = {}
    for name, keys in (("lfm2", {}), ("lfm2-whole", {"do_image_splitting": False})):
        for size in LFM2_SIZES:
            tiles, text = lfm2(image(*size), **keys)
            key = f"{name}-{size[0]}x{size[1]}"
            found[f"{key}-text"] = np.array(text)
            found.update({f"{key}-{index}": tile for index, tile in enumerate(tiles)})
    for rows, columns in PIXTRAL_GRIDS:
        found[f"pixtral-{rows}x{columns}"] = np.array(pixtral(rows, columns))
    np.savez_compressed(HERE / "torchvision.npz", **found)


if __name__ == "__main__":
    main()
