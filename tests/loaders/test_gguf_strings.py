"""Strings read many at a time are those that are read one by one."""

from __future__ import annotations

import random

import numpy as np
import pytest
from numpy.typing import NDArray

from sdk.loaders.gguf_files.strings import short_strings


def stored(strings: list[bytes]) -> NDArray[np.uint8]:
    raw = b"".join(len(text).to_bytes(8, "little") + text for text in strings)
    return np.frombuffer(raw, np.uint8)


def words(count: int, longest: int = 255) -> list[str]:
    pick = random.Random(count)
    letters = "abcdefgh ĠĊ▁é漢😀"
    found = ("".join(pick.choices(letters, k=pick.randint(1, longest))) for _ in range(count))
    return [text.encode()[:longest].decode("utf-8", "ignore") or "x" for text in found]


@pytest.mark.parametrize("count", [1, 2, 3000])
def test_strings_come_back_whatever_lies_behind_them(count: int) -> None:
    expected = words(count)  # 3,000 of them fill several windows, the last string of each cut off
    raw = stored([text.encode() for text in expected])
    assert short_strings(raw, count) == (expected, len(raw))
    for behind in (b"\0" * 20, b"\x05" + b"\0" * 7 + b"after", b"x"):
        longer = np.concatenate((raw, np.frombuffer(behind, np.uint8)))
        assert short_strings(longer, count) == (expected, len(raw))


@pytest.mark.parametrize(
    "odd", [b"a\0b", b"\0", b"a\0", b"\xff", "é".encode()[:1], b"x" * 256, b"x" * 300_000]
)
@pytest.mark.parametrize("place", [0, 1, 2])
def test_what_is_not_plain_is_left_to_the_reader_of_single_strings(odd: bytes, place: int) -> None:
    strings = [b"one", b"two"]
    strings.insert(place, odd)
    assert short_strings(stored(strings), 3) is None


@pytest.mark.parametrize("place", [0, 1, 2])
def test_empty_strings_are_found_or_left(place: int) -> None:
    strings = ["one", "two"]
    strings.insert(place, "")
    raw = stored([text.encode() for text in strings])
    assert short_strings(raw, 3) in (None, (strings, len(raw)))


def test_a_cut_off_array_is_left_to_the_reader_that_names_the_place() -> None:
    raw = stored([b"one", b"two"])
    for end in range(len(raw)):
        assert short_strings(raw[:end], 2) is None
    assert short_strings(raw, 3) is None
