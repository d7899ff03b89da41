"""What simulations read: step costs, traces; and the requests they draw."""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from sdk.api.errors import RequestError
from sdk.cluster.simulation.costs import DEFAULT_COSTS, StepCosts
from sdk.cluster.simulation.executor import END
from sdk.cluster.simulation.measure import fit_prompts
from sdk.cluster.simulation.traces import TraceWorkload, read_trace
from sdk.cluster.simulation.workload import KINDS, MAX_TOKENS, SyntheticWorkload

DEFAULT = StepCosts.read(DEFAULT_COSTS)


def write(path: Path, *lines: Any) -> Path:
    texts = [line if isinstance(line, str) else json.dumps(line) for line in lines]
    path.write_text("\n".join(texts) + "\n", encoding="utf-8")
    return path


# ---- step costs ----------------------------------------------------------------------------------


def test_costs_that_were_written_are_read_back(tmp_path: Path) -> None:
    DEFAULT.write(tmp_path / "costs.json")
    assert StepCosts.read(tmp_path / "costs.json") == DEFAULT


def test_costs_have_no_limits_that_nobody_measured() -> None:
    with pytest.raises(TypeError, match="'page_size', 'num_pages', 'max_num_seqs'"):
        StepCosts(DEFAULT.decode, 0.004, 1e-3, 1e-6, 1e-5)


def test_a_step_costs_what_its_parts_cost() -> None:
    curve = ((1, 0.01), (5, 0.03), (9, 0.04))
    costs = replace(
        DEFAULT, decode=curve, prompt_step=0.004, per_token=1e-3, per_pair=1e-6, per_key=1e-5
    )
    assert costs.seconds(5, 0, 0, 0.0) == pytest.approx(0.03)
    assert costs.seconds(3, 100, 0, 0.0) == pytest.approx(0.02 + 1e-3)
    assert costs.seconds(13, 0, 0, 0.0) == pytest.approx(0.05)
    assert costs.seconds(0, 0, 200, 20_000.0) == pytest.approx(0.004 + 0.2 + 0.02)
    assert costs.seconds(1, 0, 10, 0.0) == pytest.approx(0.01 + 0.01)


def test_the_costs_of_prompts_are_found_in_their_steps() -> None:
    steps = []
    for tokens in (16, 64, 256):
        for context in (0, 1000, 4000):
            pairs = tokens * (context + tokens / 2)
            steps.append((tokens, pairs, 0.003 + 2e-3 * tokens + 1e-6 * pairs))
    assert fit_prompts(steps) == pytest.approx((0.003, 2e-3, 1e-6), rel=1e-6)


def test_the_costs_of_prompts_are_never_negative() -> None:
    assert min(fit_prompts([(16, 128.0, 0.1), (64, 2048.0, 0.05), (256, 32768.0, 0.2)])) >= 0


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"per_token": -1}, "per_token: expected seconds of at least 0, found -1"),
        ({"per_token": "x"}, "per_token: expected seconds"),
        ({"num_pages": 0}, "num_pages: expected an integer from 1 on, found 0"),
        ({"decode": [[1, 0.1]]}, "decode: expected pairs of rows and seconds"),
        ({"decode": [[2, 0.1], [1, 0.2]]}, "decode: expected rows that grow, from 1 on"),
    ],
)
def test_costs_that_make_no_sense_are_rejected(
    tmp_path: Path, change: dict[str, Any], message: str
) -> None:
    found = json.loads(DEFAULT_COSTS.read_text())
    path = write(tmp_path / "costs.json", {**found, **change})
    with pytest.raises(RequestError, match=f"costs.json: {message}"):
        StepCosts.read(path)


@pytest.mark.parametrize("text", ["[]", "{}", '{"decode": 1}'])
def test_a_file_without_costs_is_rejected(tmp_path: Path, text: str) -> None:
    with pytest.raises(RequestError, match=r"expected step costs, as .* is missing"):
        StepCosts.read(write(tmp_path / "costs.json", text))


def test_a_file_that_is_no_json_is_rejected(tmp_path: Path) -> None:
    with pytest.raises(RequestError, match=r"costs.json: expected JSON with step costs"):
        StepCosts.read(write(tmp_path / "costs.json", "seconds"))


# ---- traces --------------------------------------------------------------------------------------


def test_our_lines_are_read(tmp_path: Path) -> None:
    path = write(
        tmp_path / "trace.jsonl",
        {"arrival": 12.0, "input_length": 30, "output_length": 5, "kind": "chat"},
        "",
        {"arrival": 10.0, "prompt": [5, 6, 70_000], "output_length": 1},
    )
    entries = read_trace(path, speed=2.0)
    assert [(one.arrival, one.length, one.answer, one.kind) for one in entries] == [
        (0.0, 3, 1, "trace"),
        (1.0, 30, 5, "chat"),
    ]
    first, second = TraceWorkload(entries, 1000).arrivals()
    assert list(first.prompt) == [5, 6, 70_000]
    assert list(first.answer) == [END]
    assert (len(second.prompt), len(second.answer), second.answer[-1]) == (30, 5, END)


def test_equal_hash_ids_of_mooncakes_traces_are_equal_prefixes(tmp_path: Path) -> None:
    path = write(
        tmp_path / "trace.jsonl",
        {"timestamp": 0, "input_length": 1100, "output_length": 9, "hash_ids": [0, 1, 2]},
        {"timestamp": 3000, "input_length": 1200, "output_length": 9, "hash_ids": [0, 1, 3]},
    )
    first, second = TraceWorkload(read_trace(path), 8192).arrivals()
    assert second.arrival == 3.0
    assert (len(first.prompt), len(second.prompt)) == (1100, 1200)
    assert first.prompt[:1024] == second.prompt[:1024]
    assert first.prompt[1024:1100] != second.prompt[1024:1100]


def test_azures_csv_is_read(tmp_path: Path) -> None:
    path = write(
        tmp_path / "trace.csv",
        "TIMESTAMP,ContextTokens,GeneratedTokens",
        "2023-11-16 18:15:46.6805900,374,44",
        "2023-11-16 18:15:48.1805900,396,109",
    )
    entries = read_trace(path)
    assert [(one.length, one.answer) for one in entries] == [(374, 44), (396, 109)]
    assert entries[1].arrival == pytest.approx(1.5)


def test_requests_longer_than_the_context_are_left_out(tmp_path: Path) -> None:
    lines = [{"arrival": 1, "input_length": n, "output_length": 10} for n in (90, 91)]
    workload = TraceWorkload(read_trace(write(tmp_path / "trace.jsonl", *lines)), 100)
    assert workload.num_left_out == 1
    assert [len(one.prompt) for one in workload.arrivals()] == [90]


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{", "Expecting property name"),
        ("[]", "expected an object"),
        ({"input_length": 3, "output_length": 1}, "expected arrival .* found None"),
        ({"arrival": -1, "input_length": 3, "output_length": 1}, "expected arrival .* found -1"),
        ({"arrival": 0, "output_length": 1}, "input_length: expected an integer"),
        ({"arrival": 0, "input_length": 0, "output_length": 1}, "input_length: expected an int"),
        (
            {"arrival": 0, "input_length": 3, "output_length": True},
            "output_length: expected an int",
        ),
        ({"arrival": 0, "prompt": ["a"], "output_length": 1}, "prompt: expected a list of int"),
        (
            {"arrival": 0, "input_length": 3, "output_length": 1, "hash_ids": [-1]},
            "hash_ids: expected a list of int",
        ),
        ({"arrival": 0, "input_length": 3, "output_length": 1, "kind": 5}, "kind: expected a name"),
    ],
)
def test_a_line_that_makes_no_sense_is_named(tmp_path: Path, line: Any, message: str) -> None:
    good = {"arrival": 0, "input_length": 3, "output_length": 1}
    path = write(tmp_path / "trace.jsonl", good, line)
    with pytest.raises(RequestError, match=f"trace.jsonl, line 2: {message}"):
        read_trace(path)


def test_a_csv_line_with_missing_cells_is_named(tmp_path: Path) -> None:
    path = write(tmp_path / "t.csv", "TIMESTAMP,ContextTokens,GeneratedTokens", "2023-11-16,3")
    with pytest.raises(RequestError, match=r"t.csv, line 2: expected TIMESTAMP"):
        read_trace(path)


def test_a_trace_without_requests_is_rejected(tmp_path: Path) -> None:
    with pytest.raises(RequestError, match="expected one request per line, found none"):
        read_trace(write(tmp_path / "trace.jsonl", ""))


def test_a_trace_that_is_no_text_is_rejected(tmp_path: Path) -> None:
    (tmp_path / "trace.jsonl").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(RequestError, match="expected UTF-8 text"):
        read_trace(tmp_path / "trace.jsonl")


# ---- synthetic requests --------------------------------------------------------------------------


def synthetic(mix: dict[str, float], count: int = 400, seed: int = 0) -> SyntheticWorkload:
    return SyntheticWorkload(mix, [float(n) for n in range(count)], count, seed)


def test_the_kinds_of_a_mix_come_in_their_shares() -> None:
    mix = {"chats": 0.5, "documents": 0.25, "completions": 0.25}
    counts = Counter(one.kind for one in synthetic(mix).arrivals())
    assert 160 <= counts["chats"] <= 240
    assert 70 <= counts["documents"] <= 130


def test_documents_are_long_and_share_nothing() -> None:
    prompts = [bytes(one.prompt) for one in synthetic({"documents": 1.0}, 50).arrivals()]
    assert min(map(len, prompts)) >= 2000
    assert len({prompt[:16] for prompt in prompts}) == 50


def test_chats_begin_with_one_of_a_few_texts() -> None:
    prompts = [bytes(one.prompt) for one in synthetic({"chats": 1.0}, 100).arrivals()]
    shape = KINDS["chats"]
    assert len({prompt[: shape.system] for prompt in prompts}) == shape.systems


def test_a_turn_continues_the_one_before_some_time_later() -> None:
    workload = synthetic({"chats": 1.0})
    turns = 0
    for request in workload.arrivals():
        following = workload.next_turn(request, now=500.0)
        if following is not None:
            turns += 1
            said = bytes(request.prompt) + bytes(request.answer[:-1])
            assert bytes(following.prompt).startswith(said)
            assert len(following.prompt) > len(said)
            assert following.arrival > 500.0
            assert (following.session, following.turn) == (request.session, 1)
    assert turns > 50


def test_a_workload_ends_with_its_last_request_and_fits_the_context() -> None:
    workload = SyntheticWorkload({"chats": 1.0}, [0.0] * 50, 50, max_model_len=2048)
    requests = list(workload.arrivals())
    assert len(requests) == 50
    assert workload.next_turn(requests[0], 1.0) is None
    assert all(len(one.prompt) + MAX_TOKENS <= 2048 for one in requests)


def test_a_context_without_room_for_an_answer_is_rejected() -> None:
    with pytest.raises(RequestError, match="max_model_len: these requests need at least 1488"):
        SyntheticWorkload({"chats": 1.0}, [0.0], 1, max_model_len=1487)
    documents = SyntheticWorkload({"documents": 1.0}, [0.0], 1, max_model_len=1100).arrivals()
    assert len(next(documents).prompt) == 1100 - MAX_TOKENS


def test_the_same_seed_draws_the_same_requests_and_another_one_others() -> None:
    first, again, other = (list(synthetic({"chats": 1.0}, 9, s).arrivals()) for s in (1, 1, 2))
    assert first == again
    assert first != other
