"""The structure begins after the reasoning section, and the section ends in time."""

from __future__ import annotations

import json

import numpy as np
import pytest

from sdk.api.structured_params import StructuredOutputsParams
from sdk.kernels.operators.mask_tasks import MaskTasks
from sdk.structured.answer import Phase, StructuredAnswer
from sdk.structured.compiler import GrammarCompiler
from sdk.structured.library import mask_functions

START, END = 5, 6  # control tokens of the vocabulary that have no other use here


@pytest.fixture
def grammar(compiler: GrammarCompiler):
    return compiler.compile(StructuredOutputsParams(json={"type": "object", "maxProperties": 0}))


def mask_of(answer: StructuredAnswer) -> set[int] | None:
    task = answer.task(0)
    if task is None:
        return None
    masks = np.zeros((1, -(-answer.vocab_size // 32)), np.uint32)
    tasks = MaskTasks(1)
    tasks.set(mask_functions(), [task], masks)
    tasks.compute()
    assert not tasks.failed(0)
    return set(np.flatnonzero(np.unpackbits(masks[0].view(np.uint8), bitorder="little")).tolist())


def text_of(compiler: GrammarCompiler, tokens: list[int]) -> str:
    return compiler._tokenizer.decode(tokens, skip_special_tokens=False)


def test_a_prompt_that_ends_in_a_section(compiler: GrammarCompiler, grammar) -> None:
    answer = StructuredAnswer(grammar, [1, START, 9], [], 20, (START, END))
    assert answer.phase is Phase.REASONING and mask_of(answer) is None
    assert [answer.accept(token) for token in (100, 200, END)] == [100, 200, END]
    allowed = mask_of(answer)
    assert allowed is not None and START not in allowed
    token = max(allowed, key=lambda one: len(text_of(compiler, [one])))
    answer.accept(token)
    assert answer.complete and text_of(compiler, [token]) == "{}"


def test_the_model_may_begin_a_section_or_not(grammar) -> None:
    answer = StructuredAnswer(grammar, [1, START, 9, END, 9], [], 20, (START, END))
    allowed = mask_of(answer)
    assert allowed is not None and START in allowed and 100 not in allowed
    assert answer.accept(START) == START
    assert mask_of(answer) is None
    answer.accept(100)
    answer.accept(END)
    allowed = mask_of(answer)
    assert allowed is not None and START not in allowed


def test_a_section_ends_while_the_structure_fits(compiler: GrammarCompiler, grammar) -> None:
    left = len(grammar.way) + 4
    answer = StructuredAnswer(grammar, [START], [], left, (START, END))
    tokens = []
    while not answer.complete:
        allowed = mask_of(answer)
        tokens.append(answer.accept(100 if allowed is None else min(allowed)))
    assert len(tokens) <= left and tokens.count(END) == 1
    assert json.loads(text_of(compiler, tokens[tokens.index(END) + 1 :])) == {}


def test_the_end_of_the_text_ends_only_the_section(compiler: GrammarCompiler, grammar) -> None:
    answer = StructuredAnswer(grammar, [START], [], 20, (START, END))
    eos = min(compiler._eos_token_ids)
    assert answer.accept(eos) == END
    assert not answer.complete and mask_of(answer) is not None


def test_a_copy_from_its_tokens_is_in_the_same_state(grammar) -> None:
    answer = StructuredAnswer(grammar, [START], [], 6, (START, END))
    tokens = []
    for token in (100, 200, 300, 400):
        tokens.append(answer.accept(token))
        again = StructuredAnswer(grammar, [START], tokens, 6, (START, END))
        assert (again.phase, again.left, again.complete) == (
            answer.phase,
            answer.left,
            answer.complete,
        )
        assert mask_of(again) == mask_of(answer)
