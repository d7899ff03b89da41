"""What one rendering of a chat template may use, and the account of what it has used.

Fuel and CPU time bound how long it runs, characters how much memory it takes. The numbers leave a
conversation of a thousand messages a factor of twenty.
"""

from __future__ import annotations

import time
from collections.abc import Mapping

MAX_FUEL = 2_000_000
MAX_SECONDS = 1.0
MAX_MADE = 128 * 1024 * 1024  # characters, all values of one rendering together
MAX_VALUE = 4 * 1024 * 1024  # characters of one value, and
ITEM_SIZE = 20  # what an element of a list counts for: at most 209,715 of them
MAX_OUTPUT = 4 * 1024 * 1024
MAX_WIDTH = 100_000  # integer arguments: widths, counts, fill lengths
MAX_INT_BITS = 4096
MAX_JSON_INDENT = 16


class BudgetError(Exception):
    """The template asked for more than a rendering may use; the message says for what."""


class Budget:
    """What one rendering has used."""

    def __init__(self) -> None:
        self.fuel = MAX_FUEL
        self.made = 0
        self._weights: dict[int, tuple[object, int]] = {}
        self.deadline = time.thread_time() + MAX_SECONDS

    def spend(self, size: int = 0) -> None:
        """One step that handles ``size`` characters."""
        before = self.fuel
        self.fuel = before - 1 - (size >> 12)
        if self.fuel >> 5 != before >> 5:
            if self.fuel < 0:
                raise BudgetError(f"more than {MAX_FUEL} operations")
            if time.thread_time() > self.deadline:
                raise BudgetError(f"more than {MAX_SECONDS:g} s of CPU time")

    def admit(self, size: int) -> None:
        """A new value of ``size`` characters is about to exist."""
        if size > MAX_VALUE:
            raise BudgetError(f"a value of {size} characters, at most {MAX_VALUE} are allowed")
        self.made += size
        if self.made > MAX_MADE:
            raise BudgetError(f"more than {MAX_MADE} characters of intermediate values")
        self.spend(size)

    def weigh(self, value: object) -> int:
        """Characters it would take to print a value, counting shared parts as often as they occur.

        The weight of a container is remembered, so that a list that grows by one message at a time
        is not walked through again; lists and dicts cannot change here.
        """
        total = 0
        stack = [value]
        while stack:
            item = stack.pop()
            total += ITEM_SIZE
            if isinstance(item, (str, bytes)):
                total += len(item)
            elif isinstance(item, int):
                if item.bit_length() > MAX_INT_BITS:
                    raise BudgetError(f"an integer of more than {MAX_INT_BITS} bits")
            elif isinstance(item, (Mapping, list, tuple)):
                known = self._weights.get(id(item))
                if known is not None:
                    total += known[1]
                    continue
                if len(item) * ITEM_SIZE > MAX_VALUE:
                    total += len(item) * ITEM_SIZE
                    break
                stack += item
                if isinstance(item, Mapping):
                    stack += item.values()
            if total > MAX_VALUE:
                break
        self.remember(value, total)
        self.spend(total)
        return total

    def remember(self, value: object, weight: int) -> None:
        """The weight of a value that was weighed, or is the sum of two that were."""
        if weight > MAX_VALUE:
            raise BudgetError(f"a value of more than {MAX_VALUE} characters")
        if isinstance(value, (Mapping, list, tuple)):
            self._weights[id(value)] = (value, weight)  # held, so that the id stays its own
