"""A prefix outside of an engine: tokens with their keys and values, in memory or in a file.

The file (version 1; 2 if layers have rows of the last tokens only; 3 if layers differ in what
they keep; 4 with images; little endian)::

    8 bytes   "EMBEDKV\\0"
    4         version
    4         length of the header
    header    JSON: model (name, digest), tokens, layers, heads, head_dim, dtype, centred layers;
              in versions 2 and 3 also the rows of each layer, in version 3 also its cache: shape,
              window, or the parts of its state on one rank (quant/caches.py); in version 4 rows,
              caches (empty: all alike), and of each image the digest and the spans of its tokens
    body      token ids int32; then for each layer the centre of its keys, if it has one, float32
              [heads, key_dim], and its rows uint8 [tokens or rows, heads, row]; of a state uint8
              [ranks, bytes] (engine/rank/kv_transfer.py)
    32        SHA-256 of everything before

The checksum detects damage; it is not a signature. A snapshot acts like a part of the prompt, so
restore only files whose author may write your prompts.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import json
import os
import shutil
import struct
import tempfile
from collections.abc import Iterator
from os import PathLike
from pathlib import Path
from stat import S_ISREG
from typing import Any

import numpy as np
from numpy.typing import NDArray

from sdk.api.errors import SnapshotError
from sdk.api.sizes import format_bytes
from sdk.engine.model_key import ModelKey
from sdk.engine.pages.image_keys import PlacedImage
from sdk.engine.rank.kv_transfer import LayerKV, LayerStates, StoredKV, row_widths
from sdk.kernels.dataclass import dataclass
from sdk.kernels.system import SYSTEM
from sdk.loaders.json_file import parse_json
from sdk.quant.caches import StateCache, cache_of, described
from sdk.quant.errors import CheckpointError
from sdk.quant.spec import KVSpec

_MAGIC, _VERSIONS = b"EMBEDKV\0", (1, 2, 3, 4)
_START = struct.Struct("<8sII")
_DIGEST = hashlib.sha256().digest_size
_MOST_HEADER, _MOST_LAYERS = 1 << 20, 1 << 12
_COUNTS = ("tokens", "layers", "heads", "head_dim")


@dataclass(frozen=True, slots=True, repr=False, eq=False)  # arrays do not compare as a whole
class Snapshot:
    """Whole pages of a prefix of one model. ``LLM.snapshot`` makes them and ``LLM.restore`` loads
    them, also in another process and with other KV types, page sizes, ranks and devices.
    """

    model: ModelKey
    token_ids: tuple[int, ...]
    kv: StoredKV
    #: The images among the tokens; of one at the end maybe the first rows alone.
    images: tuple[PlacedImage, ...] = ()

    @property
    def num_tokens(self) -> int:
        """Tokens whose keys and values the snapshot contains."""
        return len(self.token_ids)

    @property
    def nbytes(self) -> int:
        """Bytes of keys, values and states."""
        return sum(layer.rows.nbytes for layer in self.kv.layers)

    def __repr__(self) -> str:
        return (
            f"Snapshot({self.num_tokens} tokens of {self.model.name}, {self.kv.spec.dtype}, "
            f"{self.nbytes} bytes)"
        )

    def save(self, path: str | PathLike[str]) -> None:
        """Write the snapshot to ``path`` atomically: an existing file is replaced at the end.

        If ``path`` is a symbolic link, its target is written. Only this user may read the file,
        because it reveals what a model has read.

        :raises SnapshotError: the file cannot be written (no permission, no space), or ``path`` is
            not a regular file.
        """
        target = Path(path)
        temporary = None
        try:
            target = Path(os.path.realpath(path))
            if target.is_symlink():  # a loop of links
                raise OSError(errno.ELOOP, os.strerror(errno.ELOOP))
            if target.exists() and not target.is_file():
                raise OSError(errno.EINVAL, "not a regular file")
            number, temporary = tempfile.mkstemp(prefix=f".{target.name}-", dir=target.parent)
            with open(number, "wb", buffering=0) as file:
                digest = hashlib.sha256()
                for part in self._parts():
                    digest.update(part)
                    _write(file, part)
                _write(file, memoryview(digest.digest()))
                os.fsync(file.fileno())
            Path(temporary).replace(target)
            temporary = None
            SYSTEM.sync_folder(target.parent)
        except OSError as error:
            raise SnapshotError(
                f"{target}: the snapshot cannot be written, {format_bytes(self.nbytes)} and its "
                f"tokens: {error}{_free(target.parent)}"
            ) from error
        except ValueError as error:  # a NUL in it
            raise SnapshotError(f"{str(path)!r}: not a usable path: {error}") from None
        finally:
            if temporary is not None:
                with contextlib.suppress(OSError):
                    Path(temporary).unlink()

    def _parts(self) -> Iterator[memoryview]:
        spec = self.kv.spec
        header = {
            "model": self.model._asdict(),
            "tokens": self.num_tokens,
            "layers": spec.num_layers,
            "heads": spec.kv_heads,
            "head_dim": spec.head_dim,
            "dtype": spec.dtype,
            "centred": [i for i, layer in enumerate(self.kv.layers) if _centre(layer) is not None],
        }
        rows = [len(layer.rows) for layer in self.kv.layers]
        version = _VERSIONS[0]
        if spec.caches or rows != [self.num_tokens] * len(rows):  # windows
            header["rows"], version = rows, _VERSIONS[1]
        if spec.caches:
            header["caches"], version = [described(one) for one in spec.caches], _VERSIONS[2]
        if self.images:
            found = [[one.digest.hex(), one.spans] for one in self.images]
            header |= {"rows": rows, "caches": header.get("caches", []), "images": found}
            version = _VERSIONS[3]
        text = json.dumps(header).encode()
        yield memoryview(_START.pack(_MAGIC, version, len(text)) + text)
        yield _bytes(np.array(self.token_ids, dtype="<i4"))
        for layer in self.kv.layers:
            if (centre := _centre(layer)) is not None:
                yield _bytes(centre.astype("<f4"))
            yield _bytes(layer.rows)

    @classmethod
    def load(cls, path: str | PathLike[str]) -> Snapshot:
        """Read a file that :meth:`save` wrote.

        :raises SnapshotError: the file cannot be read, has another version, or is truncated or
            damaged.
        """
        try:
            if not S_ISREG(Path(path).stat().st_mode):  # opening a pipe would wait for a writer
                raise SnapshotError(f"{path}: not a regular file")
            with open(path, "rb") as file:
                header = _read_header(file, path)
                size, found = _file_size(header, file.tell()), os.fstat(file.fileno()).st_size
                if found != size:
                    what = "truncated" if found < size else "too long"
                    raise SnapshotError(f"{path}: {what}: expected {size} bytes, found {found}")
                begin = file.tell()
                file.seek(0)
                data = np.fromfile(file, dtype=np.uint8)
        except OSError as error:
            raise SnapshotError(f"{path}: the snapshot cannot be read: {error}") from error
        if hashlib.sha256(data[:-_DIGEST].data).digest() != data[-_DIGEST:].tobytes():
            raise SnapshotError(f"{path}: damaged: the checksum does not match")
        return cls._from(header, data[begin:-_DIGEST])

    @classmethod
    def _from(cls, header: _Header, body: NDArray[np.uint8]) -> Snapshot:
        spec, tokens = header.spec, header.tokens
        ids, at = body[: 4 * tokens].view("<i4"), 4 * tokens
        layers: list[LayerKV | LayerStates] = []
        for layer in range(spec.num_layers):
            centre = None
            if layer in header.centred:
                cache = spec.cache(layer)
                end = at + header.centre_bytes(layer)
                centre = body[at:end].view("<f4").reshape(cache.kv_heads, cache.key_dim)
                at = end
            count = header.rows[layer]
            end = at + count * header.row_bytes(layer)
            rows = body[at:end]
            at = end
            if header.is_state(layer):
                layers.append(LayerStates(rows.reshape(count, -1)))
            else:
                heads = spec.cache(layer).kv_heads
                layers.append(LayerKV(rows.reshape(count, heads, -1), centre))
        kv = StoredKV(spec, tuple(layers), tokens)
        return cls(header.model, tuple(ids.tolist()), kv, header.images)


@dataclass(frozen=True, slots=True)
class _Header:
    model: ModelKey
    tokens: int
    spec: KVSpec
    centred: frozenset[int]
    #: Of each layer: tokens, or ranks that have a part of its state.
    rows: tuple[int, ...]
    images: tuple[PlacedImage, ...]

    def is_state(self, layer: int) -> bool:
        """Whether a layer has a recurrent state."""
        return bool(self.spec.caches) and isinstance(self.spec.caches[layer], StateCache)

    def row_bytes(self, layer: int) -> int:
        """Bytes of a row of all heads, or of a state on one rank."""
        cache = self.spec.caches[layer] if self.spec.caches else self.spec.cache(layer)
        if isinstance(cache, StateCache):
            return sum(part.nbytes for part in cache.parts)
        return cache.kv_heads * sum(row_widths(self.spec, layer))

    def centre_bytes(self, layer: int) -> int:
        """Bytes of the centre of a layer's keys, if it has one."""
        cache = self.spec.cache(layer)
        return 4 * cache.kv_heads * cache.key_dim if layer in self.centred else 0


def _centre(layer: LayerKV | LayerStates) -> NDArray[np.float32] | None:
    return layer.centre if isinstance(layer, LayerKV) else None


def _read_header(file: Any, path: str | PathLike[str]) -> _Header:
    start = file.read(_START.size)
    if len(start) < _START.size or start[: len(_MAGIC)] != _MAGIC:
        raise SnapshotError(f"{path}: not a snapshot")
    _, version, length = _START.unpack(start)
    if version not in _VERSIONS:
        raise SnapshotError(
            f"{path}: a snapshot of version {version}; this release reads versions "
            f"{_VERSIONS[0]} to {_VERSIONS[-1]}"
        )
    text = file.read(min(length, _MOST_HEADER))
    try:
        fields = parse_json(text, str(path))
        counts = [fields[name] for name in _COUNTS]
        if not all(map(_is_count, counts)) or len(text) != length:
            raise ValueError(counts)
        tokens, layers, heads, head_dim = counts
        model = ModelKey(str(fields["model"]["name"]), str(fields["model"]["digest"]))
        given = fields["caches"] if version >= _VERSIONS[2] else ()
        if layers > _MOST_LAYERS or head_dim % 2 or len(given) not in (0, layers):
            raise ValueError(counts)
        caches = tuple(map(cache_of, given))
        spec = KVSpec(layers, heads, head_dim, 1, str(fields["dtype"]), caches)
        rows = tuple(fields["rows"]) if version != _VERSIONS[0] else (tokens,) * layers
        images = _images(fields["images"], tokens) if version == _VERSIONS[3] else ()
        header = _Header(model, tokens, spec, frozenset(fields["centred"]), rows, images)
        _check_layers(header)
        return header
    except (CheckpointError, ValueError, KeyError, TypeError, IndexError) as error:
        raise SnapshotError(f"{path}: damaged: its header cannot be read") from error


def _images(given: Any, tokens: int) -> tuple[PlacedImage, ...]:
    """:raises ValueError: spans are not one after the other among the tokens, or a digest has
    another length."""
    found, end = list[PlacedImage](), 0
    for digest, spans in given:
        for first, count in spans:
            if type(first) is not int or first < end or not _is_count(count):
                raise ValueError(spans)
            end = first + count
        one = PlacedImage(bytes.fromhex(digest), tuple((first, count) for first, count in spans))
        if len(one.digest) != _DIGEST or not spans or end > tokens:
            raise ValueError(given)
        found.append(one)
    return tuple(found)


def _check_layers(header: _Header) -> None:
    """:raises ValueError: layers with states have centres, or there are more rows than tokens.

    :raises CheckpointError: the types of keys and values do not exist.
    """
    layers = range(header.spec.num_layers)
    states = {layer for layer in layers if header.is_state(layer)}
    attention = set(layers) - states
    if len(header.rows) != len(layers) or not all(map(_is_count, header.rows)):
        raise ValueError(header.rows)
    most = max((header.rows[layer] for layer in attention), default=0)
    if most > header.tokens or not header.centred <= attention:
        raise ValueError(most)
    for layer in layers:
        header.row_bytes(layer)


def _is_count(value: Any) -> bool:
    return type(value) is int and 0 < value < 2**31


def _file_size(header: _Header, begin: int) -> int:
    rows = sum(n * header.row_bytes(layer) for layer, n in enumerate(header.rows))
    centres = sum(map(header.centre_bytes, header.centred))
    return begin + 4 * header.tokens + rows + centres + _DIGEST


def _bytes(array: NDArray[Any]) -> memoryview:
    return np.ascontiguousarray(array).data.cast("B")


def _write(file: Any, data: memoryview) -> None:
    """Write all of ``data``: an unbuffered file may write less than it is given."""
    while len(data):
        data = data[file.write(data) :]


def _free(folder: Path) -> str:
    try:
        return f"; {format_bytes(shutil.disk_usage(folder).free)} are free there"
    except OSError:
        return ""
