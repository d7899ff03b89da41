"""Limits for compiling and rendering a chat template, and the account of what a rendering used.

Operations and CPU time limit how long a rendering runs, bytes how much memory it takes. Most
templates render a thousand messages in 0.1 s. Some look back over all messages at each one (Gemma 4
takes 5 s for a thousand), so longer conversations are allowed more time.
"""

from __future__ import annotations

import sys
import time
from collections.abc import ItemsView, Iterable, KeysView, ValuesView
from typing import Any, TypeVar

T = TypeVar("T")

MAX_OPERATIONS = 2_000_000
MAX_SECONDS = 0.5
SECONDS_PER_MESSAGE, MOST_MESSAGES = 0.01, 1000
MAX_BYTES = 128 * 1024 * 1024  # all values of one rendering together, including freed ones
MAX_VALUE = 4 * 1024 * 1024  # characters of one value, and
ITEM_SIZE = 20  # characters that an element of a list counts for: at most 209,715 elements
MAX_SEARCH = 1 << 26  # character comparisons of one search backwards: 70 ms
MAX_OUTPUT = 4 * 1024 * 1024
MAX_WIDTH = 100_000  # integer arguments: widths, counts, fill lengths
MAX_INT_BITS = 4096
MAX_NESTING = 64  # lists in lists; conversations may have 32
MAX_CALLS = 64  # macros inside macros
MAX_JSON_INDENT = 16

# The largest template in common use (Gemma 4) has 1,378 nodes and takes 0.1 s to compile.
MAX_TOKENS = 20_000
MAX_NODES = 6000
MAX_TREE_DEPTH = 150
MAX_BLOCK_DEPTH = 32
MAX_SCOPES = 200_000  # branches times names: the compiler copies the names at each branch

VIEWS = (KeysView, ValuesView, ItemsView)
_CONTAINERS = (list, tuple, dict, range, *VIEWS)
_PIECE = 56  # bytes of an empty string
_ENTRY = 200  # bytes to remember a value's weight
_OBJECT = 512  # bytes of a macro, a loop, an iterator


class BudgetError(Exception):
    """The template exceeded a limit of a rendering; the message names it."""


class Budget:
    """The resources that one rendering has used."""

    def __init__(self, num_messages: int = 0) -> None:
        self.calls = 0
        self._left = MAX_OPERATIONS
        self._made = 0
        self._weights: dict[int, tuple[object, int, int]] = {}
        self._seconds = MAX_SECONDS + SECONDS_PER_MESSAGE * min(num_messages, MOST_MESSAGES)
        self._deadline = time.thread_time() + self._seconds

    def spend(self, size: int = 0) -> None:
        """Count one operation on ``size`` characters."""
        before = self._left
        self._left = before - 1 - (size >> 12)
        if self._left >> 5 != before >> 5:
            if self._left < 0:
                raise BudgetError(f"more than {MAX_OPERATIONS} operations")
            # CPU time, so that a valid template does not fail on a busy machine.
            if time.thread_time() > self._deadline:
                raise BudgetError(f"more than {self._seconds:g} s of CPU time")

    def admit(self, size: int) -> None:
        """Check a value of ``size`` characters before it is created."""
        if size > MAX_VALUE:
            raise BudgetError(f"a value of {size} characters, at most {MAX_VALUE} are allowed")
        self.spend(size)

    def admit_items(self, count: int) -> None:
        """Check a list of ``count`` elements before it is created."""
        self.admit(count * ITEM_SIZE)

    def keep(self, value: T) -> T:
        """Count the memory of a new value, without the values it refers to."""
        if isinstance(value, (str, int, float, *_CONTAINERS)):
            if isinstance(value, str) and len(value) > MAX_VALUE:
                self.admit(len(value))
            self._use(sys.getsizeof(value))
        elif value is not None:
            self._use(_OBJECT)
        return value

    def keep_pieces(self, text: str, count: int) -> None:
        """Count the memory of ``text`` cut into ``count`` new strings."""
        self.admit_items(count)
        self._use(sys.getsizeof(text) + _PIECE * count)

    def _use(self, size: int) -> None:
        self._made += size
        if self._made > MAX_BYTES:
            raise BudgetError(f"more than {MAX_BYTES >> 20} MiB of values")

    def search_back(self, text: str, part: object) -> None:
        """``rfind`` and the like, and stripping: comparisons up to the product of the two lengths.

        Forward searches are linear for long texts (two-way string matching, since Python 3.10).
        """
        if isinstance(part, str):
            work = len(text) * len(part)
            if work > MAX_SEARCH:
                raise BudgetError(
                    f"a search for {len(part)} characters in {len(text)} from the end"
                )
            self.spend(len(text) + work)

    def search(self, text: str, part: object) -> None:
        """A forward search: below 30,000 characters it may compare each with each."""
        if isinstance(part, str):
            short = len(text) * len(part) if len(text) < 30_000 else 0
            self.spend(len(text) + len(part) + short)

    def weigh(self, *values: Any) -> int:
        """Characters needed to print the values; shared parts count as often as they occur.

        The weight of a container is remembered, so that a list that grows by one message at a time
        is not traversed again; lists and dicts cannot change here.
        """
        return sum(self.measure(value)[0] for value in values)

    def measure(self, value: Any, depth: int = 0) -> tuple[int, int]:
        """The weight of a value, and its nesting depth."""
        if isinstance(value, str):
            return ITEM_SIZE + len(value), 0
        if isinstance(value, int):
            if value.bit_length() > MAX_INT_BITS:
                raise BudgetError(f"an integer of more than {MAX_INT_BITS} bits")
            return ITEM_SIZE, 0
        if not isinstance(value, _CONTAINERS):
            return ITEM_SIZE, 0
        known = self._weights.get(id(value))
        if known is not None:
            return known[1], known[2]
        if depth > MAX_NESTING:
            raise BudgetError(f"a value nested more than {MAX_NESTING} deep")
        self.admit_items(len(value))
        total, height = ITEM_SIZE, 0
        if not isinstance(value, range):
            items: Iterable[Any] = value
            if isinstance(value, dict):
                items = (part for pair in value.items() for part in pair)
            for item in items:
                weight, below = self.measure(item, depth + 1)
                total, height = total + weight, max(height, below + 1)
                if total > MAX_VALUE:
                    break
        else:
            total += len(value) * ITEM_SIZE
        self._remember(value, total, height)
        self.spend(total)
        return total, height

    def add_up(self, total: object, left: Any, right: Any) -> None:
        """Compute the weight of ``left + right`` from those of its parts."""
        one, other = self.measure(left), self.measure(right)
        self._remember(total, one[0] + other[0], max(one[1], other[1]))

    def _remember(self, value: object, weight: int, height: int) -> None:
        if weight > MAX_VALUE:
            raise BudgetError(f"a value of more than {MAX_VALUE} characters")
        if height > MAX_NESTING:
            raise BudgetError(f"a value nested more than {MAX_NESTING} deep")
        self._use(_ENTRY)
        self._weights[id(value)] = (value, weight, height)  # kept alive: the id stays unique

    def enter(self) -> None:
        """Count the start of a macro or a recursive loop."""
        self.calls += 1
        if self.calls > MAX_CALLS:
            raise BudgetError(f"more than {MAX_CALLS} nested macro calls")
