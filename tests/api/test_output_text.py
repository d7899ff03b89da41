"""``output.text``: what most callers want of an output."""

from __future__ import annotations

import pytest

from sdk import RequestError, SamplingParams
from sdk.testing import FakeLLM


def test_an_output_has_the_text_of_its_answer() -> None:
    with FakeLLM("yes indeed") as llm:
        [output] = llm.generate("hi", SamplingParams(max_tokens=50))
        assert output.text == output.outputs[0].text != ""
        assert "".join(piece.text for piece in llm.stream("hi")) == output.text


def test_the_text_of_several_answers_is_an_error() -> None:
    with FakeLLM("yes") as llm:
        [output] = llm.generate("hi", SamplingParams(n=2, seed=1))
        with pytest.raises(RequestError, match=r"2 answers; use output.outputs\[i\].text"):
            _ = output.text
