"""Loads a tokenizer.json, after checking the cost of its parts.

The ``tokenizers`` library runs whatever a file describes: forty replacements that each double a
text, a template of 100,000 tokens, a decoder that panics on an empty token. Any of these would
stall or end all requests. So the growth of a text, the number of steps and the regular expressions
are limited here. Real tokenizers have at most 6 steps and do not let a text grow.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from sdk.kernels.packages import package
from sdk.quant.errors import CheckpointError

#: The largest one in use, Gemma's, is 33 MB.
MAX_TOKENIZER_BYTES = 128 * 1024 * 1024
_MAX_STATE = 8 * 1024 * 1024  # of one part; a precompiled normalizer is 0.4 MB
_MAX_STEPS = 32
_MAX_GROWTH = 64
_MAX_ADDED = 1024  # characters before or after a text; tokens of a template
_MAX_TOKEN = 4096  # characters of an added token, and of a word for WordPiece
_MAX_REGEX = 4096
_PARTS = ("normalizer", "pre_tokenizer", "post_processor", "decoder")
_LISTS = ("normalizers", "pretokenizers", "processors", "decoders")
_UNBOUNDED = re.compile(r"[*+]|\{\d*,\}")


def load_tokenizer_json(source: Path | str, where: str) -> Any:
    """The ``tokenizers.Tokenizer`` of a file, or of its text. ``where`` names it in errors.

    Raises:
        CheckpointError: it cannot be read, or its cost is not bounded.
    """
    Tokenizer = package("tokenizers", f"{where}: its tokenizer needs").Tokenizer
    try:
        if isinstance(source, Path):
            size = source.stat().st_size
            if size > MAX_TOKENIZER_BYTES:
                raise CheckpointError(
                    f"{where}: {size} bytes, expected at most {MAX_TOKENIZER_BYTES}"
                )
            # not from_file, which takes only paths that are Unicode
            backend = Tokenizer.from_buffer(source.read_bytes())
        else:
            backend = Tokenizer.from_str(source)
        check_parts(backend, where)
    except BaseException as error:
        raise library_error(error, where) from None
    return backend


def without_leading_space(backend: Any) -> Any:
    """A copy that puts no ▁ before a text, and reads control tokens as text."""
    from tokenizers import Tokenizer

    state = json.loads(backend.to_str())
    normalizer = state["normalizer"]
    if normalizer is not None and normalizer["type"] == "Prepend":
        state["normalizer"] = None
    elif normalizer is not None and normalizer["type"] == "Sequence":
        kept = [step for step in normalizer["normalizers"] if step["type"] != "Prepend"]
        state["normalizer"] = {**normalizer, "normalizers": kept}
    source = json.dumps(state, ensure_ascii=False, separators=(",", ":"))
    for scheme in ("first", "always"):
        source = source.replace(f'"prepend_scheme":"{scheme}"', '"prepend_scheme":"never"')
    copy = Tokenizer.from_str(source)
    copy.encode_special_tokens = True
    return copy


def library_error(error: BaseException, where: str) -> BaseException:
    """The exception to raise for an error of the library. It raises plain Exception and, for files
    that contradict themselves, a PanicException, which ``except Exception`` does not catch."""
    if isinstance(error, CheckpointError):
        return error
    if isinstance(error, Exception) or type(error).__name__ == "PanicException":
        return CheckpointError(f"{where}: expected a tokenizer, found {str(error)[:300]}")
    return error


def check_parts(backend: Any, where: str) -> None:
    """:raises CheckpointError: the tokenizer could let a text grow too much, or panic."""
    growth: dict[str, float] = {"text": 1.0, "decoder": 1.0}
    for part in _PARTS:
        place = f"{where}: {part}"
        steps = list(_steps(getattr(backend, part), place))
        if len(steps) > _MAX_STEPS:
            raise CheckpointError(f"{place}: {len(steps)} steps, expected at most {_MAX_STEPS}")
        for step in steps:
            key = "decoder" if part == "decoder" else "text"
            growth[key] *= _growth(step, f"{place}: {step['type']}")
            if growth[key] > _MAX_GROWTH:
                raise CheckpointError(
                    f"{place}: a text may become {growth[key]:.0f} times as long, expected at most "
                    f"{_MAX_GROWTH} times"
                )
    longest = max((len(t.content) for t in backend.get_added_tokens_decoder().values()), default=0)
    word = getattr(backend.model, "max_input_chars_per_word", 0)  # split in quadratic time
    for what, size in (("an added token", longest), ("max_input_chars_per_word", word)):
        if size > _MAX_TOKEN:
            raise CheckpointError(f"{where}: {what} of {size} characters, at most {_MAX_TOKEN}")


def part_state(part: Any) -> dict[str, Any]:
    """The JSON of a part of a tokenizer."""
    found: dict[str, Any] = json.loads(part.__getstate__())
    return found


def _steps(part: Any, place: str) -> Iterator[dict[str, Any]]:
    """The steps of a part in order; nested sequences are flattened."""
    if part is None:
        return
    state = part.__getstate__()
    if len(state) > _MAX_STATE:
        raise CheckpointError(f"{place}: {len(state)} bytes, expected at most {_MAX_STATE}")
    waiting = [json.loads(state)]
    while waiting:
        step = waiting.pop()
        inner = next((step[name] for name in _LISTS if name in step), None)
        if inner is None:
            yield step
        else:
            waiting += reversed(inner)


def _growth(step: Mapping[str, Any], place: str) -> float:
    """The factor by which a step may lengthen a text."""
    kind = step["type"]
    pattern: Mapping[str, str] = step.get("pattern") or {}
    if "Regex" in pattern:
        _check_regex(pattern["Regex"], place)
    if kind == "Replace":
        added, replaced = len(step["content"]), len(pattern.get("String", ""))
        return max(1.0, added / replaced) if replaced else 1.0 + added
    if kind == "ByteLevel":
        return 2.0  # bytes beyond ASCII become characters of two bytes
    if kind == "Strip" and step.get("stop"):  # the decoder's; the normalizer has no such field
        raise CheckpointError(
            f"{place}: stop is {step['stop']}, expected 0: the library panics on shorter tokens"
        )
    if kind == "Prepend":
        _check_added(len(step["prepend"]), place)
    if kind == "TemplateProcessing":
        _check_template(step, place)
    return 1.0


def _check_template(step: Mapping[str, Any], place: str) -> None:
    """Check that a template has each text at most once, and a limited number of tokens."""
    tokens = step["special_tokens"]
    for name in ("single", "pair"):
        pieces = step[name]
        texts = [piece["Sequence"]["id"] for piece in pieces if "Sequence" in piece]
        if len(set(texts)) != len(texts):
            raise CheckpointError(f"{place}: {name}: expected each text once, found it repeated")
        used = (piece["SpecialToken"]["id"] for piece in pieces if "SpecialToken" in piece)
        _check_added(sum(len(tokens[token]["ids"]) for token in used), f"{place}: {name}")


def _check_added(count: int, place: str) -> None:
    if count > _MAX_ADDED:
        raise CheckpointError(
            f"{place}: adds {count} characters or tokens to a text, expected at most {_MAX_ADDED}"
        )


def _check_regex(pattern: str, place: str) -> None:
    """Reject exponential backtracking: an unbounded repetition inside another one."""
    if len(pattern) > _MAX_REGEX:
        raise CheckpointError(
            f"{place}: a regular expression of {len(pattern)} characters, at most {_MAX_REGEX}"
        )
    repeats = [False]  # for each open group: whether it holds an unbounded repetition
    at, in_class = 0, 0
    while at < len(pattern):
        character = pattern[at]
        closed = False
        if character == "\\":
            at += 2
            continue
        if character == "[":
            in_class += 1
        elif character == "]" and in_class:
            in_class -= 1
        elif in_class:
            pass
        elif character == "(":
            repeats.append(False)
        elif character == ")" and len(repeats) > 1:
            closed = repeats.pop()
            repeats[-1] |= closed
            if closed and _UNBOUNDED.match(pattern, at + 1):
                raise CheckpointError(
                    f"{place}: {pattern[:80]!r}: an unbounded repetition inside another one takes "
                    "exponential time"
                )
        elif _UNBOUNDED.match(pattern, at):
            repeats[-1] = True
        at += 1
