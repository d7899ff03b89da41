"""``dataclass`` of the standard library, made in a third of the time.

The standard library compiles each of up to six methods from source text: 0.84 ms for an average
class of ours (CPython 3.11). A process that answers with a GGUF model makes 120 of them, which took
95 of its first 590 ms. Here only ``__init__`` is compiled, because calls of it must be fast, and
only when it is first looked up: that process needs half of them. The other methods are functions
that all classes share. Fields, slots, ``replace`` and ``fields`` are the standard library's. Not
supported, because nobody uses it: ``order``, ``unsafe_hash``, ``InitVar``.

Modules that every start imports use it (``tests/structure/test_without_torch.py``); for others
the standard library will do. For type checkers there is no difference.
"""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Callable
from dataclasses import MISSING, Field, FrozenInstanceError, fields
from operator import attrgetter
from reprlib import recursive_repr
from typing import TYPE_CHECKING, Any


def _dataclass(
    cls: type | None = None,
    /,
    *,
    frozen: bool = False,
    slots: bool = False,
    kw_only: bool = False,
    eq: bool = True,
    repr: bool = True,
) -> Any:
    def made(cls: type) -> Any:
        # The standard library checks that a class is frozen as those above it are.
        checked = any(hasattr(base, "__dataclass_params__") for base in cls.__bases__)
        process = dataclasses.dataclass(
            init=False,
            repr=False,
            eq=False,
            frozen=frozen and checked,
            slots=slots,
            kw_only=kw_only,
        )
        found: Any = process(cls)
        own = found.__dict__
        params = found.__dataclass_params__
        params.init, params.repr, params.eq, params.frozen = True, repr, eq, frozen
        parts = fields(found)
        found.__init__ = _Init(found, parts, frozen)
        if repr and "__repr__" not in own:
            found.__repr__ = _repr
        if eq:
            _compare(found, parts, frozen)
        if frozen and not checked:
            _freeze(found, {one.name for one in parts}, slots)
        return found

    return made if cls is None else made(cls)


class _Factory:
    """Stands for the default of a field that has a factory."""

    def __repr__(self) -> str:
        return "<factory>"


class _Init:
    """``__init__`` until somebody looks it up: then it compiles the method and takes its own place.

    Threads that look it up at the same time may compile it more than once.
    """

    def __init__(self, cls: type, parts: tuple[Field[Any], ...], frozen: bool) -> None:
        self._of = cls, parts, frozen

    def __get__(self, instance: object, owner: type) -> Any:
        cls = self._of[0]
        init = _init(*self._of)
        cls.__init__ = init  # type: ignore[misc]
        return init.__get__(instance, owner)


def _init(cls: type, parts: tuple[Field[Any], ...], frozen: bool) -> Callable[..., None]:
    """``__init__``: the only method that is compiled."""
    names: dict[str, Any] = {"dc_given": _Factory(), "dc_set": object.__setattr__}
    positional: list[str] = ["self"]
    keywords: list[str] = []
    body: list[str] = []
    for part in parts:
        name = part.name
        value = name
        if part.default is not MISSING:
            names[f"dc_default_{name}"] = part.default
            parameter = f"{name}=dc_default_{name}"
        elif part.default_factory is not MISSING:
            names[f"dc_make_{name}"] = part.default_factory
            parameter = f"{name}=dc_given"
            value = f"dc_make_{name}() if {name} is dc_given else {name}"
        else:
            parameter = name
        if part.init:
            (keywords if part.kw_only else positional).append(parameter)
        elif part.default is not MISSING:
            value = f"dc_default_{name}"
        elif part.default_factory is not MISSING:
            value = f"dc_make_{name}()"
        else:
            continue  # __post_init__ sets it
        body.append(f"dc_set(self, {name!r}, {value})" if frozen else f"self.{name} = {value}")
    if hasattr(cls, "__post_init__"):
        body.append("self.__post_init__()")
    if keywords:
        positional += ["*", *keywords]
    text = (
        f"def make({', '.join(names)}):\n"
        f" def __init__({', '.join(positional)}):\n"
        f"  {'; '.join(body) or 'pass'}\n"
        " return __init__"
    )
    found: dict[str, Any] = {}
    exec(text, sys.modules[cls.__module__].__dict__, found)
    init: Callable[..., None] = found["make"](**names)
    init.__qualname__ = f"{cls.__qualname__}.__init__"
    init.__annotations__ = {part.name: part.type for part in parts if part.init}
    init.__annotations__["return"] = None
    return init


@recursive_repr()
def _repr(self: Any) -> str:
    parts = ((one.name, getattr(self, one.name)) for one in fields(self) if one.repr)
    return f"{type(self).__qualname__}({', '.join(f'{name}={value!r}' for name, value in parts)})"


def _compare(cls: Any, parts: tuple[Field[Any], ...], frozen: bool) -> None:
    """``__eq__`` and ``__hash__`` over the fields that are compared."""
    own = cls.__dict__
    names = [one.name for one in parts if one.compare]
    compared = attrgetter(*names) if names else type
    has_hash = own.get("__hash__") is not None or ("__hash__" in own and "__eq__" not in own)

    def equal(self: Any, other: object) -> Any:
        if type(self) is not type(other):
            return NotImplemented
        return compared(self) == compared(other)

    def hashed(self: Any) -> int:
        return hash(compared(self))

    if "__eq__" not in own:
        cls.__eq__ = equal
    if not has_hash:
        cls.__hash__ = hashed if frozen else None


def _freeze(cls: Any, names: set[str], slots: bool) -> None:
    """Attributes cannot be set; subclasses that are not dataclasses may add others."""

    def setattr_(self: Any, name: str, value: object) -> None:
        if type(self) is cls or name in names:
            raise FrozenInstanceError(f"cannot assign to field {name!r}")
        super(cls, self).__setattr__(name, value)

    def delattr_(self: Any, name: str) -> None:
        if type(self) is cls or name in names:
            raise FrozenInstanceError(f"cannot delete field {name!r}")
        super(cls, self).__delattr__(name)

    cls.__setattr__, cls.__delattr__ = setattr_, delattr_
    if slots:  # pickle and copy would set attributes
        if "__getstate__" not in cls.__dict__:
            cls.__getstate__ = _getstate
        if "__setstate__" not in cls.__dict__:
            cls.__setstate__ = _setstate


def _getstate(self: Any) -> list[Any]:
    return [getattr(self, one.name) for one in fields(self)]


def _setstate(self: Any, state: list[Any]) -> None:
    for one, value in zip(fields(self), state, strict=True):
        object.__setattr__(self, one.name, value)


if TYPE_CHECKING:
    from dataclasses import dataclass as dataclass
else:
    dataclass = _dataclass
