"""Grammars in llama.cpp's notation (GBNF)."""

from __future__ import annotations

import random
import re
import sys

import pytest

from sdk import LLM, RequestError, SamplingParams
from sdk.structured.gbnf import is_gbnf
from sdk.structured.gbnf_lark import lark_of
from sdk.structured.library import GrammarError

from .byte_matcher import accepts, matcher_of
from .gbnf_recognizer import recognizes


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


JSON = r"""
root   ::= object
value  ::= object | array | string | number | ("true" | "false" | "null") ws

object ::=
  "{" ws (
            string ":" ws value
    ("," ws string ":" ws value)*
  )? "}" ws

array  ::= "[" ws ( value ("," ws value)* )? "]" ws
string ::=
  "\"" (
    [^"\\\x7F\x00-\x1F] |
    "\\" (["\\/bfnrt] | "u" [0-9a-fA-F]{4}) # escapes
  )* "\"" ws
number ::= ("-"? ([0-9] | [1-9] [0-9]{0,15})) ("." [0-9]+)? ([eE] [-+]? [0-9]{1,15})? ws
ws ::= | " " | "\n" [ \t]{0,20}
"""
ARITHMETIC = """
root  ::= (expr "=" ws term "\\n")+
expr  ::= term ([-+*/] term)*
term  ::= ident | num | "(" ws expr ")" ws
ident ::= [a-z] [a-z0-9_]* ws
num   ::= [0-9]+ ws
ws    ::= [ \\t\\n]*
"""


@pytest.mark.parametrize(
    ("grammar", "accepted", "refused"),
    [
        (r'root ::= [\]\[\-\\"]+', r"][-\"", "a"),
        (r"root ::= [^\]\x41-\u0043\n]", "aD[", "]ABC\n"),
        (r'root ::= "\x41\u00e9\U0001F642\t\r\n\\\"\[\]\-"', ['Aé🙂\t\r\n\\"[]-'], "A"),
        ("root ::= [a-]", "a-", "b"),
        ("root ::= [-a]", "a-", "b"),
        ("root ::= [+--]", "+,-", "*."),
        (r"root ::= [^^]", "a]\n🙂", "^"),
        ("root ::= [^a]", ["\n", "é", "🙂", "b"], "a"),
        ("root ::= .", ["\n", "é", "🙂", "."], ["", "ab"]),
        ("root ::= [.*+?{}|()$#/&~]+", ".*+?{}|()$#/&~", "ab"),
        ('root ::= "" | []', [""], "a"),
        ('root ::= "a"{2}', ["aa"], ["a", "aaa"]),
        ('root ::= "a"{ 1 , 2 } "b"{0,1}', ["a", "aa", "aab"], ["", "aaa", "abb"]),
        ('root ::= "a"{2,}', ["aa", "aaaaaa"], ["a"]),
        ('root ::= "ab"{0} "c"', "c", ["abc"]),
        ('root ::= "a" {2} {2}', ["aaaa"], ["aa", "aaa"]),
        ("root ::= ((([a] | [b] # one\n\n|\n [c])))", "abc", "d"),
        (
            '# first\n\nroot ::= a-1 b2\n\n  a-1 ::= "x" # "y"\r\nb2 ::=\n "z" |\n "w"',
            ["xz", "xw"],
            "x",
        ),
        ('root ::= "a"\nroot ::= "b"', "b", "a"),
        ('root ::= 1a\n1a ::= "x"', "x", "1"),
        ('root ::= "a" | "ab" "c" | "abd"', ["a", "abc", "abd"], ["ab", "ac"]),
        ('root ::= [a-z]* "x"', ["x", "axbx"], ["a", "xa"]),
        ('root ::= s\ns ::= "a" s "b" | "ab"', ["aabb"], ["aab", "abab"]),
        ('root ::= root "+" num | num\nnum ::= [0-9]+', ["1+22+3"], ["1+"]),
        ('root ::= w ("," w)*\nw ::= [a-z,]* "(" root ")" | "q"', ["q", "a,(q),q"], ["a"]),
        (
            JSON,
            ['{"a": [1, -2.5e3, "x\\u00e9\\n", {}, []], "b":true}', "{ }"],
            ["{a}", '{"a":  1}', "[]"],
        ),
        (ARITHMETIC, ["a*(b +12)=x\n", "1=1\n2=2\n"], ["a=", "()=1\n"]),
    ],
)
def test_grammars_are_read_as_llama_cpp_reads_them(
    grammar: str, accepted: list[str], refused: list[str]
) -> None:
    matcher = matcher_of(grammar=grammar)
    assert [text for text in accepted if not accepts(matcher, text)] == []
    assert [text for text in refused if accepts(matcher, text)] == []


def test_tokens_are_named_or_numbered() -> None:
    matcher = matcher_of(grammar='root ::= <[65]> "b" !<[66]>')
    assert accepts(matcher, "AbC") and not accepts(matcher, "AbB") and not accepts(matcher, "bC")
    assert "<think>" in lark_of('root ::= <think> "x"')


def random_part(random_: random.Random, depth: int, names: list[str]) -> str:
    kind = random_.random()
    if depth <= 0 or kind < 0.3:
        kind = random_.random()
        if kind < 0.45:
            return '"' + "".join(random_.choices("abc", k=random_.randint(0, 3))) + '"'
        if kind < 0.8:
            classes = ("a", "b", "ab", "a-c", "bc", "^a", "^b-c")
            return f"[{random_.choice(classes)}]"
        return random_.choice(names)
    parts = [random_part(random_, depth - 1, names) for _ in range(random_.randint(1, 4))]
    if kind < 0.55:
        return " ".join(parts)
    if kind < 0.75:
        return f"({' | '.join(parts)})"
    operators = ("*", "+", "?", "{2}", "{1,2}", "{0,2}", "{2,}")
    return f"({parts[0]}){random_.choice(operators)}"


@pytest.mark.quick_cases(2)
@pytest.mark.parametrize("seed", range(40))
def test_a_random_grammar_accepts_what_its_characters_do(seed: int) -> None:
    """Where texts are cut into lexemes makes no difference, whatever the grammar is."""
    for number in range(10):
        random_ = random.Random(1000 * seed + number)
        names = ["root", "x", "y", "z"][: random_.randint(1, 4)]
        grammar = "\n".join(
            f"{name} ::= {random_part(random_, 3, names)} | {random_part(random_, 2, names)}"
            for name in names
        )
        matcher = matcher_of(grammar=grammar)
        if matcher.error is not None:
            continue
        texts = ["".join(random_.choices("abcd", (4, 4, 4, 1), k=size)) for size in range(8)] * 3
        for text in texts:
            assert accepts(matcher, text) == recognizes(grammar, text), (grammar, text)


def test_many_rules_are_read_in_linear_work() -> None:
    """Counted by calls, not by time."""

    def calls(count: int) -> int:
        names = [f"r{index}" for index in range(count)]
        rules = [f'{name} ::= "{name}" [0-9]+ ("(" root ")")?' for name in names]
        counted = 0

        def count_call(*_: object) -> None:
            nonlocal counted
            counted += 1

        sys.setprofile(count_call)
        try:
            lark_of("\n".join([f"root ::= {' | '.join(names)}", *rules]))
        finally:
            sys.setprofile(None)
        return counted

    few, many = calls(50), calls(200)
    assert many < 5 * few


@pytest.mark.slow
def test_ten_thousand_rules_are_followed() -> None:
    flat = "\n".join(f'r{index} ::= "w{index}" [0-9]+' for index in range(10_000))
    matcher = matcher_of(grammar=f"root ::= {' | '.join(f'r{i}' for i in range(10_000))}\n{flat}")
    assert accepts(matcher, "w9999123") and not accepts(matcher, "w")


@pytest.mark.parametrize(
    ("grammar", "message"),
    [
        ('other ::= "x"', "expected a rule 'root'"),
        ("root ::= missing", "there is no rule 'missing'"),
        ('root ::= "', "it ends inside of a text or class"),
        ("root ::= [a", "it ends inside of a text or class"),
        (r'root ::= "\ud800"', r"\\ud800 is not a character"),
        (r'root ::= "\U00110000"', r"\\U00110000 is not a character"),
        (r'root ::= "\x4"', r"the escape \\x needs 2 hexadecimal digits"),
        (r'root ::= "\q"', r"the escape '\\\\q' is unknown: expected one of \\n"),
        ("root ::= [z-a]", "the range 'z-a' has no character"),
        (r"root ::= [^\u0000-\U0010FFFF]", "a class has no character"),
        ("root ::= *", "nothing comes before a repetition in line 1"),
        ('root ::= "a"{3,2}', r"\{3,2\}: expected a first number that is not larger"),
        ('root ::= "a"{2001}', "at most 2000 required and 10000 allowed repetitions"),
        ('root ::= "a"{0,99999999999}', "at most 2000 required and 10000 allowed repetitions"),
        ('root ::= "a"{,2}', "expected a number in line 1"),
        ('root ::= "a"{1;2}', "expected '}' in line 1, found ';2}'"),
        ('root ::= ("a"', r"expected '\)' in line 1"),
        ('root ::= "a" ]', "expected a line break in line 1, found ']'"),
        ('root = "a" ::=', "expected '::=' in line 1"),
        ('root ::= "a"\n\n= "b"', "expected a line break|expected the name of a rule in line 3"),
        ("root ::= !<think>", r"'!<think>' is not supported: write the token's id"),
        (f"root ::= {'(' * 200}{')' * 200}", "brackets are nested more than 100 deep"),
        (f'root ::= "a"{"?" * 200}', "more than 100 repetitions of one part"),
    ],
)
def test_what_cannot_be_read_is_an_error(grammar: str, message: str) -> None:
    with pytest.raises(RequestError, match=f"grammar: it cannot be read as GBNF: .*{message}"):
        lark_of(grammar)


def test_what_the_library_cannot_follow_is_an_error(tiny: LLM) -> None:
    chain = "\n".join(f'r{index} ::= "a" r{index + 1}' for index in range(5000))
    with pytest.raises(RequestError, match="rules and brackets are nested up to 10002 deep"):
        lark_of(f'root ::= r0\n{chain}\nr5000 ::= "b"')
    with pytest.raises(RequestError, match="nested too deep"):
        part = "a"
        for _ in range(90):
            part = f"({part}){'?' * 90}"
        lark_of(f'root ::= {part}\na ::= "a"')
    with pytest.raises(RequestError, match=r"grammar: it cannot be enforced: .*think"):
        answers(tiny, "root ::= <think>")


@pytest.mark.slow
def test_a_grammar_with_too_many_rules_for_the_library_is_refused_by_name() -> None:
    names = [f"r{index}" for index in range(9000)]
    rules = "\n".join(f'{name} ::= "{name}" [0-9]+ ("(" root ")")?' for name in names)
    with pytest.raises(GrammarError, match="fewer than 65,525 rules and repetitions"):
        matcher_of(grammar=f"root ::= {' | '.join(names)}\n{rules}")


def test_lark_s_notation_is_not_gbnf() -> None:
    assert is_gbnf("root ::= x") and not is_gbnf('start: "x"')
