"""Grammars in llama.cpp's notation (GBNF)."""

from __future__ import annotations

import re

import pytest

from sdk import LLM, RequestError, SamplingParams
from sdk.structured.gbnf import is_gbnf, lark_of


def answers(llm: LLM, grammar: str) -> set[str]:
    """What a model says under a grammar."""
    params = [
        SamplingParams(
            temperature=5.0, seed=seed, max_tokens=30, structured_outputs={"grammar": grammar}
        )
        for seed in range(8)
    ]
    return {one.outputs[0].text for one in llm.generate(["the cat"] * 8, params)}


@pytest.mark.parametrize(
    ("grammar", "pattern"),
    [
        ('root ::= "yes" | "no"', "yes|no"),
        ('root ::= item{2}\nitem ::= "- " [a-c]+ "\\n"  # a list', r"(- [a-c]+\n){2}"),
        ('root ::= item+\nitem ::= "- " [^\\r\\n]+ "\\n"', r"(- [^\r\n]+\n)+"),
        ('root ::= "\\u00e9" [\\u0041-\\u0043] "\\x2e"', "é[A-C][.]"),
        ('root ::= "\\U0001F642" | "[.]"', "🙂|\\[\\.\\]"),
        ('root ::= "a" .{3} "z"', "a[\\s\\S]{3}z"),
        ('root ::=\n  ("a" |\n   "b")? [\\]\\[]', r"[ab]?[\]\[]"),
    ],
)
def test_answers_follow_the_grammar(tiny: LLM, grammar: str, pattern: str) -> None:
    found = answers(tiny, grammar)
    assert found and all(re.fullmatch(pattern, text) for text in found), found


def test_a_dot_may_end_a_line() -> None:
    assert '"\\n"' in lark_of("root ::= .")
    assert '"\\n"' not in lark_of('root ::= "." [.]  # a dot.')


@pytest.mark.parametrize(
    "grammar",
    ['other ::= "x"', "root ::= missing", 'root ::= "', 'root ::= "\\ud800"', "root ::= <think>"],
)
def test_what_cannot_be_read_is_an_error(tiny: LLM, grammar: str) -> None:
    with pytest.raises(RequestError, match="grammar: it cannot be read as GBNF: "):
        answers(tiny, grammar)


def test_lark_s_notation_is_not_gbnf() -> None:
    assert is_gbnf("root ::= x") and not is_gbnf('start: "x"')
