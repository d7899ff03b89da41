"""Random schemas: whatever is answered fits them, and an answer never gets stuck.

A random walk through what a structure allows reaches answers that nobody thought of.
"""

from __future__ import annotations

import json
import random
import re
from collections import Counter
from fractions import Fraction
from typing import Any

import jsonschema
import numpy as np
import pytest

from sdk.api.errors import RequestError
from sdk.structured.library import GrammarError, Matcher
from tests.structured.byte_matcher import matcher_of

Schema = dict[str, Any]
NUMBERS = (0, 1, -1, 2, 5, 0.5, 1.5, -2.5, 0.1, 100, 2**53, 2**53 + 1, -(2**53), 1e-7, 3, 7)
VALUES = (0, 1, 1.0, "a", "", "é", None, True, False, [], [1], {}, {"a": 1}, 0.1, '"')
NAMES = ("a", "b", "ab", "x1", "", "é")
PATTERNS = ("^a", "b$", "^[a-c]{2,4}$", "x|y", "^\\d+$", "é", "^(?:ab)*$", "[^a]")
#: Bytes that end something: half of the steps choose among them, or answers have no end.
ENDS = b'"]},:'
MOST_BYTES = 150


class Maker:
    """Schemas with most keywords, up to three levels deep."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)

    def maybe(self, chance: float) -> bool:
        return self.random.random() < chance

    def schema(self, depth: int = 0) -> Schema:
        kinds = [self.number, self.string, self.listed, self.typed]
        kinds += [self.array, self.object, self.combined, self.combined] if depth < 3 else []
        found = self.random.choice(kinds)(depth + 1)
        if depth < 3 and self.maybe(0.2):
            found = {**self.combined(depth + 1), **found}
        items = list(found.items())
        self.random.shuffle(items)
        return dict(items)

    def number(self, _: int) -> Schema:
        found: Schema = {"type": self.random.choice(["integer", "number"])}
        low, high = sorted(self.random.choices(NUMBERS, k=2))
        if self.maybe(0.6):
            found[self.random.choice(["minimum", "exclusiveMinimum"])] = low
        if self.maybe(0.6):
            found[self.random.choice(["maximum", "exclusiveMaximum"])] = high
        if self.maybe(0.3):
            found["multipleOf"] = self.random.choice([1, 2, 3, 0.5, 0.1, 0.25, 7])
        return found

    def string(self, _: int) -> Schema:
        found: Schema = {"type": "string"}
        if self.maybe(0.4):
            found["minLength"] = self.random.randrange(4)
        if self.maybe(0.5):
            found["maxLength"] = self.random.randrange(6)
        if self.maybe(0.3):
            found["pattern"] = self.random.choice(PATTERNS)
        return found

    def listed(self, _: int) -> Schema:
        values = self.random.choices(VALUES, k=self.random.randrange(1, 4))
        return {"enum": values} if self.maybe(0.5) else {"const": values[0]}

    def typed(self, _: int) -> Schema:
        return {"type": self.random.sample(["string", "integer", "null", "boolean", "array"], 2)}

    def array(self, depth: int) -> Schema:
        found: Schema = {"type": "array", "maxItems": self.random.randrange(4)}
        if self.maybe(0.7):
            found["items"] = self.schema(depth)
        if self.maybe(0.3):
            found["prefixItems"] = [self.schema(depth) for _ in range(self.random.randrange(1, 3))]
        if self.maybe(0.3):
            found["minItems"] = self.random.randrange(3)
        if self.maybe(0.3):
            found["uniqueItems"] = True
        if self.maybe(0.15):
            found["contains"] = self.schema(depth)
        return found

    def object(self, depth: int) -> Schema:
        names = self.random.sample(NAMES, self.random.randrange(4))
        found: Schema = {"type": "object", "properties": {n: self.schema(depth) for n in names}}
        if self.maybe(0.5):
            found["required"] = self.random.sample(names, self.random.randrange(len(names) + 1))
        if self.maybe(0.6):
            found["additionalProperties"] = False if self.maybe(0.6) else self.schema(depth)
        if self.maybe(0.25):
            found["patternProperties"] = {
                self.random.choice(["^a", "b", "^x\\d$"]): self.schema(depth)
            }
        if self.maybe(0.15):
            found["propertyNames"] = self.random.choice([{"pattern": "^[ab]"}, {"maxLength": 2}])
        if self.maybe(0.15):
            found["dependentRequired"] = {"a": ["b"]}
        if self.maybe(0.15):
            found["maxProperties"] = self.random.randrange(4)
        return found

    def combined(self, depth: int) -> Schema:
        parts = [self.schema(depth) for _ in range(3)]
        return self.random.choice(
            [
                {"anyOf": parts[:2]},
                {"allOf": parts[:2]},
                {"oneOf": parts},
                {"not": parts[0]},
                {"if": parts[0], "then": parts[1], "else": parts[2]},
                {"anyOf": parts[:2], "oneOf": parts[1:]},
            ]
        )


def exact(text: str) -> Any:
    """JSON with the numbers that it spells, not their doubles."""

    def number(spelled: str) -> int | Fraction:
        found = Fraction(spelled)
        return int(found) if found.denominator == 1 else found

    return json.loads(text, parse_float=number)


def walk(matcher: Matcher, choices: random.Random) -> bytes | None:
    """A random answer; ``None``: it became too long. Fails if nothing may follow."""
    mask = np.zeros(9, np.uint32)
    text = b""
    while len(text) < MOST_BYTES:
        if matcher.accepting and (matcher.stopped or choices.random() < 0.5):
            return text
        matcher.mask(mask)
        allowed = [byte for byte in range(256) if int(mask[byte >> 5]) >> (byte & 31) & 1]
        if not allowed and matcher.accepting:
            return text
        assert allowed, f"nothing may follow {text!r}"
        some = [byte for byte in allowed if (byte in ENDS) == (choices.random() < 0.5)]
        byte = choices.choice(some or allowed)
        matcher.consume((byte,))
        text += bytes([byte])
    return None


@pytest.mark.quick_cases(2)
@pytest.mark.parametrize("part", range(40))
def test_every_answer_to_a_random_schema_fits_it(part: int) -> None:
    counts: Counter[str] = Counter()
    for seed in range(50 * part, 50 * part + 50):
        maker = Maker(seed)
        schema = maker.schema()
        jsonschema.Draft202012Validator.check_schema(schema)
        try:
            matcher_of(json=schema)
        except (RequestError, GrammarError):
            counts["refused"] += 1
            continue
        validator = jsonschema.Draft202012Validator(exact(json.dumps(schema)))
        for _ in range(5):
            found = walk(matcher_of(json=schema), maker.random)
            if found is None or re.search(rb"[eE][+-]?\d{4}", found):
                counts["too long"] += 1
                continue
            counts["answers"] += 1
            assert validator.is_valid(exact(found.decode())), (found.decode(), schema)
    assert counts["answers"] > 2 * counts["refused"], counts
