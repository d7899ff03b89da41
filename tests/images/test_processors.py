"""Image processors give the pixels, grids and text of transformers' classes."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest

from tests.images.families import FAMILIES, SIZES, image, normalized, shown, their_tiles


@pytest.mark.parametrize("name", FAMILIES)
def test_pixels_are_those_of_transformers_bit_for_bit(name: str) -> None:
    family = FAMILIES[name]
    ours, theirs = family.ours(), family.made()
    for size in SIZES:
        pixels = image(*size)
        read = ours.read(pixels)
        expected = their_tiles(theirs, family.outputs(theirs, pixels))
        assert len(read.tiles) == len(expected), size
        for tile, other in zip(read.tiles, expected, strict=True):
            assert tile.dtype == np.uint8
            np.testing.assert_array_equal(normalized(tile, theirs), other, err_msg=str(size))


@pytest.mark.parametrize("name", [name for name in FAMILIES if FAMILIES[name].text])
def test_the_text_of_an_image_is_that_of_transformers(name: str) -> None:
    family = FAMILIES[name]
    ours, theirs = family.ours(), family.made()
    for size in SIZES:
        pixels = image(*size)
        read = ours.read(pixels)
        layout = ours.layout(read)
        assert family.text is not None
        expected = family.text(theirs, family.outputs(theirs, pixels), pixels)
        assert shown(layout, family.image_token) == expected, size
        numbers = [part for part in layout if isinstance(part, int)]
        assert sum(numbers) == read.num_tokens == ours.num_tokens(*size) <= ours.most_tokens
        assert len(read.grids) == len(read.tiles)


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
