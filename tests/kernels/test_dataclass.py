"""``sdk.kernels.dataclass`` makes the classes that the standard library makes."""

from __future__ import annotations

import copy
import dataclasses
import inspect
import pickle
from collections.abc import Callable
from dataclasses import FrozenInstanceError, field, fields, replace
from typing import Any, ClassVar

import pytest

from sdk.kernels.dataclass import dataclass

Decorator = Callable[..., Any]
BOTH = pytest.mark.parametrize("dataclass", [dataclass, dataclasses.dataclass])


@dataclass(frozen=True, slots=True)
class Point:
    """A point."""

    x: int
    y: float = 0.5
    tags: list[str] = field(default_factory=list, compare=False)


@dataclass
class Loose:
    """Mutable."""

    kind: ClassVar[str] = "loose"
    a: int = 1
    hidden: int = field(default=2, repr=False)
    own: list[int] = field(init=False)

    def __post_init__(self) -> None:
        self.own = [self.a]


@dataclass(frozen=True)
class Base:
    """Frozen."""

    a: int


@dataclass(frozen=True, kw_only=True)
class Below(Base):
    """With one more field."""

    b: int = 3


def shapes(dataclass: Decorator) -> list[Any]:
    """Classes of every kind that this project has."""

    @dataclass(frozen=True, slots=True)
    class Frozen:
        """doc"""

        a: int
        b: str = "x"
        c: tuple[int, ...] = field(default_factory=tuple)

    @dataclass(slots=True)
    class Mutable:
        """doc"""

        a: int
        b: list[int] = field(default_factory=list)

    @dataclass(frozen=True, kw_only=True)
    class Keywords:
        """doc"""

        a: int
        b: str = "x"

    @dataclass(frozen=True, slots=True, eq=False)
    class ByIdentity:
        """doc"""

        a: int

    @dataclass(frozen=True, repr=False)
    class OwnMethods:
        """doc"""

        a: int

        def __repr__(self) -> str:
            return "own"

        def __eq__(self, other: object) -> bool:
            return True

        def __hash__(self) -> int:
            return 7

    @dataclass
    class OwnEqual:
        """doc"""

        a: int

        def __eq__(self, other: object) -> bool:
            return True

    @dataclass(frozen=True)
    class NoFields:
        """doc"""

    return [Frozen, Mutable, Keywords, ByIdentity, OwnMethods, OwnEqual, NoFields]


def facts(cls: Any) -> dict[str, Any]:
    """What can be seen of a class and its instances."""
    given = {"a": 1} if fields(cls) else {}
    one, same = cls(**given), cls(**given)
    found: dict[str, Any] = {
        "signature": str(inspect.signature(cls)),
        "names": [part.name for part in fields(cls)],
        "match": cls.__match_args__,
        "doc": cls.__doc__,
        "params": repr(cls.__dataclass_params__),
        "slots": getattr(cls, "__slots__", None),
        "repr": repr(one).rpartition(".")[2],
        "equal": (one == same, one == object(), one != same),
        "hashable": cls.__hash__ is not None,
        "dict": dataclasses.asdict(one),
        "copy": repr(copy.deepcopy(one)).rpartition(".")[2],
    }
    if cls.__hash__ is not None and cls.__eq__ is not object.__eq__:
        found["hash"] = hash(one) == hash(same)
    changes: list[Callable[[], None]] = [lambda: setattr(one, "a", 5), lambda: delattr(one, "a")]
    for change in changes:
        try:
            change()
        except (FrozenInstanceError, AttributeError) as error:
            found.setdefault("changes", []).append((type(error), str(error)))
    return found


@pytest.mark.parametrize("index", range(len(shapes(dataclass))))
def test_a_class_looks_and_behaves_as_the_standard_library_s(index: int) -> None:
    ours, theirs = shapes(dataclass)[index], shapes(dataclasses.dataclass)[index]
    assert facts(ours) == facts(theirs)


def test_instances_can_be_pickled_copied_and_replaced() -> None:
    one = Point(3, tags=["a"])
    assert pickle.loads(pickle.dumps(one)) == one == copy.copy(one)
    assert pickle.loads(pickle.dumps(one)).tags == ["a"]
    assert replace(one, x=4) == Point(4)
    assert one != replace(one, x=4)
    assert {one: 1}[Point(3)] == 1  # tags are not compared


def test_defaults_are_made_for_each_instance() -> None:
    assert Point(1).tags is not Point(1).tags
    given: list[str] = []
    assert Point(1, 2.0, given).tags is given


def test_bad_arguments_are_type_errors() -> None:
    make: Any = Point
    for given, named in (((), {}), ((1, 2.0, [], 4), {}), ((), {"z": 1})):
        with pytest.raises(TypeError, match=r"Point\.__init__\(\)"):
            make(*given, **named)


def test_fields_without_init_and_post_init() -> None:
    one = Loose(5)
    assert (one.own, one.kind, one.hidden) == ([5], "loose", 2)
    assert repr(one) == "Loose(a=5, own=[5])"
    one.a = 6
    assert one != Loose(5)
    with pytest.raises(TypeError, match="unhashable"):
        hash(one)


def test_a_frozen_class_below_a_frozen_one() -> None:
    one = Below(1, b=2)
    assert (one.a, one.b) == (1, 2)
    assert one == Below(1, b=2) != Below(1)
    assert one != Base(1)
    with pytest.raises(FrozenInstanceError):
        one.b = 3  # type: ignore[misc]
    with pytest.raises(TypeError, match="frozen"):

        @dataclass
        class Thawed(Base):  # type: ignore[misc]
            """Not allowed."""


def test_the_standard_library_may_build_on_a_class() -> None:
    @dataclasses.dataclass(frozen=True)
    class Mine(Base):
        """Of a user."""

        c: int = 9

    assert Mine(1, 2) == Mine(a=1, c=2)
    with pytest.raises(FrozenInstanceError):
        Mine(1).a = 2  # type: ignore[misc]


def test_a_plain_subclass_may_have_attributes_of_its_own() -> None:
    class Mine(Base):
        pass

    one: Any = Mine(1)
    one.note = "x"
    with pytest.raises(FrozenInstanceError):
        one.a = 2
    del one.note


@BOTH
def test_a_value_that_holds_itself_has_a_repr(dataclass: Decorator) -> None:
    @dataclass
    class Node:
        """doc"""

        child: Any = None

    one = Node()
    one.child = one
    assert repr(one).endswith("Node(child=...)")
