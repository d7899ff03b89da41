"""Files of every format, and damaged ones made of them."""

from __future__ import annotations

import random
import zlib
from collections.abc import Iterator
from io import BytesIO
from typing import Any

from PIL import Image

from tests.images.families import image

#: Format -> ways to save.
SAVED: dict[str, tuple[dict[str, Any], ...]] = {
    "PNG": ({}, {"optimize": True}),
    "JPEG": ({"quality": 90}, {"quality": 40, "progressive": True}),
    "WEBP": ({"lossless": True}, {"quality": 50}),
    "GIF": ({},),
    "BMP": ({},),
    "AVIF": ({"quality": 60, "speed": 10},),
}
_MODES = ("RGB", "L", "RGBA", "P", "CMYK", "1", "LA", "I;16")


def files(kind: str, side: int = 24) -> Iterator[bytes]:
    """Small files of a format: in every mode that it has, with metadata, and animated."""
    exif = Image.Exif()
    exif[0x0112] = 6
    frames = [Image.fromarray(image(side, side + 5)) for _ in range(3)]
    for options in SAVED[kind]:
        for mode in _MODES:
            saved = BytesIO()
            try:
                picture = frames[0].convert("L").convert(mode)
                if mode in ("RGB", "RGBA", "P", "CMYK"):
                    picture = frames[0].convert(mode)
                more = {"exif": exif} if kind in ("PNG", "JPEG", "WEBP", "AVIF") else {}
                picture.save(saved, kind, **options, **more)
            except (OSError, ValueError, KeyError):
                continue  # not a mode of this format
            yield saved.getvalue()
        if kind in ("PNG", "WEBP", "GIF", "AVIF"):
            saved = BytesIO()
            frames[0].save(saved, kind, save_all=True, append_images=frames[1:], **options)
            yield saved.getvalue()


def with_checksums(data: bytes) -> bytes:
    """A PNG whose chunks have the right checksums, however they were changed."""
    found, at = bytearray(data), 8
    while at + 12 <= len(found):
        end = at + 8 + int.from_bytes(found[at : at + 4], "big")
        if end + 4 > len(found):
            break
        found[end : end + 4] = zlib.crc32(found[at + 4 : end]).to_bytes(4, "big")
        at = end + 4
    return bytes(found)


def damaged(data: bytes, seed: int) -> bytes:
    """Bytes changed, cut out, repeated, moved or appended."""
    draw = random.Random(seed)
    found = bytearray(data)
    for _ in range(draw.choice((1, 1, 2, 5, 20))):
        at = draw.randrange(len(found))
        # Headers are where most is decided.
        at = draw.randrange(min(64, len(found))) if draw.random() < 0.4 else at
        what = draw.randrange(7)
        if what == 0:
            found[at] = draw.randrange(256)
        elif what == 1:
            found[at] ^= 1 << draw.randrange(8)
        elif what == 2:
            found[at : at + 4] = draw.choice(
                (b"\0\0\0\0", b"\xff\xff\xff\xff", b"\x7f\xff\xff\xff")
            )
        elif what == 3:
            del found[at : at + draw.randrange(1, 40)]
        elif what == 4:
            end = at + draw.randrange(1, 60)
            found[at:at] = found[at:end]
        elif what == 5:
            del found[at:]
        else:
            found += draw.randbytes(draw.randrange(1, 40))
        if not found:
            return b"\0"
    return with_checksums(bytes(found)) if found[:4] == b"\x89PNG" and seed % 2 else bytes(found)
