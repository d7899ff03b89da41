"""Long texts that a structure forces take little work to compile, and little memory afterwards."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from sdk import LLM, RequestError, SamplingParams, StructuredOutputsParams
from sdk.quant.tokenizer import Tokenizer
from sdk.structured.compiler import GrammarCompiler


class Counting:
    """A tokenizer that counts the characters that it is asked for."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self.characters = 0

    def encode_continued(self, text: str) -> list[int]:
        self.characters += len(text)
        return self._tokenizer.encode_continued(text)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._tokenizer, name)


@pytest.mark.parametrize(
    "structure",
    [
        {"regex": "(ab|cd)" + "e" * 16_000},
        {"regex": "x{200000}"},
        {"regex": "x" * 100_000},
        {"json": {"const": "é" * 50_000}},
        {"choice": ["xy" * 10_000, "xz" * 10_000]},
        {"grammar": f'root ::= [ab] "{"x" * 50_000}"'},
    ],
    ids=lambda structure: str(structure)[:20],
)
def test_what_is_too_long_is_refused_after_little_work(
    compiler: GrammarCompiler, structure: dict[str, Any]
) -> None:
    """The library asks for the tokens of all the rest, for each mask: 228 million characters for
    the first of these, 18 s. Meanwhile the whole process waited for the interpreter."""
    tokenizer = Counting(compiler._tokenizer)
    mine = GrammarCompiler(tokenizer, compiler._vocab_size, compiler._eos_token_ids)  # type: ignore[arg-type]
    with pytest.raises(RequestError, match=r"too complex|of at most 4096 tokens|too many states"):
        mine.compile(StructuredOutputsParams(**structure))
    assert tokenizer.characters < 2_000_000


@pytest.mark.slow
def test_an_answer_of_a_long_text_is_spelled_as_the_tokenizer_does(smollm2: Path) -> None:
    text = " ".join(f"Line {i} of a text that nobody chose." for i in range(60))
    with LLM(smollm2, memory="400MiB", max_model_len=1024, num_threads=1) as llm:
        how = SamplingParams(max_tokens=1000, structured_outputs={"json": {"const": text}})
        [output] = llm.generate("Say it:", how)
        assert json.loads(output.outputs[0].text) == text
        usual = llm.get_tokenizer().encode(f'"{text}"', add_special_tokens=False)
        assert len(output.outputs[0].token_ids) <= len(usual) + 3  # the end, and both quotes


def resident_mib() -> float:
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096 / 2**20


@pytest.mark.slow
def test_what_is_kept_of_a_structure_is_small_whatever_it_repeats(
    compiler: GrammarCompiler,
) -> None:
    """A pattern of nine characters kept 4.5 MB: the states on the way to its shortest answer."""
    compiler.compile(StructuredOutputsParams(regex="x{15000}"))
    before = resident_mib()
    for i in range(40):
        compiler.compile(StructuredOutputsParams(regex=f"x{{15000}}{i}"))
    assert resident_mib() - before < 60  # it was 180
