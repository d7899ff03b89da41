"""``embedlm tune serve``: replays, the search on a simulated engine, and the command."""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable
from pathlib import Path

import pytest

from sdk.api.errors import RequestError
from sdk.bench.serve.arrivals import Arrivals
from sdk.bench.serve.lengths import parse_lengths
from sdk.bench.serve.slo import Slo
from sdk.bench.serve.summary import Summary, summarize
from sdk.bench.serve.workload import Session, Turn, Workload
from sdk.bench.tune_serve.replay import Replay
from sdk.bench.tune_serve.search import Found, ImpossibleOptions, OutOfTime, Search
from sdk.bench.tune_serve.space import NAMES, SPACE, Options, default_options, parse_values
from sdk.bench.tune_serve.trials import EngineTrials
from sdk.cli import main
from sdk.testing import FakeAnswer, FakeLLM, ManualClock, tiny_model

Captured = pytest.CaptureFixture[str]
START: Options = default_options()


def rate_of(options: Options) -> float:
    """A simulated engine: the highest rate that it sustains. The optimum is 20 per second with 256
    tokens, 32 requests, drafts, and int8 keys and values."""
    tokens = {32: 0.4, 64: 0.6, 128: 0.8, 256: 1.0, 512: 0.9, 1024: 0.7}
    requests = {4: 0.3, 8: 0.6, 16: 0.9, 32: 1.0, 64: 0.8, 128: 0.5}
    rate = 20.0 * tokens[options["max_num_batched_tokens"]] * requests[options["max_num_seqs"]]
    rate /= 1.0 if options["speculative_config"] == "ngram" else 1.2
    return rate / (1.0 if options["kv_cache_dtype"] == "int8" else 1.15)


class Simulated:
    """Trials of such an engine, with noise of a few percent that depends on the run."""

    def __init__(
        self,
        rate_of: Callable[[Options], float] = rate_of,
        noise: float = 0.0,
        most: int = 10**6,
    ) -> None:
        self.rate_of, self.noise, self.most = rate_of, noise, most
        self.runs = 0

    def run(self, options: Options, rate: float) -> Summary:
        if self.runs >= self.most:
            raise OutOfTime
        self.runs += 1
        wave = (self.runs * 7919 % 13 - 6) / 6  # -1 to 1, the same every time
        good = 100 if rate <= self.rate_of(options) * (1 + self.noise * wave) else 60
        return Summary(100, 10.0, 0, 0, {}, good=good, broken={"ttft": 100 - good})


GRID = [
    dict(zip(NAMES, values, strict=True))
    for values in itertools.product(*(one.values for one in SPACE))
]


@pytest.mark.parametrize("noise", [0.0, 0.02])
@pytest.mark.parametrize("requests", [4, 16, 64, 128])
@pytest.mark.parametrize("tokens", [32, 256, 1024])
def test_the_search_finds_the_optimum_of_the_grid_in_few_runs(
    noise: float, requests: int, tokens: int
) -> None:
    trials = Simulated(noise=noise)
    said: list[str] = []
    start = {**START, "max_num_seqs": requests, "max_num_batched_tokens": tokens}
    best = Search(trials, 0.99, said.append).descend(start, 4.0, SPACE)
    optimum = max(map(rate_of, GRID))
    assert rate_of(best.options) >= 0.95 * optimum
    assert best.rate == pytest.approx(rate_of(best.options), rel=0.08)
    assert trials.runs < len(GRID)  # the grid needs about six for each of its points
    assert sum(": better: " in line for line in said) >= 2


def test_every_decision_is_explained() -> None:
    said: list[str] = []
    Search(Simulated(), 0.99, said.append).descend(START, 4.0, SPACE)
    assert said[0].startswith("start: max_num_batched_tokens=256, max_num_seqs=64, ")
    changes = [line for line in said if line.startswith(NAMES)]
    assert any(line.startswith("max_num_seqs=32: better: ") for line in changes)
    refused = next(line for line in changes if ": no: at " in line)
    assert "40 of 100 not good (ttft 40)" in refused


def test_drafts_that_only_pay_off_with_few_requests_are_found_in_a_second_round() -> None:
    def rate(options: Options) -> float:
        drafts, requests = options["speculative_config"] == "ngram", options["max_num_seqs"]
        return {True: {32: 9.0, 16: 13.0, 64: 8.0}, False: {32: 8.0, 64: 6.0}}[drafts].get(
            requests, 4.0
        )

    best = Search(Simulated(rate), 0.99, lambda text: None).descend(START, 4.0, SPACE)
    assert (best.options["max_num_seqs"], best.options["speculative_config"]) == (16, "ngram")


def test_impossible_options_are_named_and_passed_over() -> None:
    def rate(options: Options) -> float:
        if options["kv_cache_dtype"] == "int8" or options["max_num_seqs"] > 64:
            raise ImpossibleOptions("too little memory")
        return rate_of(options)

    said: list[str] = []
    best = Search(Simulated(rate), 0.99, said.append).descend(START, 4.0, SPACE)
    assert "kv_cache_dtype=int8: not possible: too little memory" in said
    assert best.options["kv_cache_dtype"] == "auto" and best.options["max_num_seqs"] == 32


def test_the_search_ends_with_the_best_so_far_when_its_time_is_up() -> None:
    said: list[str] = []
    best = Search(Simulated(most=9), 0.99, said.append).descend(START, 4.0, SPACE)
    assert said[-1] == "the time is used up: the search ends here"
    assert best.rate > 0
    with pytest.raises(OutOfTime):
        Search(Simulated(most=1), 0.99, said.append).descend(START, 4.0, SPACE)


def test_the_search_looks_beyond_a_value_that_is_worse() -> None:
    """Between 64 and 4 requests at a time rates are lower than at both."""
    rates = {4: 6.0, 8: 2.0, 16: 2.5, 32: 2.8, 64: 3.0, 128: 1.0}
    trials = Simulated(lambda options: rates[options["max_num_seqs"]])
    best = Search(trials, 0.99, lambda text: None).descend(START, 4.0, SPACE)
    assert best.options["max_num_seqs"] == 4 and best.rate == pytest.approx(6.0, rel=0.05)


def test_rates_without_a_limit_end_the_search() -> None:
    said: list[str] = []
    trials = Simulated(lambda options: float("inf"))
    Search(trials, 0.99, said.append).descend(START, 4.0, SPACE)
    assert "not measured" in said[-1] and trials.runs < 100


def test_options_that_sustain_nothing_can_still_be_improved() -> None:
    def rate(options: Options) -> float:
        return rate_of(options) if options["max_num_seqs"] <= 32 else 0.0

    best = Search(Simulated(rate), 0.99, lambda text: None).descend(START, 4.0, SPACE)
    assert best.options["max_num_seqs"] <= 32 and best.rate > 5


def test_a_grid_measures_every_combination() -> None:
    space = [one for one in SPACE if one.name in ("max_num_seqs", "kv_cache_dtype")]

    def rate(options: Options) -> float:
        if options["max_num_seqs"] == 128:
            raise ImpossibleOptions("no")
        return rate_of({**START, **options})

    found = list(Search(Simulated(rate), 0.99, lambda text: None).grid(4.0, space))
    assert len(found) == 10
    best = max(found, key=lambda one: one.rate)
    assert best.options == {"max_num_seqs": 32, "kv_cache_dtype": "int8"}
    assert best.rate == pytest.approx(rate({**START, **best.options}), rel=0.06)


def test_a_grid_without_time_keeps_what_it_has() -> None:
    said: list[str] = []
    found = list(Search(Simulated(most=30), 0.99, said.append).grid(4.0, SPACE))
    assert 0 < len(found) < 30 and "--seconds gives it more" in said[-1]


# ---- replays ----------------------------------------------------------------------------------


def replayed(*sessions: Session, requests: int = 2, answers: object = "a b c") -> Replay:
    """An engine whose step takes one second, two seconds with a new prompt."""
    clock = ManualClock()
    llm = FakeLLM(
        answers,  # type: ignore[arg-type]
        seconds_per_token=1.0,
        seconds_to_first_token=1.0,
        clock=clock,
        sleep=clock.sleep,
        max_num_seqs=requests,
    )
    return Replay(llm, clock=clock)


def session(at: float, *lengths: int, think_s: float = 0.0) -> Session:
    turns = tuple(Turn(f"q{number}", length) for number, length in enumerate(lengths or (3,)))
    return Session(at, (), turns, think_s)


def test_a_replay_has_the_times_of_its_steps_and_none_between_requests() -> None:
    first, last = replayed().run([session(100.0), session(0.0)])
    assert (first.due, first.ttft, first.e2e, list(first.gaps)) == (0.0, 2.0, 4.0, [1.0, 1.0])
    assert (last.due, last.ttft, last.e2e) == (100.0, 2.0, 4.0)
    assert (first.output_tokens, first.prompt_tokens) == (3, 1)


def test_an_arrival_within_a_step_waits_for_its_end() -> None:
    records = replayed().run([session(0.0), session(0.5)])
    assert [(one.due, one.sent) for one in records] == [(0.0, 0.0), (0.5, 2.0)]
    assert records[1].ttft == 3.5  # 1.5 until the step ends, 2 with its prompt


def test_requests_beyond_the_slots_wait() -> None:
    records = replayed(requests=1).run([session(0.0, 2), session(0.0, 2)])
    assert [one.ttft for one in records] == [2.0, 5.0]


def test_a_conversation_goes_on_after_its_answer() -> None:
    first, second = replayed().run([session(0.0, 2, 2, think_s=10.0)])
    assert (first.e2e, second.due) == (3.0, 13.0)


def test_requests_that_fail_are_records_with_an_error() -> None:
    answers = [RequestError("no"), FakeAnswer("a", error=ValueError("NaN")), "a b c"]
    records = replayed(answers=answers, requests=4).run([session(float(i)) for i in range(3)])
    assert sorted(str(one.error) for one in records) == [
        "None",
        "RequestError",
        "finish reason error",
    ]
    assert summarize(records, Slo(ttft=60)).good == 1


def test_a_replay_may_end_early_and_leaves_an_idle_engine() -> None:
    replay = replayed()
    ended = replay.run([session(float(i)) for i in range(9)], lambda records: len(records) == 2)
    assert len(ended) == 2
    (again,) = replay.run([session(0.0)])
    assert again.ttft == 2.0


def trials(opened: list[Options], needed: float = 0.9, requests: int = 10) -> EngineTrials:
    clock = ManualClock()

    def open_engine(options: Options) -> FakeLLM:
        opened.append(dict(options))
        if options["max_num_seqs"] == 128:
            raise RequestError("max_num_seqs: too many\nmore lines")
        return FakeLLM(
            "a b c d",
            seconds_per_token=1.0,
            clock=clock,
            sleep=clock.sleep,
            max_num_seqs=options["max_num_seqs"],
        )

    workload = Workload(parse_lengths("5"), parse_lengths("4"))
    arrivals = Arrivals(1.0, float("inf"))
    return EngineTrials(
        open_engine, workload, arrivals, Slo(e2e=5.5), requests, needed, clock=clock
    )


def test_trials_keep_an_engine_while_its_options_stay() -> None:
    opened: list[Options] = []
    runs = trials(opened)
    try:
        # Four steps of a second for each request: one at a time can do one in four seconds.
        assert runs.run({"max_num_seqs": 1}, 0.25).good_share == 1.0
        failed = runs.run({"max_num_seqs": 1}, 1.0)
        assert (failed.good_share or 0) < 0.9 and failed.requests < 10  # it ended early
        assert runs.run({"max_num_seqs": 8}, 1.0).good_share == 1.0
        assert opened == [{"max_num_seqs": 1}, {"max_num_seqs": 8}]
        with pytest.raises(ImpossibleOptions, match=r"^max_num_seqs: too many$"):
            runs.run({"max_num_seqs": 128}, 1.0)
    finally:
        runs.close()


def test_the_search_works_on_engines() -> None:
    opened: list[Options] = []
    space = [one for one in SPACE if one.name == "max_num_seqs"]
    runs = trials(opened)
    try:
        found = Search(runs, 0.9, lambda text: None).descend({"max_num_seqs": 4}, 0.3, space)
    finally:
        runs.close()
    # Steps of a second serve any number of requests: with 4 slots one request per second is the
    # most, and more slots are better.
    assert found.options["max_num_seqs"] > 4 and found.rate > 1.0


# ---- the command ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("argv", "said"),
    [
        ([], "needs an --slo"),
        (["--slo", "ttft=1", "--trace", "x"], "leave out --trace"),
        (
            ["--slo", "ttft=1", "--search", "max_num_seqs", "--max-num-seqs", "4"],
            "every option of --search has a value already",
        ),
        (["--slo", "ttft=1", "--write", "/nowhere/x.json"], "No such file"),
    ],
)
def test_options_that_do_not_fit_together_are_one_line(
    argv: list[str], said: str, golden: Path, capsys: Captured
) -> None:
    assert main(["tune", "serve", str(golden / "gguf-Q8_0" / "model.gguf"), *argv]) == 2
    err = capsys.readouterr().err
    assert said in err and err.count("\n") == 1


def test_an_unknown_option_to_search_is_refused(capsys: Captured) -> None:
    with pytest.raises(SystemExit):
        main(["tune", "serve", "--search", "threads"])
    assert "expected names of max_num_batched_tokens, " in capsys.readouterr().err


def test_the_command_finds_and_writes_options(tmp_path: Path, capsys: Captured) -> None:
    model = tiny_model(tmp_path)
    written = tmp_path / "options.json"
    argv = ["tune", "serve", str(model), "--slo", "e2e=60", "--num-requests", "2", "--qps", "4000"]
    argv += ["--input-len", "3", "--output-len", "2", "--search", "speculative_config"]
    argv += ["--max-num-seqs", "4", "--write", str(written)]
    assert main(argv) == 0
    captured = capsys.readouterr()
    options = json.loads(written.read_text())
    assert options["max_num_seqs"] == 4 and "speculative_config" in options
    assert json.loads(captured.out.splitlines()[-1]) == options
    assert captured.err.startswith("start: speculative_config=None: ")
    assert "requests per second" in captured.out


def test_found_options_are_what_llm_takes() -> None:
    from sdk.api.options import engine_config

    for options in GRID:
        if options["max_num_batched_tokens"] >= options["max_num_seqs"]:
            engine_config("m", **options)
    assert Found(START, 1.0).options.keys() == set(NAMES)


def test_values_replace_those_of_an_option(capsys: Captured) -> None:
    assert parse_values("max_num_seqs=16,8,16").values == (8, 16)
    assert parse_values("speculative_config=none,ngram,self").values == (None, "ngram", "self")
    assert parse_values("kv_cache_dtype=k8v4").name == "kv_cache_dtype"
    for text in ("", "max_num_seqs", "max_num_seqs=", "max_num_seqs=0", "threads=2", "=3"):
        with pytest.raises(SystemExit):
            main(["tune", "serve", f"--values={text}"])
        assert "such as max_num_seqs=8,16; found" in capsys.readouterr().err
