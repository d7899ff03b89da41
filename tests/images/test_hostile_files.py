"""Damaged and hostile files: refused in one line, before they cost memory or time."""

from __future__ import annotations

import struct
import sys
import warnings
import zlib
from io import BytesIO

import numpy as np
import pytest
from PIL import Image

from sdk.api.errors import RequestError
from sdk.images.decode import decode
from sdk.images.file_formats import MAX_JPEG_SCANS, Damaged, stripped
from tests.images.families import image
from tests.images.hostile import SAVED, damaged, files
from tests.images.test_decode import saved
from tests.scripts import run_python


def decode_damaged(kind: str, seeds: range) -> int:
    """How many of the damaged files were refused; anything but a RequestError is a failure."""
    refused = 0
    bases = list(files(kind))
    for seed in seeds:
        try:
            pixels = decode(damaged(bases[seed % len(bases)], seed))
        except RequestError as error:
            assert "\n" not in str(error), seed
            refused += 1
        else:
            assert pixels.dtype == np.uint8
    return refused


@pytest.mark.parametrize("kind", SAVED)
def test_damaged_files_are_refused_without_a_word_beside_the_error(
    kind: str, capfd: pytest.CaptureFixture[str]
) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert 100 < decode_damaged(kind, range(300)) < 300
    assert capfd.readouterr() == ("", "")


@pytest.mark.slow
@pytest.mark.parametrize("kind", SAVED)
def test_many_damaged_files_are_refused(kind: str) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert decode_damaged(kind, range(300, 10_000)) > 3000


@pytest.mark.parametrize("kind", SAVED)
def test_a_file_that_breaks_off_is_refused_wherever_it_does(kind: str) -> None:
    data = next(iter(files(kind)))
    # What follows the picture is not missed: EXIF data of a WebP, the end of a GIF or a JPEG.
    whole = decode(data)
    for end in range(1, len(data), max(1, len(data) // 150)):
        try:
            pixels = decode(data[:end])
        except RequestError:
            continue
        assert pixels.shape in (whole.shape, whole.transpose(1, 0, 2).shape)
        assert end > 0.7 * len(data), end


def png(width: int, height: int, *chunks: tuple[bytes, bytes]) -> bytes:
    header = struct.pack(">IIBBBBB", width, height, 8, 0, 0, 0, 0)
    found = b"\x89PNG\r\n\x1a\n"
    for name, body in ((b"IHDR", header), *chunks, (b"IEND", b"")):
        found += struct.pack(">I", len(body)) + name + body
        found += struct.pack(">I", zlib.crc32(name + body))
    return found


def test_a_decompression_bomb_is_refused_by_its_header() -> None:
    """A file of 80 bytes; nothing in it is decompressed, or the error would be another one."""
    bomb = png(60000, 60000, (b"IDAT", b"not compressed"))
    with pytest.raises(RequestError, match=r"3,600,000,000 pixels, expected at most 67,108,864"):
        decode(bomb)
    webp = bytearray(saved(Image.fromarray(image(8, 8)), "WEBP", lossless=True))
    canvas = b"VP8X" + struct.pack("<I", 10) + b"\0" * 4 + b"\xff\x3f\0" * 2
    webp[12:12] = canvas
    with pytest.raises(RequestError, match="has 16384 x 16384"):
        decode(bytes(webp))
    gif = bytearray(saved(Image.fromarray(image(8, 8)), "GIF"))
    gif[6:10] = b"\xff\xff\xff\xff"
    with pytest.raises(RequestError, match="has 65535 x 65535"):
        decode(bytes(gif))
    bmp = bytearray(saved(Image.fromarray(image(8, 8)), "BMP"))
    bmp[18:26] = struct.pack("<ii", 50000, 50000)
    with pytest.raises(RequestError, match="has 50000 x 50000"):
        decode(bytes(bmp))
    jpeg = bytearray(saved(Image.fromarray(image(8, 8)), "JPEG"))
    at = jpeg.index(b"\xff\xc0")
    jpeg[at + 5 : at + 9] = b"\xff\xdc" * 2
    with pytest.raises(RequestError, match="has 65500 x 65500"):
        decode(bytes(jpeg))


def test_texts_profiles_and_further_frames_do_not_reach_the_decoder() -> None:
    pixels = np.zeros((2, 2, 3), np.uint8)
    rows = zlib.compress(b"\0\0\0" * 2)
    text = b"Comment\0\0" + zlib.compress(bytes(50_000_000))
    bomb = png(2, 2, (b"zTXt", text), (b"iCCP", text), (b"acTL", b"\0" * 8), (b"IDAT", rows))
    np.testing.assert_array_equal(decode(bomb), pixels)
    assert len(stripped(bomb, "PNG").data) < 100
    plain = saved(Image.fromarray(image(9, 7)), "GIF")
    at = 13 + (3 << (plain[10] & 7) + 1)
    comment = b"\x21\xfe" + (b"\xff" + b"x" * 255) * 50_000 + b"\0"
    gif = plain[:at] + comment + plain[at:]
    assert len(stripped(gif, "GIF").data) <= len(plain)
    np.testing.assert_array_equal(decode(gif), decode(plain))
    photo = saved(Image.fromarray(image(9, 7)), "JPEG")
    segment = b"\xff\xe2\xff\xff" + b"x" * 65533
    np.testing.assert_array_equal(decode(photo[:2] + segment * 100 + photo[2:]), decode(photo))


def test_a_jpeg_of_thousands_of_scans_is_refused() -> None:
    data = saved(Image.fromarray(image(16, 16)), "JPEG", progressive=True)
    last = data.rindex(b"\xff\xda")
    scan = data[last:-2]
    decode(data[:-2] + scan * (MAX_JPEG_SCANS - data.count(b"\xff\xda")) + data[-2:])
    with pytest.raises(RequestError, match=f"expected at most {MAX_JPEG_SCANS}"):
        decode(data[:-2] + scan * MAX_JPEG_SCANS + data[-2:])


def test_what_follows_a_photo_in_its_file_does_not_matter() -> None:
    """A second picture or a film, as phones append them: their bytes are no scans."""
    photo = saved(Image.fromarray(image(9, 7)), "JPEG", progressive=True)
    film = photo + b"\0\0\0\x18ftypmp42" + b"\xff\xda\0\2" * 500 + photo
    np.testing.assert_array_equal(decode(film), decode(photo))
    assert len(stripped(film, "JPEG").data) <= len(photo)


@pytest.mark.parametrize(
    ("kind", "data", "said"),
    [
        ("PNG", png(2, 2)[:20], "breaks off"),
        ("PNG", png(2, 2)[:-6], "breaks off"),
        ("PNG", png(2, 2, (b"IHDR", b"\0" * 13)), "header is missing or there twice"),
        ("JPEG", b"\xff\xd8\xff\xe0\0\4xx\1", "a segment should begin at byte 8"),
        ("JPEG", b"\xff\xd8\xff\xe0\xff\xff", "breaks off"),
        ("JPEG", b"\xff\xd8" + 2 * b"\xff\xc0\0\x08\x08\0\1\0\1\1", "two frame headers"),
        ("JPEG", b"\xff\xd8\xff\xda\0\2", "frame header is missing"),
        ("JPEG", b"\xff\xd8\xff\xc0\0\x08\x08\0\1\0\1\1\xff\xd9", "has no picture"),
        ("GIF", b"GIF89a\1\0\1\0\0\0\0;", "has no picture"),
        ("GIF", b"GIF89a\1\0\1\0\0\0\0x", "a block should begin at byte 13"),
        ("GIF", b"GIF89a", "breaks off"),
        ("WEBP", b"RIFF\0\0\0\0WEBP", "has no picture"),
        ("AVIF", b"\0\0\0\x10ftypavif\0\0\0\0", "header is missing"),
        ("AVIF", b"\0\0\0\x10ftypavif\0\0\0\0\0\0\0\1mdat\0\0", "header is missing"),
    ],
)
def test_what_is_wrong_with_a_file_is_said(kind: str, data: bytes, said: str) -> None:
    with pytest.raises(Damaged, match=said):
        stripped(data, kind)
    with pytest.raises(RequestError, match=said):
        decode(data)


def test_a_picture_that_does_not_fit_into_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    from PIL import PngImagePlugin

    def full(self: object) -> None:
        raise MemoryError

    monkeypatch.setattr(PngImagePlugin.PngImageFile, "load", full)
    with pytest.raises(RequestError, match="does not fit into memory: scale it down"):
        decode(saved(Image.fromarray(image(4, 4))))


def test_the_limits_of_a_host_are_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pillow's own limit of pixels belongs to the process: ours holds, and nothing is printed."""
    data = saved(Image.fromarray(image(300, 300)))
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 2**16)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert decode(data).shape == (300, 300, 3)
        with pytest.raises(Image.DecompressionBombWarning):
            Image.open(BytesIO(data))


#: Decodes a file of 4096 x 4096 pixels; prints the bytes of memory per pixel at the peak.
PEAK = """
import resource
from io import BytesIO
from PIL import Image
from sdk.images.decode import decode

file = BytesIO()
Image.new("P", (4096, 4096)).save(file, "PNG", transparency=3)
data = file.getvalue()
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
assert decode(data).shape == (4096, 4096, 3)
after = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
print((after - before) * 1024 / 4096**2)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="the peak of memory is counted in kB there")
def test_decoding_takes_the_memory_that_the_limits_say() -> None:
    """A palette with a transparent color: whole copies of it as RGBA would take 20 bytes more."""
    assert float(run_python(PEAK)) < 12
