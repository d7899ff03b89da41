"""What a caller has got of a request that runs again is left out."""

from __future__ import annotations

from hypothesis import given, strategies as st

from sdk.api.outputs import CompletionOutput, RequestOutput
from sdk.api.params import RequestOutputKind
from sdk.cluster.replicas.replay import Progress

TOKENS = 12


def output(answers: dict[int, tuple[int, int]], *, finished: bool) -> RequestOutput:
    """Pieces of answers whose token ``i`` is the number i and the text ``chr(97 + i) * 2``."""
    made = [
        CompletionOutput(
            index,
            "".join(chr(97 + i) * 2 for i in range(begin, end)),
            list(range(begin, end)),
            finish_reason="length" if finished else None,
        )
        for index, (begin, end) in answers.items()
    ]
    return RequestOutput("r", None, [], None, made, finished)


def run(progress: Progress, steps: list[int], upto: int, *, delta: bool) -> list[RequestOutput]:
    """The outputs of one run, which are cut at ``steps``, of the first ``upto`` tokens."""
    ends = sorted({min(step, upto) for step in steps} | {upto})
    begin, found = 0, []
    for end in ends:
        if end > begin:
            span = {0: (begin if delta else 0, end), 1: (begin if delta else 0, end)}
            new = progress.new(output(span, finished=end == TOKENS))
            found += [] if new is None else [new]
            begin = end
    return found


@given(
    first=st.lists(st.integers(1, TOKENS)),
    second=st.lists(st.integers(1, TOKENS)),
    third=st.lists(st.integers(1, TOKENS)),
    lost=st.tuples(st.integers(0, TOKENS - 1), st.integers(0, TOKENS - 1)),
    delta=st.booleans(),
)
def test_two_lost_runs_and_a_whole_one_give_one_answer(
    first: list[int], second: list[int], third: list[int], lost: tuple[int, int], delta: bool
) -> None:
    progress = Progress(RequestOutputKind.DELTA if delta else RequestOutputKind.CUMULATIVE)
    got = run(progress, first, lost[0], delta=delta)
    progress.restart()
    got += run(progress, second, lost[1], delta=delta)
    progress.restart()
    got += run(progress, third, TOKENS, delta=delta)
    for index in (0, 1):
        pieces = [answer for one in got for answer in one.outputs if answer.index == index]
        if delta:
            assert [token for piece in pieces for token in piece.token_ids] == list(range(TOKENS))
            text = "".join(piece.text for piece in pieces)
        else:
            lengths = [len(piece.token_ids) for piece in pieces]
            assert lengths == sorted(lengths)
            text = pieces[-1].text
        assert text == "".join(chr(97 + i) * 2 for i in range(TOKENS))
    assert got[-1].finished
