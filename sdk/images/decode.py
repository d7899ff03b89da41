"""What callers give for an image, decoded: RGB, 8 bits, upright, first frame, on white."""

from __future__ import annotations

import base64
import binascii
import importlib
import os
import stat
import sys
from io import BytesIO
from typing import Any
from urllib.parse import unquote_to_bytes

import numpy as np
from numpy.typing import NDArray

from sdk.api.errors import RequestError
from sdk.images.arrays import array_pixels, is_tensor
from sdk.images.file_formats import Damaged, exif_orientation, file_format, stripped
from sdk.images.limits import ImageLimits, check_bytes, check_size
from sdk.kernels.packages import package
from sdk.kernels.system import SYSTEM

#: Pillow's decoder of a format, as it is opened without Pillow's own check of sizes: that one
#: prints a warning at a limit that belongs to the process.
_DECODERS = {
    "PNG": ("PngImagePlugin", "PngImageFile"),
    "JPEG": ("JpegImagePlugin", "JpegImageFile"),
    "GIF": ("GifImagePlugin", "GifImageFile"),
    "WEBP": ("WebPImagePlugin", "WebPImageFile"),
    "BMP": ("BmpImagePlugin", "BmpImageFile"),
    "AVIF": ("AvifImagePlugin", "AvifImageFile"),
}
#: An image is converted in bands of whole rows with about as many pixels.
_BAND_PIXELS = 2**16
_SUPPORTED = "expected PNG, JPEG, WebP, GIF, BMP or AVIF"
#: How to turn and mirror pixels to make an image upright, by EXIF's number: quarter turns to the
#: left, then whether left and right are swapped.
_UPRIGHT = {2: (0, 1), 3: (2, 0), 4: (2, 1), 5: (3, 1), 6: (3, 0), 7: (1, 1), 8: (1, 0)}


def decode(
    source: object, limits: ImageLimits | None = None, *, name: str = "image", paths: bool = True
) -> NDArray[np.uint8]:
    """The pixels of an image, uint8 ``[height, width, 3]``, RGB.

    ``source``: the bytes of a file, a path (``str`` or ``pathlib.Path``), a data URL, an image of
    Pillow, or an array of numpy or torch (see :func:`sdk.images.arrays.array_pixels`). Files are
    PNG, JPEG, WebP, GIF, BMP or AVIF. Of an animation the first frame is read. The orientation that
    a camera wrote (EXIF) is applied, also to an image of Pillow that still has it.
    Opacity is applied on a white background. Of 16 bits the upper 8 are kept. CMYK is converted
    without a colour profile.

    ``limits``: what is refused before it is decoded. ``name``: what errors call the image.
    ``paths``: whether a string may name a file; pass False for strings that others sent.

    :raises RequestError: not an image, another format, damaged, or beyond a limit.
    :raises MissingPackageError: Pillow is not installed.
    """
    limits = limits or ImageLimits()
    if isinstance(source, (bytes, bytearray, memoryview)):
        check_bytes(memoryview(source).nbytes, name, limits)
        return _decode_bytes(bytes(source), name, limits)
    if isinstance(source, str) and source[:5].lower() == "data:":
        return _decode_bytes(_data_url(source, name, limits), name, limits)
    if isinstance(source, (str, os.PathLike)):
        return _decode_bytes(_read_file(source, name, limits, paths), name, limits)
    if isinstance(source, np.ndarray) or is_tensor(source):
        return _opaque(array_pixels(source, name, limits), name)
    pillow: Any = getattr(sys.modules.get("PIL.Image"), "Image", None)
    if pillow is not None and isinstance(source, pillow):
        check_size(source.height, source.width, name, limits)
        orientation = exif_orientation(_exif(source))
        return _pixels(source, orientation, f"{name} (an image of Pillow)")
    raise RequestError(
        f"{name} is of type {type(source).__name__}, expected bytes, a path, a data URL, an "
        "image of Pillow, or an array of numpy or torch"
    )


def _data_url(url: str, name: str, limits: ImageLimits) -> bytes:
    head, comma, body = url[5:].partition(",")
    if not comma:
        raise RequestError(
            f"{name} is a data URL without a comma, expected data:image/png;base64,..."
        )
    if not head.lower().endswith(";base64"):
        check_bytes(len(body), name, limits)
        data = unquote_to_bytes(body)
    else:
        check_bytes(len(body) * 3 // 4, name, limits)
        try:
            body = "".join(body.split())
            data = base64.b64decode(
                body.rstrip("=") + "=" * (-len(body.rstrip("=")) % 4), validate=True
            )
        except (binascii.Error, ValueError) as error:
            raise RequestError(
                f"{name} is a data URL whose base64 cannot be read ({error}): encode the file's "
                "bytes again"
            ) from error
    check_bytes(len(data), name, limits)
    return data


def _read_file(path: str | os.PathLike[Any], name: str, limits: ImageLimits, paths: bool) -> bytes:
    """The bytes of a regular file, at most as many as the limit allows."""
    text = os.fsdecode(path)
    shown = ascii(text if len(text) <= 100 else text[:97] + "...")
    if "://" in text[:16]:
        raise RequestError(f"{name} is the URL {shown}, which is not fetched here: pass its bytes")
    if not paths:
        raise RequestError(
            f"{name} is the string {shown}, expected a data URL: data:image/png;base64,..."
        )
    try:
        descriptor = SYSTEM.open_file(path, os.O_RDONLY)
        with os.fdopen(descriptor, "rb") as file:
            status = os.fstat(file.fileno())
            if not stat.S_ISREG(status.st_mode):
                raise RequestError(
                    f"{name} is {shown}, which is not a file: name one with an image"
                )
            check_bytes(status.st_size, f"{name} {shown}", limits)
            return file.read(limits.max_bytes)
    except (OSError, ValueError) as error:
        if isinstance(error, RequestError):
            raise
        reason = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
        raise RequestError(
            f"{name} is the file {shown}, which cannot be read ({reason}): name a file with an "
            "image, or pass its bytes or a data URL"
        ) from error


def _decode_bytes(data: bytes, name: str, limits: ImageLimits) -> NDArray[np.uint8]:
    kind = file_format(data)
    if kind not in _DECODERS:
        found = f"is {kind}" if kind else "is not an image file that can be recognized"
        raise RequestError(f"{name} {found}, {_SUPPORTED}: convert it, or pass an image of Pillow")
    package("PIL.Image", "reading an image needs")
    try:
        parts = stripped(data, kind)
    except Damaged as error:
        raise RequestError(f"{name} is a damaged {kind} file ({error}): save it again") from error
    if parts.size is not None:
        check_size(*parts.size, name, limits)
    what = f"{name} ({kind})"
    picture = _opened(parts.data, kind, what)
    check_size(picture.height, picture.width, name, limits)
    orientation = exif_orientation(_exif(picture)) if kind == "AVIF" else parts.orientation
    return _pixels(picture, orientation, what)


def _opened(data: bytes, kind: str, what: str) -> Any:
    """The image as Pillow opens it, not yet decoded."""
    module, decoder = _DECODERS[kind]
    try:
        plugin = importlib.import_module(f"PIL.{module}")
        if not getattr(plugin, "SUPPORTED", True):
            raise ImportError(module)
    except ImportError as error:
        raise RequestError(
            f"{what} cannot be read by this build of Pillow: convert it to PNG"
        ) from error
    try:
        return getattr(plugin, decoder)(BytesIO(data))
    except Exception as error:
        raise _damaged(error, what) from error


def _pixels(picture: Any, orientation: int, what: str) -> NDArray[np.uint8]:
    """Decodes ``picture`` and makes it RGB and upright."""
    try:
        picture.load()
        pixels = _rgb(picture, what)
    except RequestError:
        raise
    except Exception as error:
        raise _damaged(error, what) from error
    turns, mirrored = _UPRIGHT.get(orientation, (0, 0))
    pixels = np.rot90(pixels, turns)
    return np.ascontiguousarray(pixels[:, ::-1] if mirrored else pixels)


def _rgb(picture: Any, what: str) -> NDArray[np.uint8]:
    """uint8 ``[height, width, 3]``, made in bands: whole copies in between would take up to four
    times the memory."""
    height, width = picture.height, picture.width
    pixels = np.empty((height, width, 3), np.uint8)
    rows = max(1, _BAND_PIXELS // width)
    for top in range(0, height, rows):
        bottom = min(top + rows, height)
        pixels[top:bottom] = _band(picture.crop((0, top, width, bottom)), what)
    return pixels


def _band(picture: Any, what: str) -> NDArray[np.uint8]:
    if picture.mode.startswith("I") or picture.mode == "F":
        return _grey(picture, what)[..., None]
    if "A" in picture.mode.upper().removeprefix("LAB") or "transparency" in picture.info:
        picture = picture.convert("LA") if picture.mode == "La" else picture
        return _opaque(np.asarray(picture.convert("RGBA")), what)
    return np.asarray(picture.convert("RGB"))


def _grey(picture: Any, what: str) -> NDArray[np.uint8]:
    """Grey values of more than 8 bits. Pillow would cut off all that is above 255."""
    values = np.asarray(picture)
    low, high = float(values.min()), float(values.max())
    floats = picture.mode == "F"
    if not (low >= 0 and high <= (1 if floats else 65535)):
        raise RequestError(
            f"{what} has values from {low:g} to {high:g} in mode {picture.mode!r}, expected 0 to "
            f"{'1' if floats else '65535'}: scale them"
        )
    grey = np.rint(values * 255) if floats else values >> 8
    transparent = picture.info.get("transparency")
    if isinstance(transparent, int):
        grey = np.where(values == transparent, 255, grey)
    return grey.astype(np.uint8)


def _opaque(pixels: NDArray[np.uint8], what: str) -> NDArray[np.uint8]:
    """``[H, W, 1, 3 or 4]`` as RGB; a fourth channel is the opacity, on white."""
    if pixels.shape[2] == 1:
        return np.repeat(pixels, 3, axis=2)
    if pixels.shape[2] == 3:
        return pixels
    image: Any = package("PIL.Image", "reading an image with an opacity needs")
    front = image.fromarray(pixels)
    white = image.new("RGBA", front.size, (255, 255, 255, 255))
    return np.asarray(image.alpha_composite(white, front).convert("RGB"))


def _exif(picture: Any) -> bytes:
    exif = picture.info.get("exif")
    return exif if isinstance(exif, bytes) else b""


def _damaged(error: Exception, what: str) -> RequestError:
    if isinstance(error, MemoryError):
        return RequestError(f"{what} does not fit into memory: scale it down")
    reason = " ".join(str(error).split())[:200] or type(error).__name__
    return RequestError(
        f"{what} is damaged or not supported ({reason}): save it again, or convert it to PNG"
    )


__all__ = ["decode"]
