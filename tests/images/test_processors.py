"""Image processors give the pixels, grids and text of transformers' classes."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from types import SimpleNamespace

import numpy as np
import pytest

from sdk.images.processors import image_processor
from tests.images.families import FAMILIES, SIZES, image, normalized, shown, their_tiles


def compare(name: str, sizes: Sequence[tuple[int, int]]) -> None:
    """Pixels after normalization, bit for bit; grids, numbers of tokens, and the text."""
    family = FAMILIES[name]
    ours, theirs = family.ours(), family.made()
    for size in sizes:
        pixels = image(*size)
        read = ours.read(pixels)
        outputs = family.outputs(theirs, pixels)
        expected = their_tiles(theirs, outputs)
        assert len(read.tiles) == len(read.grids) == len(expected), size
        for tile, other in zip(read.tiles, expected, strict=True):
            assert tile.dtype == np.uint8
            np.testing.assert_array_equal(normalized(tile, theirs), other, err_msg=str(size))
        layout = ours.layout(read)
        numbers = [part for part in layout if isinstance(part, int)]
        assert sum(numbers) == read.num_tokens == ours.num_tokens(*size) <= ours.most_tokens
        assert all(type(a) is not type(b) for a, b in itertools.pairwise(layout))
        if family.text is not None:
            text = family.text(theirs, outputs, pixels)
            assert shown(layout, family.image_token) == text, size


@pytest.mark.parametrize("name", FAMILIES)
def test_pixels_and_text_are_those_of_transformers(name: str) -> None:
    compare(name, SIZES[::4])


@pytest.mark.slow
@pytest.mark.parametrize("name", FAMILIES)
def test_pixels_and_text_are_those_of_transformers_in_many_sizes(name: str) -> None:
    compare(name, [size for index, size in enumerate(SIZES) if index % 4])
    compare(name, [(768, 1366), (2000, 1500)])


def test_slices_of_minicpmv_up_to_4_5_are_multiples_of_a_patch() -> None:
    """Their processor's code is beside the weights. It is that of 4.6 with another unit, here half
    a patch that is joined twice. All slices have as many tokens."""
    from transformers.models.minicpmv4_6 import MiniCPMV4_6ImageProcessorPil

    config = {"model_type": "minicpmv", "vision_config": {"patch_size": 14}, "query_num": 64}
    ours = image_processor(config, {"scale_resolution": 112, "max_slice_nums": 9})
    theirs = MiniCPMV4_6ImageProcessorPil(
        scale_resolution=112, patch_size=7, downsample_mode="4x", max_slice_nums=9
    )
    for size in SIZES:
        pixels = image(*size)
        outputs = theirs(pixels, input_data_format="channels_last")
        read, [(rows, columns)] = ours.read(pixels), outputs["grids"]
        for tile, other in zip(read.tiles, their_tiles(theirs, outputs), strict=True):
            np.testing.assert_array_equal(normalized(tile, theirs), other, err_msg=str(size))
        one = "<slice>" + "<unk>" * 64 + "</slice>"
        slices = "\n".join([one * columns] * rows)
        text = "<image_id>2</image_id><image>" + "<unk>" * 64 + "</image>" + slices
        assert shown(ours.layout(read, 2), "<unk>") == text
    assert ours.most_tokens == 640


def test_the_prompt_of_paligemma_is_framed_as_by_transformers() -> None:
    from transformers.models.paligemma import PaliGemmaProcessor
    from transformers.processing_utils import ProcessorMixin

    class Theirs(PaliGemmaProcessor):
        def __init__(self) -> None:  # without files
            self.tokenizer = SimpleNamespace(bos_token="<bos>")
            self.image_processor = SimpleNamespace(fetch_images=lambda images: images)

    assert issubclass(Theirs, ProcessorMixin)
    ours = FAMILIES["paligemma"].ours()
    for prompt in ("<image>caption es", "<image><image> two", "first<image>then"):
        _, theirs, *_ = Theirs().prepare_inputs_layout(images=[image(2, 2)], text=[prompt])
        assert [ours.framed(prompt, "<bos>")] == theirs
    assert ours.framed("no image", "<bos>") == "no image"
    assert FAMILIES["gemma3"].ours().framed("<image>", "<bos>") == "<image>"
