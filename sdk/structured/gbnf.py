"""llama.cpp's notation for grammars (GBNF), rewritten in Lark's by llguidance's converter."""

from __future__ import annotations

import re

from sdk.errors import RequestError

#: Comments, texts, classes of characters, and the dot outside of them.
_PARTS = re.compile(r'#[^\n]*|"(?:[^"\\]|\\.)*"|\[(?:[^\]\\]|\\.)*\]|\.', re.DOTALL)
_UNICODE = re.compile(r"\\(?:u([0-9a-fA-F]{4})|U([0-9a-fA-F]{8})|(.))", re.DOTALL)
#: In GBNF a dot is any character; in Lark's it is none that ends a line.
_DOT = r'([^\n] | "\n")'
#: The converter compares each rule with the others: 9,000 rules take 47 s, 1,500 take 1.3 s.
_MOST_RULES = 1500


def is_gbnf(text: str) -> bool:
    """Whether a grammar has rules as GBNF writes them."""
    return "::=" in text


def lark_of(text: str) -> str:
    """The grammar in Lark's notation. :raises RequestError: it cannot be read."""
    if (count := text.count("::=")) > _MOST_RULES:
        raise RequestError(f"grammar: it has {count} rules: expected at most {_MOST_RULES}")
    from llguidance.gbnf_to_lark import any_to_lark  # loaded with the first grammar

    try:
        lark: str = any_to_lark(_PARTS.sub(_rewritten, text))
    except Exception as error:  # the converter's own errors have no common base class
        raise RequestError(f"grammar: it cannot be read as GBNF: {error}") from error
    return lark


def _rewritten(part: re.Match[str]) -> str:
    if part[0] == ".":
        return _DOT
    return part[0] if part[0].startswith("#") else _UNICODE.sub(_character, part[0])


def _character(escape: re.Match[str]) -> str:
    r"""The converter drops the zeros of ``\u00e9``, which Lark's notation needs."""
    if escape[3] is not None:
        return escape[0]
    code = int(escape[1] or escape[2], 16)
    if code < 0x80:
        return f"\\x{code:02x}"
    if code > 0x10FFFF or 0xD800 <= code < 0xE000:
        raise ValueError(f"{escape[0]} is not a character")
    return chr(code)
