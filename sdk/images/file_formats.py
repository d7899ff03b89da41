"""Formats of image files: which one it is, which parts hold the first picture, how it is turned.

Pillow gets only these parts. So comments, profiles, texts and further frames cost neither time nor
memory, and damaged metadata, about which Pillow would warn, does not matter.
"""

from __future__ import annotations

import re
import struct
from collections.abc import Iterator
from typing import NamedTuple


class Stripped(NamedTuple):
    """A file without what decoding does not need.

    ``size``: height and width, if the header says so. ``orientation``: 1 to 8 as in EXIF.
    """

    data: bytes
    size: tuple[int, int] | None = None
    orientation: int = 1


class Damaged(Exception):
    """The file breaks off or contradicts itself; the message says what was found."""


#: Passes over the picture that a JPEG may ask for. Encoders write up to 10; a small file with
#: thousands over a large picture would decode for hours.
MAX_JPEG_SCANS = 100
#: Formats that are not decoded, by how a file begins: (offset, bytes, name).
_OTHERS = (
    (0, b"%PDF-", "PDF"),
    (0, b"II*\0", "TIFF"),
    (0, b"MM\0*", "TIFF"),
    (0, b"II+\0", "BigTIFF"),
    (0, b"MM\0+", "BigTIFF"),
    (0, b"\0\0\0\x0cjP  ", "JPEG 2000"),
    (0, b"\xff\x4f\xff\x51", "JPEG 2000"),
    (0, b"\xff\x0a", "JPEG XL"),
    (0, b"\0\0\0\x0cJXL ", "JPEG XL"),
    (0, b"\0\0\1\0", "ICO"),
    (0, b"8BPS", "PSD"),
    (0, b"v/1\1", "OpenEXR"),
    (0, b"#?RADIANCE", "Radiance HDR"),
    (0, b"DDS ", "DDS"),
    (0, b"qoif", "QOI"),
    (0, b"\xabKTX", "KTX"),
    (0, b"%!PS", "PostScript"),
    (0, b"\xc5\xd0\xd3\xc6", "EPS"),
    (0, b"\xd7\xcd\xc6\x9a", "WMF"),
    (0, b"PK\x03\x04", "ZIP"),
    (0, b"\x1f\x8b", "gzip"),
    (0, b"\x1aE\xdf\xa3", "Matroska or WebM video"),
    (8, b"AVI ", "AVI video"),
    (8, b"WAVE", "WAV audio"),
)
#: What ends the data of a scan; other bytes after 255 belong to it.
_JPEG_MARKER = re.compile(rb"\xff[^\x00\x01\xd0-\xd7\xff]")
_BMP_HEADERS = {bytes((size, 0, 0, 0)) for size in (12, 16, 40, 52, 56, 64, 108, 124)}
#: The same for files of ISO media, by their brand.
_BRANDS = {
    **dict.fromkeys((b"heic", b"heix", b"heim", b"heis", b"hevc", b"hevx"), "HEIC"),
    **dict.fromkeys((b"mif1", b"msf1"), "HEIF"),
    **dict.fromkeys((b"isom", b"iso2", b"mp41", b"mp42", b"avc1", b"M4V "), "MP4 video"),
    b"qt  ": "QuickTime video",
    b"crx ": "Canon CR3",
}


def file_format(data: bytes) -> str:
    """``PNG``, ``JPEG``, ``GIF``, ``WEBP``, ``BMP`` or ``AVIF``, which can be decoded; the name of
    another format; or ``""``."""
    if data.startswith(b"\x89PNG\r\n\x1a\n"):
        return "PNG"
    if data.startswith(b"\xff\xd8\xff"):
        return "JPEG"
    if data[:6] in (b"GIF87a", b"GIF89a"):
        return "GIF"
    if data[:4] == b"RIFF" and data[8:12] == b"WEBP":
        return "WEBP"
    if data[:2] == b"BM" and data[14:18] in _BMP_HEADERS:
        return "BMP"
    if data[4:8] == b"ftyp":
        return _brand(data)
    for at, begins, name in _OTHERS:
        if data[at : at + len(begins)] == begins:
            return name
    if data[:1] == b"P" and data[1:2] in b"1234567" and data[2:3].isspace():
        return "PBM, PGM, PPM or PAM"
    text = data[:1024].lstrip(b"\xef\xbb\xbf \t\r\n").lower()
    if text.startswith((b"<svg", b"<?xml", b"<!--")) and b"<svg" in data[:65536].lower():
        return "SVG"
    return "HTML or XML" if text.startswith((b"<!doctype", b"<html", b"<?xml")) else ""


def _brand(data: bytes) -> str:
    length = max(16, min(int.from_bytes(data[:4], "big"), 256))
    brands = [data[8:12], *(data[at : at + 4] for at in range(16, length, 4))]
    if b"avif" in brands or b"avis" in brands:
        return "AVIF"
    return next((_BRANDS[brand] for brand in brands if brand in _BRANDS), "ISO media")


def stripped(data: bytes, kind: str) -> Stripped:
    """What Pillow needs of ``data``.

    :raises Damaged: the parts of the file are not where they should be.
    """
    try:
        return {
            "PNG": _png,
            "JPEG": _jpeg,
            "GIF": _gif,
            "WEBP": _webp,
            "AVIF": _avif,
            "BMP": Stripped,
        }[kind](data)
    except (struct.error, IndexError) as error:
        raise Damaged("it breaks off") from error


def _png(data: bytes) -> Stripped:
    parts, orientation, at = [data[:8]], 1, 8
    size: tuple[int, int] | None = None
    while True:
        (length,) = struct.unpack_from(">I", data, at)
        name, end = data[at + 4 : at + 8], at + 12 + length
        if end > len(data):
            raise Damaged("it breaks off")
        if (name == b"IHDR") == (size is not None):
            raise Damaged("its header is missing or there twice")
        if name == b"IHDR":
            width, height = struct.unpack_from(">II", data, at + 8)
            size = height, width
        if name in (b"IHDR", b"PLTE", b"tRNS", b"IDAT", b"IEND"):
            parts.append(data[at:end])
        elif name == b"eXIf":
            orientation = exif_orientation(data[at + 8 : end - 4])
        if name == b"IEND":
            return Stripped(b"".join(parts), size, orientation)
        at = end


def _jpeg(data: bytes) -> Stripped:
    parts, orientation, at, scans = [data[:2]], 1, 2, 0
    size: tuple[int, int] | None = None
    while True:
        if data[at] != 0xFF:
            raise Damaged(f"a segment should begin at byte {at:,}")
        if data[at + 1] == 0xFF:  # fill bytes
            at += 1
            continue
        marker = data[at + 1]
        if marker == 0xD9:  # the end: further pictures or a film may follow
            break
        (length,) = struct.unpack_from(">H", data, at + 2)
        end = at + 2 + length
        if length < 2 or end > len(data):
            raise Damaged("it breaks off")
        if 0xC0 <= marker <= 0xCF and marker not in (0xC4, 0xC8, 0xCC):  # a frame header
            if size is not None:
                raise Damaged("it has two frame headers")
            size = struct.unpack_from(">HH", data, at + 5)
        elif marker == 0xDA:
            scans += 1
            found = _JPEG_MARKER.search(data, end)
            end = found.start() if found else len(data)
        elif marker == 0xE1 and data[at + 4 : at + 10] == b"Exif\0\0":
            orientation = exif_orientation(data[at + 10 : end])
        # JFIF's and Adobe's segments say how the colours are stored; the others do not.
        if marker in (0xE0, 0xEE) or not (0xE0 <= marker <= 0xEF or marker == 0xFE):
            parts.append(data[at:end])
        at = end
        if at == len(data):  # the end is missing: Pillow says so
            break
    if size is None or not scans:
        raise Damaged("its frame header is missing" if size is None else "it has no picture")
    if scans > MAX_JPEG_SCANS:
        raise Damaged(f"it has {scans:,} scans, expected at most {MAX_JPEG_SCANS}")
    return Stripped(b"".join([*parts, data[at : at + 2]]), size, orientation)


def _gif(data: bytes) -> Stripped:
    width, height, flags = struct.unpack_from("<HHB", data, 6)
    at = 13 + _gif_colours(flags)
    parts = [data[:at]]
    while True:
        block = data[at]
        if block == 0x21:  # an extension: only the one about transparency counts
            end = _gif_blocks(data, at + 2)
            if data[at + 1] == 0xF9:
                parts.append(data[at:end])
        elif block == 0x2C:
            left, top, columns, rows, flags = struct.unpack_from("<HHHHB", data, at + 1)
            end = _gif_blocks(data, at + 11 + _gif_colours(flags))
            # Pillow enlarges the screen to hold a frame that goes beyond it.
            size = max(height, top + rows), max(width, left + columns)
            return Stripped(b"".join([*parts, data[at:end], b"\x3b"]), size)
        elif block == 0x3B:
            raise Damaged("it has no picture")
        else:
            raise Damaged(f"a block should begin at byte {at:,}")
        at = end


def _gif_colours(flags: int) -> int:
    """Bytes of the colour table that ``flags`` announce."""
    return 3 << (flags & 7) + 1 if flags & 0x80 else 0


def _gif_blocks(data: bytes, at: int) -> int:
    """Where the data blocks that begin at ``at`` end."""
    while data[at]:
        at += data[at] + 1
    return at + 1


def _webp(data: bytes) -> Stripped:
    orientation, size, simple = 1, None, None
    for name, begin, end in _riff(data):
        if name == b"VP8X":
            flags = data[begin + 4 : begin + 10]
            width, height = (int.from_bytes(flags[i : i + 3], "little") + 1 for i in (0, 3))
            size = height, width
        elif name == b"VP8 " and simple is None:
            width, height = struct.unpack_from("<HH", data, begin + 6)
            simple = height & 0x3FFF, width & 0x3FFF
        elif name == b"VP8L" and simple is None:
            (bits,) = struct.unpack_from("<I", data, begin + 1)
            simple = (bits >> 14 & 0x3FFF) + 1, (bits & 0x3FFF) + 1
        elif name == b"EXIF":
            orientation = exif_orientation(data[begin:end])
    size = size or simple
    if size is None:
        raise Damaged("it has no picture")
    return Stripped(data, size, orientation)


def _riff(data: bytes) -> Iterator[tuple[bytes, int, int]]:
    """Name, begin and end of each chunk."""
    at = 12
    while at + 8 <= len(data):
        (length,) = struct.unpack_from("<I", data, at + 4)
        yield data[at : at + 4], at + 8, min(at + 8 + length, len(data))
        at += 8 + length + length % 2


def _avif(data: bytes) -> Stripped:
    """Without EXIF data, about which Pillow may warn: turns are properties of the picture here."""
    at = 0
    while at + 8 <= len(data):
        length = int.from_bytes(data[at : at + 4], "big")
        if data[at + 4 : at + 8] == b"meta":
            end = at + length if length else len(data)
            meta = data[at:end].replace(b"Exif", b"none")
            return Stripped(data[:at] + meta + data[end:])
        if length < 8:
            break
        at += length
    raise Damaged("its header is missing")


def exif_orientation(exif: bytes) -> int:
    """The orientation in EXIF data, 1 to 8; 1 (as it is) if there is none or it cannot be read."""
    exif = exif.removeprefix(b"Exif\0\0")
    order = {b"II": "<", b"MM": ">"}.get(exif[:2])
    if order is None:
        return 1
    try:
        (at,) = struct.unpack_from(order + "I", exif, 4)
        (count,) = struct.unpack_from(order + "H", exif, at)
        for i in range(count):
            tag, kind, values, value = struct.unpack_from(order + "HHIH", exif, at + 2 + 12 * i)
            if tag == 0x0112:
                return value if kind == 3 and values == 1 and 1 <= value <= 8 else 1
    except struct.error:
        pass
    return 1


__all__ = ["MAX_JPEG_SCANS", "Damaged", "Stripped", "exif_orientation", "file_format", "stripped"]
