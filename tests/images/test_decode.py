"""Every kind of image that callers give becomes RGB, 8 bits, upright, on white."""

from __future__ import annotations

import base64
import os
import sys
import threading
import types
import warnings
from io import BytesIO
from pathlib import Path
from typing import Any
from urllib.parse import quote_from_bytes

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from PIL import Image, ImageFile, ImageOps

from sdk.api.errors import RequestError
from sdk.images.decode import decode
from sdk.images.limits import ImageLimits
from tests.images.families import image

#: Blocks of one color, which lossy formats keep nearly as they are.
BLOCKS = np.kron(image(4, 5), np.ones((8, 8, 1), np.uint8))


def saved(picture: Image.Image, kind: str = "PNG", **options: Any) -> bytes:
    file = BytesIO()
    picture.save(file, kind, **options)
    return file.getvalue()


def expected(data: bytes) -> NDArray[np.uint8]:
    """As Pillow reads it: first frame, upright."""
    return np.asarray(ImageOps.exif_transpose(Image.open(BytesIO(data))).convert("RGB"))


@pytest.mark.parametrize("kind", ["PNG", "JPEG", "WEBP", "AVIF"])
def test_each_orientation_of_exif_is_turned_upright(kind: str) -> None:
    for orientation in range(1, 9):
        exif = Image.Exif()
        exif[0x0112] = orientation
        data = saved(Image.fromarray(BLOCKS), kind, exif=exif)
        np.testing.assert_array_equal(decode(data), expected(data))
        np.testing.assert_array_equal(decode(Image.open(BytesIO(data))), expected(data))


def test_exif_data_that_cannot_be_read_turns_nothing() -> None:
    plain = saved(Image.fromarray(BLOCKS), "JPEG")
    for exif in (
        b"Exif\0\0II*\0\xff\xff\xff\xff",
        b"Exif\0\0??",
        b"Exif\0\0MM\0*\0\0\0\x08\xff\xff\1",
    ):
        data = saved(Image.fromarray(BLOCKS), "JPEG", exif=exif)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            np.testing.assert_array_equal(decode(data), decode(plain))


@pytest.mark.parametrize("kind", ["PNG", "WEBP", "GIF", "AVIF"])
def test_of_an_animation_the_first_frame_is_read(kind: str) -> None:
    frames = [Image.fromarray(np.full((8, 9, 3), value, np.uint8)) for value in (40, 160, 250)]
    data = saved(frames[0], kind, save_all=True, append_images=frames[1:])
    assert getattr(Image.open(BytesIO(data)), "n_frames", 1) == 3
    np.testing.assert_allclose(decode(data), 40, atol=2)


def test_opacity_is_applied_on_white() -> None:
    pixels = np.zeros((1, 3, 4), np.uint8)
    pixels[0, :, 3] = 0, 128, 255
    want = np.array([[[255] * 3, [127] * 3, [0] * 3]], np.uint8)
    np.testing.assert_array_equal(decode(pixels), want)
    for kind in ("PNG", "WEBP"):
        data = saved(
            Image.fromarray(pixels),
            kind,
            **({"lossless": True, "exact": True} if kind == "WEBP" else {}),
        )
        np.testing.assert_array_equal(decode(data), want)
    grey = Image.merge("LA", [Image.fromarray(pixels[..., channel]) for channel in (0, 3)])
    np.testing.assert_array_equal(decode(grey), want)
    np.testing.assert_array_equal(decode(grey.convert("La")), want)


def test_a_transparent_color_of_a_palette_is_white() -> None:
    picture = Image.new("P", (2, 1))
    picture.putpalette([10, 20, 30, 200, 100, 50])
    picture.putpixel((1, 0), 1)
    for kind in ("PNG", "GIF"):
        data = saved(picture, kind, transparency=0)
        np.testing.assert_array_equal(decode(data), [[[255] * 3, [200, 100, 50]]])


def test_of_16_bits_the_upper_8_are_kept() -> None:
    values = np.array([[0, 255, 256, 40000, 65535]], np.uint16)
    picture = Image.fromarray(values)
    want = np.repeat((values >> 8)[..., None], 3, axis=2)
    np.testing.assert_array_equal(decode(saved(picture)), want)
    np.testing.assert_array_equal(decode(picture.convert("I")), want)
    keyed = decode(saved(picture, transparency=40000))
    np.testing.assert_array_equal(keyed[0, :, 0], [0, 0, 1, 255, 255])


def test_cmyk_and_grey_become_rgb() -> None:
    picture = Image.fromarray(BLOCKS)
    for mode in ("CMYK", "L", "YCbCr", "1", "HSV"):
        want = np.asarray(picture.convert(mode).convert("RGB"))
        np.testing.assert_array_equal(decode(picture.convert(mode)), want)
    data = saved(picture.convert("CMYK"), "JPEG", quality=100)
    np.testing.assert_array_equal(decode(data), expected(data))
    floats = Image.fromarray(np.array([[0.0, 0.5, 1.0]], np.float32))
    np.testing.assert_array_equal(decode(floats)[0, :, 0], [0, 128, 255])


def test_arrays_and_tensors_in_either_order_of_axes() -> None:
    pixels = image(6, 7)
    first = pixels.transpose(2, 0, 1)
    for source in (pixels, first, torch.tensor(pixels), torch.tensor(first), pixels / 255):
        np.testing.assert_array_equal(decode(source), pixels)
    np.testing.assert_array_equal(decode(torch.tensor(first / 255)), pixels)
    rough = decode(torch.tensor(first / 255).bfloat16().requires_grad_())
    assert np.abs(rough.astype(int) - pixels).max() <= 1
    np.testing.assert_array_equal(decode(pixels[..., 0]), np.repeat(pixels[..., :1], 3, axis=2))
    np.testing.assert_array_equal(decode(pixels[..., :1]), np.repeat(pixels[..., :1], 3, axis=2))
    # 3 x 5 x 3: the last axis is an array's channels, the first a tensor's.
    either = image(3, 5)
    np.testing.assert_array_equal(decode(either), either)
    np.testing.assert_array_equal(decode(torch.tensor(either)), either.transpose(1, 2, 0))
    result = decode(pixels)
    assert result.dtype == np.uint8
    assert result.flags.c_contiguous


def test_bytes_paths_and_data_urls(tmp_path: Path) -> None:
    data = saved(Image.fromarray(BLOCKS))
    path = tmp_path / "a picture.xyz"
    path.write_bytes(data)
    encoded = base64.b64encode(data).decode()
    sources = [
        *(data, bytearray(data), memoryview(data), path, str(path)),
        f"data:image/png;base64,{encoded}",
        f"DATA:;base64,{encoded[:40]}\n{encoded[40:]}".rstrip("="),
        f"data:image/png,{quote_from_bytes(data)}",
    ]
    for source in sources:
        np.testing.assert_array_equal(decode(source), BLOCKS)


@pytest.mark.parametrize(
    ("source", "said"),
    [
        (b"", "is empty"),
        (b"\0\1\2\3", "is not an image file that can be recognized"),
        (b"<svg xmlns='http://www.w3.org/2000/svg'/>", "is SVG"),
        (b"\xef\xbb\xbf<?xml version='1.0'?>\n<svg/>", "is SVG"),
        (b"<!DOCTYPE html>", "is HTML or XML"),
        (b"%PDF-1.7", "is PDF"),
        (b"\0\0\0\x18ftypheic\0\0\0\0mif1heic", "is HEIC"),
        (b"\0\0\0\x18ftypmif1\0\0\0\0mif1miaf", "is HEIF"),
        (b"\0\0\0\x18ftypisom\0\0\0\0isommp42", "is MP4 video"),
        (b"\0\0\0\x18ftypwhat\0\0\0\0whatelse", "is ISO media"),
        (b"II*\0\x08\0\0\0", "is TIFF"),
        (b"\xff\x4f\xff\x51", "is JPEG 2000"),
        (b"P6 1 1 255 abc", "is PBM, PGM, PPM or PAM"),
        (b"%!PS-Adobe", "is PostScript"),
        (3, "is of type int"),
        ([[1, 2]], "is of type list"),
        (None, "is of type NoneType"),
        (
            "https://example.org/a.png",
            "is the URL 'https://example.org/a.png', which is not fetched",
        ),
        ("file:///a.png", "is the URL"),
        ("/no/such.png", "is the file '/no/such.png', which cannot be read (No such file"),
        ("/", "cannot be read (Is a directory)"),
        ("a\0b", "cannot be read (embedded null byte)"),
        ("x" * 9000, "cannot be read (File name too long)"),
        ("data:image/png;base64", "is a data URL without a comma"),
        ("data:image/png;base64,a!", "whose base64 cannot be read"),
        ("data:image/png;base64,ééé", "whose base64 cannot be read"),
        ("data:,", "is empty"),
        ("data:image/png,abc", "is not an image file that can be recognized"),
        (np.zeros((2, 2, 2), np.uint8), "of shape [2, 2, 2]"),
        (np.zeros((1, 3, 4, 4), np.uint8), "pass the images of a batch one by one"),
        (np.zeros(3, np.uint8), "of shape [3]"),
        (np.zeros((0, 4, 3), np.uint8), "has 0 x 4 pixels"),
        (np.zeros((4, 4, 3), np.int64), "is an array of int64"),
        (np.zeros((4, 4, 3), np.uint16), "is an array of uint16"),
        (torch.zeros((3, 4, 4), device="meta"), "is a tensor whose values cannot be read"),
        (torch.zeros((3, 4, 4)).to_sparse(), "is a tensor whose values cannot be read"),
        (torch.zeros((3, 4, 4), dtype=torch.complex64), "is an array of complex64"),
        (np.zeros((4, 4, 3), object), "is an array of object"),
        (np.zeros((4, 4, 3), bool), "is an array of bool"),
        (np.full((4, 4, 3), 2.0), "has floats from 2 to 2, expected 0 to 1"),
        (np.full((4, 4), -0.1), "has floats from -0.1 to -0.1"),
        (np.full((4, 4), np.nan), "has floats from nan to nan"),
        (Image.fromarray(np.full((2, 2), 3.0, np.float32)), "values from 3 to 3 in mode 'F'"),
        (Image.fromarray(np.full((2, 2), -1, np.int32)), "values from -1 to -1 in mode 'I'"),
        (Image.new("RGB", (0, 4)), "has 4 x 0 pixels"),
        (saved(Image.fromarray(BLOCKS))[:-30], "is a damaged PNG file (it breaks off)"),
        (saved(Image.fromarray(BLOCKS), "JPEG")[:-100], "JPEG"),
        (
            Image.open(BytesIO(saved(Image.fromarray(BLOCKS), "JPEG")[:-100])),
            "(an image of Pillow)",
        ),
    ],
    ids=lambda value: value[:20] if isinstance(value, str) else "",
)
def test_what_is_no_image_is_named_in_one_line(source: object, said: str) -> None:
    with pytest.raises(RequestError) as error:
        decode(source, name="images[2]")
    message = str(error.value)
    assert said in message
    assert message.startswith("images[2]")
    assert "\n" not in message


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="pipes with names are Unix's")
def test_what_is_not_a_file_is_not_waited_for(tmp_path: Path) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    for path in (pipe, "/dev/zero"):
        with pytest.raises(RequestError, match="which is not a file"):
            decode(path)


def test_a_string_of_others_names_no_file(tmp_path: Path) -> None:
    path = tmp_path / "a.png"
    path.write_bytes(saved(Image.fromarray(BLOCKS)))
    with pytest.raises(RequestError, match="expected a data URL"):
        decode(str(path), paths=False)
    url = "data:;base64," + base64.b64encode(path.read_bytes()).decode()
    assert decode(url, paths=False).shape == BLOCKS.shape


def test_limits_hold_for_every_source(tmp_path: Path) -> None:
    data = saved(Image.fromarray(BLOCKS))
    path = tmp_path / "a.png"
    path.write_bytes(data)
    url = "data:;base64," + base64.b64encode(data).decode()
    quoted = "data:," + quote_from_bytes(data)
    for source in (data, path, url, quoted):
        with pytest.raises(RequestError, match=r"bytes, expected at most 90: save it smaller$"):
            decode(source, ImageLimits(max_bytes=90))
        for limits in (ImageLimits(max_pixels=1279), ImageLimits(max_side=39)):
            with pytest.raises(RequestError, match="has 32 x 40"):
                decode(source, limits)
        assert decode(source, ImageLimits(len(quoted), 1280, 40)).shape == (32, 40, 3)
    for source in (Image.fromarray(BLOCKS), BLOCKS, torch.tensor(BLOCKS)):
        for limits in (ImageLimits(max_pixels=1279), ImageLimits(max_side=39)):
            with pytest.raises(RequestError, match="has 32 x 40"):
                decode(source, limits)
    with pytest.raises(RequestError, match="expected sides of at most 65,535"):
        decode(np.zeros((1, 65536), np.uint8))


def test_a_format_that_pillow_was_built_without(monkeypatch: pytest.MonkeyPatch) -> None:
    data = saved(Image.fromarray(BLOCKS), "WEBP")
    from PIL import WebPImagePlugin

    monkeypatch.setattr(WebPImagePlugin, "SUPPORTED", False, raising=False)
    with pytest.raises(RequestError, match="cannot be read by this build of Pillow"):
        decode(data)


def test_threads_share_nothing_and_pillow_stays_as_it_is() -> None:
    files = [
        saved(Image.fromarray(image(60 + seed, 50)), kind)
        for seed in range(4)
        for kind in ("PNG", "WEBP", "JPEG")
    ]
    wanted = [decode(data) for data in files]
    before = (Image.MAX_IMAGE_PIXELS, ImageFile.LOAD_TRUNCATED_IMAGES, list(warnings.filters))
    wrong: list[int] = []

    def run() -> None:
        for index, data in enumerate(files):
            if not np.array_equal(decode(data), wanted[index]):
                wrong.append(index)

    threads = [threading.Thread(target=run) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong
    assert before == (
        Image.MAX_IMAGE_PIXELS,
        ImageFile.LOAD_TRUNCATED_IMAGES,
        list(warnings.filters),
    )


def test_what_is_read_while_another_thread_imports_torch_and_pillow(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    pixels = np.zeros((2, 3, 3), np.uint8)
    for name in ("torch", "PIL.Image"):
        monkeypatch.setitem(sys.modules, name, types.ModuleType(name))
    assert decode(pixels).shape == (2, 3, 3)
    with pytest.raises(RequestError, match="of type object"):
        decode(object())
