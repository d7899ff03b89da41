"""Service level objectives: reading them, judging answers."""

from __future__ import annotations

import pytest

from sdk import SLO, RequestError
from sdk.testing import FakeLLM


def test_a_text_and_its_meaning():
    assert SLO.parse("ttft=0.5, itl=0.05,e2e=10") == SLO(ttft=0.5, tpot=0.05, e2e=10)
    assert str(SLO.parse("tpot=0.05,ttft=0.5")) == "ttft=0.5,tpot=0.05"


@pytest.mark.parametrize(
    ("text", "part"),
    [
        ("ttft", "'ttft'"),
        ("", "''"),
        ("ttft=fast", "'ttft=fast'"),
        ("latency=1", "'latency=1'"),
        ("itl=1,tpot=2", "'tpot=2'"),
        ("ttft=nan", "'ttft=nan'"),
    ],
)
def test_what_is_no_slo_is_named(text, part):
    with pytest.raises(RequestError, match=f"SLO: expected parts like .*; found {part}"):
        SLO.parse(text)


@pytest.mark.parametrize("value", [0, -1.0, float("inf"), "1", True])
def test_a_limit_is_a_number_above_zero(value):
    with pytest.raises(RequestError, match="SLO: ttft: expected seconds above 0, found"):
        SLO(ttft=value)


def test_an_slo_has_a_limit():
    with pytest.raises(RequestError, match="at least one of ttft, tpot and e2e"):
        SLO()


def test_a_good_answer_keeps_every_limit_that_applies_to_it():
    slo = SLO(ttft=0.5, tpot=0.05, e2e=2)
    assert slo.is_met(0.5, 0.05, 2)
    assert slo.is_met(0.5, None, 2)  # one token
    assert not slo.is_met(0.51, 0.05, 2)
    assert not slo.is_met(0.5, 0.051, 2)
    assert not slo.is_met(0.5, 0.05, 2.1)


def test_set_slo_takes_a_text_and_rejects_what_is_neither():
    with FakeLLM() as llm:
        llm.set_slo("ttft=1")
        assert llm.stats().slo == SLO(ttft=1)
        llm.set_slo(None)
        assert llm.stats().slo is None
        with pytest.raises(RequestError, match=r"set_slo: expected an SLO, a text .* found 5"):
            llm.set_slo(5)
