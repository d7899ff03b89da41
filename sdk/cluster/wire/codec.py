"""What crosses the network, as tagged bytes that can only become values of known types.

A value is one byte for its kind, then its contents; lists and records contain values. Records are
the named tuples and dataclasses that a :class:`Codec` was made with, and functions are those it
was made with, by their names. Nothing is imported, looked up or called by what the bytes say, other
than the constructors of these types. Every count is checked against the bytes that are left before
anything is allocated.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from sdk.api import errors
from sdk.api.errors import SdkError

#: Lists inside lists. The deepest value of ours has six levels.
_MAX_DEPTH = 16
_U32, _I64, _F64 = struct.Struct("<I"), struct.Struct("<q"), struct.Struct("<d")
_MAX_DIMENSIONS = 8
_ARRAY_TYPES = ("uint8", "int8", "int16", "int32", "int64", "float16", "float32", "float64")
_TENSOR_TYPES = {
    str(dtype).removeprefix("torch."): dtype
    for dtype in (
        *(torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64),
        *(torch.float16, torch.bfloat16, torch.float32, torch.float64),
    )
}
#: Exceptions that may be results. All are made from a message alone.
_ERRORS: dict[str, type[SdkError]] = {
    name: getattr(errors, name) for name in errors.__all__ if name != "QueueFullError"
}
_WHOLE_NUMBERS = range(-(2**63), 2**63)


class CodecError(SdkError):
    """A value cannot be sent to another host, or bytes are not a value."""


class Record(NamedTuple):
    """A type whose values may be sent, and the fields that are; others keep their defaults."""

    type: type[Any]
    fields: tuple[str, ...]


class Codec:
    """Encodes and decodes values of None, bool, int, float, str, bytes, list, tuple, dict, arrays
    and tensors, data types, our exceptions, and these records and functions.

    Values of subclasses of int and str come back as int and str.
    """

    def __init__(
        self, records: Iterable[Record], functions: Iterable[Callable[..., Any]] = ()
    ) -> None:
        self._records = {record.type.__name__: record for record in records}
        self._functions = {_name(function): function for function in functions}

    def encode(self, value: object) -> bytes:
        """The bytes of ``value``. :raises CodecError: it has a type that is not sent."""
        out = bytearray()
        self._write(value, out)
        return bytes(out)

    def decode(self, data: bytes | bytearray | memoryview) -> Any:
        """The value of bytes that :meth:`encode` made. :raises CodecError: they are none."""
        reader = _Reader(memoryview(data).toreadonly())
        try:
            value = self._read(reader, _MAX_DEPTH)
        except CodecError:
            raise
        except (ValueError, TypeError, OverflowError, SdkError) as error:
            raise CodecError(f"message: a value is not valid: {error}") from error
        if reader.left:
            raise CodecError(f"message: {reader.left} bytes follow its end")
        return value

    def _write(self, value: Any, out: bytearray) -> None:
        kind = type(value)
        if value is None or kind is bool:
            out += {None: b"N", True: b"T", False: b"F"}[value]
        elif isinstance(value, int):  # int(): of a subclass, only the number is sent
            _write_int(int(value), out)
        elif kind is float:
            out += b"f" + _F64.pack(value)
        elif isinstance(value, str):
            _write_bytes(b"s", str.encode(value, "utf-8", "surrogatepass"), out)
        elif kind in (bytes, bytearray):
            _write_bytes(b"b", value, out)
        elif kind in (list, tuple):
            if kind is tuple and value and all(type(item) is int for item in value):
                _write_ints(value, out)
                return
            out += (b"l" if kind is list else b"t") + _U32.pack(len(value))
            for item in value:
                self._write(item, out)
        elif kind is dict:
            self._write_pairs(value, out)
        else:
            self._write_object(value, out)

    def _write_pairs(self, value: Mapping[Any, Any], out: bytearray) -> None:
        out += b"d" + _U32.pack(len(value))
        for key, item in value.items():
            self._write(key, out)
            self._write(item, out)

    def _write_object(self, value: Any, out: bytearray) -> None:
        record = self._records.get(type(value).__name__)
        if record is not None and record.type is type(value):
            _write_bytes(b"r", type(value).__name__.encode(), out)
            for name in record.fields:
                self._write(getattr(value, name), out)
        elif isinstance(value, np.ndarray) and value.dtype.name in _ARRAY_TYPES:
            _write_array(b"a", value.dtype.name, value.shape, value.tobytes(), out)
        elif isinstance(value, Tensor) and value.device.type == "cpu":
            name = str(value.dtype).removeprefix("torch.")
            if name not in _TENSOR_TYPES:
                raise CodecError(f"tensors of {value.dtype} are not sent to other hosts")
            _write_array(b"x", name, tuple(value.shape), _bytes_of(value), out)
        elif isinstance(value, torch.dtype) and str(value)[6:] in _TENSOR_TYPES:
            _write_bytes(b"y", str(value)[6:].encode(), out)
        elif isinstance(value, SdkError) and type(value).__name__ in _ERRORS:
            _write_bytes(b"e", type(value).__name__.encode(), out)
            self._write(str(value), out)
        elif callable(value) and self._functions.get(name := _name(value)) is value:
            _write_bytes(b"c", name.encode(), out)
        else:
            raise CodecError(f"a {type(value).__name__} is not sent to other hosts")

    def _read(self, reader: _Reader, depth: int) -> Any:
        if depth < 0:
            raise CodecError(f"message: expected at most {_MAX_DEPTH} levels")
        kind = reader.take(1).tobytes()
        if kind in b"NTF":
            return {b"N": None, b"T": True, b"F": False}[kind]
        if kind == b"i":
            return reader.number(_I64)
        if kind == b"u":
            return int.from_bytes(reader.bytes(), "little", signed=True)
        if kind == b"f":
            return reader.number(_F64)
        if kind == b"s":
            return reader.bytes().decode("utf-8", "surrogatepass")
        if kind == b"b":
            return reader.bytes()
        if kind == b"I":
            return tuple(np.frombuffer(reader.take(8 * reader.count(8)), "<i8").tolist())
        if kind in b"lt":
            items = [self._read(reader, depth - 1) for _ in range(reader.count(1))]
            return items if kind == b"l" else tuple(items)
        if kind == b"d":
            pairs = range(reader.count(2))
            return {self._read(reader, 0): self._read(reader, depth - 1) for _ in pairs}
        return self._read_object(kind, reader, depth)

    def _read_object(self, kind: bytes, reader: _Reader, depth: int) -> Any:
        if kind in b"ax":
            name = reader.name()
            shape, raw = reader.array(name, _ARRAY_TYPES if kind == b"a" else _TENSOR_TYPES)
            if kind == b"a":
                return np.frombuffer(bytearray(raw), name).reshape(shape)
            if not raw.nbytes:
                return torch.empty(shape, dtype=_TENSOR_TYPES[name])
            return torch.frombuffer(bytearray(raw), dtype=_TENSOR_TYPES[name]).reshape(shape)
        known: dict[bytes, Mapping[str, Any]] = {
            b"r": self._records,
            b"c": self._functions,
            b"e": _ERRORS,
            b"y": _TENSOR_TYPES,
        }
        if kind not in known:
            raise CodecError(f"message: unknown kind {kind!r}")
        name = reader.name()
        found = known[kind].get(name)
        if found is None:
            raise CodecError(f"message: {name!r} is not known on this host")
        if kind == b"r":
            fields = {field: self._read(reader, depth - 1) for field in found.fields}
            return found.type(**fields)
        return found(str(self._read(reader, 0))) if kind == b"e" else found


class _Reader:
    """Takes bytes from the front of a message; never more than there are."""

    def __init__(self, data: memoryview) -> None:
        self._data = data

    @property
    def left(self) -> int:
        return len(self._data)

    def take(self, count: int) -> memoryview:
        if count > len(self._data):
            raise CodecError(f"message: expected {count} more bytes, found {len(self._data)}")
        taken, self._data = self._data[:count], self._data[count:]
        return taken

    def number(self, form: struct.Struct) -> Any:
        return form.unpack(self.take(form.size))[0]

    def count(self, size: int) -> int:
        """A number of things that take at least ``size`` bytes each."""
        count: int = self.number(_U32)
        if count * size > len(self._data):
            raise CodecError(
                f"message: expected {count} values of {size} bytes, found {len(self._data)} bytes"
            )
        return count

    def bytes(self) -> bytes:
        return self.take(self.count(1)).tobytes()

    def name(self) -> str:
        return self.bytes().decode("ascii", "backslashreplace")[:100]

    def array(self, name: str, known: Iterable[str]) -> tuple[tuple[int, ...], memoryview]:
        """The shape and the bytes of an array of the type ``name``."""
        if name not in known:
            raise CodecError(f"message: arrays of {name!r} are not known on this host")
        dimensions = self.count(4)
        if dimensions > _MAX_DIMENSIONS:
            raise CodecError(f"message: an array of {dimensions} dimensions")
        shape = tuple(self.number(_U32) for _ in range(dimensions))
        size = 2 if name == "bfloat16" else np.dtype(name).itemsize
        for length in shape:
            size *= length
        return shape, self.take(size)


def _name(function: Any) -> str:
    return f"{getattr(function, '__module__', '')}.{getattr(function, '__qualname__', '')}"


def _bytes_of(tensor: Tensor) -> bytes:
    if not tensor.numel():
        return b""
    dense = tensor.detach().clone(memory_format=torch.contiguous_format)
    return dense.view(-1).view(torch.uint8).numpy().tobytes()


def _write_int(value: int, out: bytearray) -> None:
    if value in _WHOLE_NUMBERS:
        out += b"i" + _I64.pack(value)
    else:  # a seed
        _write_bytes(b"u", value.to_bytes(value.bit_length() // 8 + 1, "little", signed=True), out)


def _write_ints(values: tuple[int, ...], out: bytearray) -> None:
    """Token ids and pages: numbers of eight bytes, without a kind for each."""
    try:
        out += b"I" + _U32.pack(len(values)) + np.array(values, "<i8").tobytes()
    except OverflowError as error:
        raise CodecError(f"a number of {max(values)} is not sent to other hosts") from error


def _write_bytes(kind: bytes, value: bytes | bytearray, out: bytearray) -> None:
    out += kind + _U32.pack(len(value)) + value


def _write_array(
    kind: bytes, name: str, shape: tuple[int, ...], raw: bytes, out: bytearray
) -> None:
    _write_bytes(kind, name.encode(), out)
    out += _U32.pack(len(shape)) + b"".join(map(_U32.pack, shape)) + raw
