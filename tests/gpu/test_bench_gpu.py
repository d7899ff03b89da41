"""`embedlm bench gpu` and `embedlm tune` with tiny shapes: every line that runs on a card runs."""

from __future__ import annotations

import itertools
import json
import math
import sys
from collections.abc import Iterator
from dataclasses import replace
from importlib import import_module
from io import StringIO
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
import torch

from sdk import LLM
from sdk.api.errors import SdkError
from sdk.bench.gpu import peer
from sdk.bench.gpu.card import Card, expect_close
from sdk.bench.gpu.engine import idle_share, spans_of_launches
from sdk.bench.gpu.rows import BY_NAME, ROWS, Finding
from sdk.bench.gpu.weights import Weights, affine, float8, int8
from sdk.bench.random_models import SHAPES, Shape, write_random
from sdk.bench.tune.cases import ExpertCase, cases_of, single_case
from sdk.cli import main
from sdk.kernels.gpu.linear import TritonLinear
from sdk.kernels.gpu.packing import pack
from sdk.kernels.gpu.tuning import Tiles, Tuning, read_tuning
from sdk.kernels.reference.decode import decode, unpack_codes

#: What needs a card, and what needs a minute: transformers' own batching sizes a cache of its own.
ELSEWHERE = {"generate-batch"}
#: Why libraries do not run here.
NOT_HERE = {
    "cudnn": "NotImplementedError: ",
    "humming": "Unavailable: humming-kernels is not installed",
}
#: A row of each module.
QUICK = {"limits", "w4", "attention", "one-stream"}
CARD = "Triton's interpreter"


@pytest.fixture
def card() -> Iterator[Card]:
    made = Card({"copy": 1e9, "gemm": 1e9, "requests_tok_s": 10.0})
    yield made
    made.close()


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize(
    "name",
    [
        pytest.param(row.name, marks=() if row.name in QUICK else pytest.mark.slow)
        for row in ROWS
        if row.name not in ELSEWHERE
    ],
)
def test_every_row_gives_findings(card: Card, name: str) -> None:
    row = BY_NAME[name]
    module = import_module(f"sdk.bench.gpu.{row.module}")
    findings = list(getattr(module, row.function)(card))
    assert findings
    for found in findings:
        if found.value is None:
            assert found.note.startswith(NOT_HERE.get(name, "RuntimeError: runs only on a GPU"))
        else:
            assert found.value > 0
            assert found.what
        assert Finding(**json.loads(json.dumps(found.to_json()))) == found


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize("name", ["w4", "requests", "prefill"])  # products, engines, attention
def test_a_rehearsal_runs_a_row_without_timing_it(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def never(*_: Any) -> Any:
        raise AssertionError("timed")

    monkeypatch.setattr("sdk.bench.gpu.card._recorded", never)
    monkeypatch.setattr("sdk.bench.gpu.card._seconds", never)
    row = BY_NAME[name]
    made = Card({}, rehearsing=True)
    list(getattr(import_module(f"sdk.bench.gpu.{row.module}"), row.function)(made))
    made.close()


def test_a_wrong_kernel_is_not_timed(card: Card, monkeypatch: pytest.MonkeyPatch) -> None:
    weights = Weights(card, lambda: affine(card, 32, 256, 4, 128))
    right = TritonLinear.matmul

    def matmul(self: TritonLinear, packed: Any, x: Any, out: Any) -> None:
        right(self, packed, x, out)
        out[:, -1] = 0.0

    monkeypatch.setattr(TritonLinear, "matmul", matmul)
    with pytest.raises(SdkError, match=r"gpu.linear with 2 tokens: .* of the norm, found 0\.\d+"):
        weights.seconds(2)


def test_an_unwritten_result_is_wrong() -> None:
    with pytest.raises(SdkError, match="of the norm, found nan"):
        expect_close("it", torch.tensor([1.0, torch.nan]), torch.ones(2), 1e-2)


def test_a_share_needs_the_limit_it_is_of() -> None:
    card = Card({})
    with pytest.raises(SdkError, match="expected an earlier measurement of copy, found none"):
        _ = card.copy
    card.close()


@pytest.mark.parametrize(
    ("spans", "idle"),
    [
        ([(0.0, 10.0)], 0.0),
        ([(0.0, 4.0), (6.0, 10.0)], 0.2),
        ([(6.0, 10.0), (0.0, 5.0), (1.0, 4.0), (4.5, 6.0)], 0.0),
        ([(0.0, 2.0), (8.0, 10.0), (1.0, 3.0)], 0.5),
        ([(5.0, 5.0)], 0.0),
    ],
)
def test_idle_is_what_no_kernel_covers(spans: list[tuple[float, float]], idle: float) -> None:
    assert idle_share(spans) == pytest.approx(idle)


def test_gaps_inside_one_launch_are_not_between_steps() -> None:
    # two graphs of three kernels, and a copy of its own between them
    kernels = [(7, 0.0, 2.0), (7, 3.0, 4.0), (7, 4.5, 6.0), (8, 7.0, 7.5)]
    kernels += [(9, 8.0, 9.0), (9, 9.5, 10.0), (9, 11.0, 14.0)]
    spans = spans_of_launches(reversed(kernels))
    assert sorted(spans) == [(0.0, 6.0), (7.0, 7.5), (8.0, 14.0)]
    assert idle_share(spans) == pytest.approx(1.5 / 14)


def test_a_profile_without_kernels_is_no_idle_time() -> None:
    with pytest.raises(SdkError, match="recorded nothing"):
        idle_share([])


def test_codes_of_torch_s_four_bit_product_mean_what_ours_do(card: Card) -> None:
    # its twin for CPUs; the order of the pairs is told in products.py
    w = affine(card, 64, 512, 4, 128)
    codes = unpack_codes(w.codes, 4, 512)
    api = torch.ops.aten
    packed = api._convert_weight_to_int4pack_for_cpu(codes.to(torch.int32), 8)
    scale = torch.stack([w.scale, torch.zeros_like(w.scale)], dim=2).transpose(0, 1).contiguous()
    x = card.normal(3, 512)
    out = api._weight_int4pack_mm_for_cpu(x, packed, 128, scale)
    expect_close("int4pack", out, x.float() @ decode(w).t(), 1e-2)


def test_the_peer_refuses_to_time_fewer_tokens_than_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(peer, "open_model", lambda config, device: None)
    monkeypatch.setattr(peer, "generate", lambda model, lengths: 3)
    with pytest.raises(RuntimeError, match="expected 4 tokens, found 3"):
        peer.answer({"what": "generate", "config": {}, "device": "cpu", "lengths": [[2, 4]]})


@pytest.mark.slow
def test_tune_fills_a_table_and_goes_on_where_it_was(
    tmp_path: Path, golden: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model = str(golden / "gguf-Q8_0" / "model.gguf")
    out = ["--out", str(tmp_path)]
    assert main(["tune", model, "--seconds", "0", *out]) == 0
    assert "0 entries measured; the time was over before int8g32 (" in capsys.readouterr().out
    assert main(["tune", *out]) == 0
    assert "8 entries measured\n" in capsys.readouterr().out
    (path,) = tmp_path.iterdir()
    first = json.loads(path.read_text())
    assert [e["max_m"] for e in first["linear"]["int4g128"]] == [1, 16, 4]
    assert [e["max_m"] for e in first["linear_experts"]["int4g128"]] == [1, 64, 2]
    (slower,) = first["slower"]["cudnn_attention"]  # which does not run here
    assert slower["why"].startswith("NotImplementedError: ")
    assert first["dense_from_of"] == first["experts_dense_from_of"] == ["int4g128", 32, 256]
    assert main(["tune", *out]) == 0
    assert "0 entries measured\n" in capsys.readouterr().out
    assert json.loads(path.read_text()) == first
    tuning = read_tuning(CARD, 4, tmp_path)
    assert tuning.table is not None
    assert len(tuning.table["linear", "int4g128", 32, 256]) == 3
    assert len(tuning.table["linear_experts", "int4g128", 32, 256]) == 3
    assert tuning.experts_dense_from == first["experts_dense_from"]


def test_no_weight_is_made_when_the_time_to_tune_is_over(
    tmp_path: Path, card: Card, monkeypatch: pytest.MonkeyPatch
) -> None:
    from sdk.bench import tune

    made, now = [], [0.0]

    def cases() -> Iterator[Any]:
        for number in range(3):
            made.append(number)
            yield replace(next(cases_of(card, None)), type=f"type{number}", tokens=(1, 4))

    def best(card: Card, case: Any, tokens: int) -> Tiles:
        now[0] += 10.0
        return case.begins(card, tokens)[0]

    monkeypatch.setattr(tune, "best_tiles", best)
    monkeypatch.setattr(tune, "dense_from", lambda card, case: 128)
    monkeypatch.setattr(tune.time, "monotonic", lambda: now[0])
    table = tune.Table(tmp_path / "card.json", again=False)
    assert tune.tune(card, table, cases(), 25.0) == (3, "type1 (32, 256), 4 tokens")
    assert made == [0, 1]


def test_an_entry_that_ended_the_process_is_left_out_of_the_next_run(
    tmp_path: Path, card: Card, monkeypatch: pytest.MonkeyPatch
) -> None:
    from sdk.bench import tune

    class Lost(BaseException):
        pass

    def best(card: Card, case: Any, tokens: int) -> Tiles:
        if tokens == 4 and not table.data["lost"]:
            raise Lost
        return case.begins(card, tokens)[0]

    monkeypatch.setattr(tune, "best_tiles", best)
    monkeypatch.setattr(tune, "dense_from", lambda card, case: 128)
    case = replace(next(cases_of(card, None)), tokens=(1, 4))
    table = tune.Table(tmp_path / "card.json", again=False)
    with pytest.raises(Lost):
        tune.tune(card, table, iter([case]), float("inf"))
    table = tune.Table(tmp_path / "card.json", again=False)
    assert table.data["lost"] == [["linear", "int4g128", 32, 256, 4]]
    table.write()
    assert tune.tune(card, table, iter([case]), float("inf")) == (0, "")
    assert [e["max_m"] for e in table.data["linear"]["int4g128"]] == [1]
    assert "measuring" not in json.loads((tmp_path / "card.json").read_text())


def test_every_kernel_that_tune_may_try_is_compiled_beforehand(
    card: Card, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What the search launches is what the compiling processes have compiled, but for shapes."""
    from sdk.bench import tune
    from sdk.bench.tune import compile as tune_compile
    from sdk.kernels.gpu.launch import Launch

    seen: list[tuple[str, Any, Any]] = []

    def note(launch: Launch) -> None:
        if launch.kernel.__name__.startswith("product"):
            seen.append((launch.kernel.__name__, launch.constants, launch.options))

    monkeypatch.setattr(Launch, "run", note)
    monkeypatch.setattr(card, "size", lambda real, tiny: real)
    monkeypatch.setattr(tune_compile, "SHAPES", ((32, 256),))
    card.tuning = replace(card.tuning, doubled=("int", "e4m3"))
    shares = [tune_compile.compile_share(card, number, 3) for number in range(3)]
    compiled, seen = seen, []
    assert sum(shares) == len(compiled) and max(shares) - min(shares) <= 1

    times = itertools.count(1)  # nothing is faster than the rule: its neighbours are tried
    monkeypatch.setattr(tune, "_same", lambda found, expected: True)
    monkeypatch.setattr(tune, "_seconds", lambda *_: float(next(times)))
    cases = list(islice(cases_of(card, None), 5))  # experts are not compiled beforehand
    types = ["int4g128", "int4g32sm", "int4g32", "e4m38g256", "int8g256"]
    assert [case.type for case in cases] == types
    for case in cases:
        for tokens in case.tokens:
            tune.best_tiles(card, case, tokens)
    assert len(seen) > 100
    assert [x for x in seen if x not in compiled] == []


@pytest.mark.parametrize("make", [float8, int8])
@pytest.mark.parametrize("fastest", [Tiles(256, 128, 1, 8, 3), Tiles(64, 128, 2, 4, 4)])
def test_tune_chooses_between_wide_and_narrow_tiles_of_bytes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, make: Any, fastest: Tiles
) -> None:
    """They differ in all numbers, so that a search by one number at a time finds only one kind."""
    from sdk.bench import tune
    from sdk.kernels.gpu.launch import Launch

    card = Card({})
    card.tuning = replace(card.tuning, programs=528, doubled=("int", "e4m3"))
    case = single_case(card, lambda n, k: make(card, n, k), 512, 2048)
    assert case.op == "linear_bytes" and max(case.tokens) > 1000

    def seconds(card: Card, case: Any, tokens: int, tiles: Tiles, product: Any) -> float:
        wide = (fastest.block_n > 128) == (tiles.block_n > 128)
        pairs = zip(tiles, fastest, strict=True)
        return (1.0 if wide else 10.0) + sum(abs(math.log2(a / b)) for a, b in pairs)

    monkeypatch.setattr(card, "size", lambda real, tiny: real)
    monkeypatch.setattr(tune, "_seconds", seconds)
    monkeypatch.setattr(tune, "_result", lambda *_: torch.ones(1))
    table = tune.Table(tmp_path / "card.json", again=False)
    tune.tune(card, table, iter([replace(case, tokens=(4, 128, 4096))]), float("inf"))
    card.close()
    found = read_tuning("card", 528, tmp_path)
    assert found.tiles(case.first, 100, "linear_bytes") == fastest
    assert found.tiles(case.first, 3000, "linear_bytes") == fastest
    launched: list[Any] = []
    monkeypatch.setattr(Launch, "run", lambda launch: launched.append(launch))
    x = torch.zeros(3000, 2048, dtype=card.activations)
    case.kernel.tuned(found).matmul(case.first, x, torch.empty(3000, 512))
    constants = launched[-1].constants
    assert constants["BLOCK_N"] * (2 if constants["TWICE"] else 1) == fastest.block_n
    assert launched[-1].options == {"num_warps": fastest.warps, "num_stages": fastest.stages}


def test_a_compiled_launch_is_not_run(monkeypatch: pytest.MonkeyPatch) -> None:
    from sdk.bench.tune.compile import compile_launch
    from sdk.kernels.gpu.launch import Launch

    class Kernel:
        def warmup(self, **given: Any) -> None:
            self.given = given

    kernel = Kernel()
    compile_launch(Launch(kernel, (3, 1, 1), {"x": 1}, {"BLOCK": 16}, {"num_warps": 4}))
    assert kernel.given == {"grid": (3, 1, 1), "x": 1, "BLOCK": 16, "num_warps": 4}


@pytest.mark.slow
def test_tune_takes_the_shapes_of_a_model(tmp_path: Path, golden: Path) -> None:
    card = Card({})
    cases = list(cases_of(card, str(golden / "gguf-Q8_0" / "model.gguf")))
    card.close()
    assert {case.type for case in cases} == {"int8g32"}
    assert len({case.shape for case in cases}) == len(cases) >= 4


@pytest.mark.slow
def test_tune_times_the_types_that_an_engine_hands_from_kernel_to_kernel(
    card: Card, golden: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from sdk.bench import tune
    from sdk.models.configs.config import ModelConfig

    short = torch.float16
    monkeypatch.setattr("sdk.memory.resolve.device_of", lambda config: "cpu")
    monkeypatch.setattr("sdk.loading.load.activations_of", lambda config, checkpoint: short)
    path = golden / "gguf-Q8_0" / "model.gguf"
    with LLM(path, max_model_len=64) as llm:
        model = llm._runner().model.config
        assert isinstance(model, ModelConfig)
    wide = {(model.hidden_size, model.num_heads * model.head_dim), (model.vocab_size,)}
    seen: list[tuple[Any, ...]] = []
    right = TritonLinear.matmul

    def matmul(self: TritonLinear, packed: Any, x: Any, out: Any) -> None:
        seen.append((packed.shape, x.dtype, out.dtype))
        right(self, packed, x, out)

    monkeypatch.setattr(TritonLinear, "matmul", matmul)
    cases = list(cases_of(card, str(path)))
    del seen[:]  # of loading
    for case in cases:
        tune._result(card, case, 2, case.begins(card, 2)[0], case.product(card, 2))
    outputs = {case.shape: case.outputs for case in cases}
    assert [(shape, short, outputs[shape]) for shape in outputs] == seen
    assert set(outputs.values()) == {short, torch.float32}
    assert {shape for shape, out in outputs.items() if out == torch.float32} >= {
        shape for shape in outputs if shape in wide
    }
    some = list(cases_of(card, None))
    assert {case.inputs for case in some} == {card.activations}


def test_tune_takes_the_experts_of_a_model_as_one(
    tmp_path: Path, card: Card, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = Shape(64, 1, 2, 1, 32, 64, vocab=64, experts=4, used=2)
    monkeypatch.setitem(SHAPES, "tiny-moe", made)
    path = tmp_path / "model.gguf"
    write_random(path, "tiny-moe")
    found = {(case.op, case.shape): case for case in cases_of(card, str(path))}
    for shape in ((128, 64), (64, 64)):
        case = found["linear_experts", shape]
        assert isinstance(case, ExpertCase)
        assert (case.type, case.used) == ("int4g32", 2)
        assert [group.count for group in case.packed] == [4]
        multiply, rows = case.product(card, 8)
        assert rows == 8 * 4
        out = torch.full((rows, shape[0]), torch.nan)
        multiply(case.kernel, case.packed[0], out)
        assert bool(out.isfinite().all())


@pytest.mark.parametrize("tokens", [1, 2, 8])
def test_tuned_experts_run_on_the_tiles_being_measured(card: Card, tokens: int) -> None:
    weights = [pack(affine(card, 32, 256, 4, 128)) for _ in range(5)]
    linear = TritonLinear(torch.float16, Tuning(4))
    types = (torch.float16, torch.float16)
    case = ExpertCase("linear_experts", "int4g128", (32, 256), linear, [], *types, used=3)
    case = replace(case, packed=[linear.group(weights)])
    multiply, rows = case.product(card, tokens)
    tiles, seen = Tiles(16, 16, 2, 1, 1), []

    class Seen(TritonLinear):
        def _multiply(
            self, w: Any, x: Any, out: Any, tiles: Tiles, *rest: Any, **more: Any
        ) -> None:
            seen.append(tiles)

    only = {("linear_experts", "int4g128", 32, 256): [(tokens, tiles)]}
    kernel = Seen(torch.float16, Tuning(4, table=only))
    multiply(kernel, case.packed[0], torch.empty(rows, 32))
    assert seen == [tiles]


def test_tune_passes_over_tiles_that_fail_or_are_wrong(
    card: Card, monkeypatch: pytest.MonkeyPatch
) -> None:
    from sdk.bench import tune

    case = next(cases_of(card, None))
    right = TritonLinear.matmul

    def matmul(self: TritonLinear, packed: Any, x: Any, out: Any) -> None:
        tiles = self._tuning.tiles(packed, x.shape[0])
        if tiles.block_n == 16:
            raise RuntimeError("out of resources: shared memory")
        right(self, packed, x, out)
        if tiles.warps == 1:
            out *= 2

    monkeypatch.setattr(TritonLinear, "matmul", matmul)
    monkeypatch.setattr(
        tune, "_seconds", lambda card, case, tokens, tiles, product: 1.0 / tiles.stages
    )
    best = tune.best_tiles(card, case, 4)
    assert (best.block_n, best.warps) == (64, 4)
    assert isinstance(best, Tiles)


def test_a_table_of_another_version_is_measured_anew(tmp_path: Path) -> None:
    from sdk.bench.tune import Table

    path = tmp_path / "card.json"
    path.write_text('{"version": 0, "linear": {"int4g128": [{}]}}')
    assert Table(path, again=False).data["linear"] == {}
    path.write_text("half a ta")
    assert Table(path, again=False).data["linear"] == {}


def test_a_worker_says_how_every_row_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    from sdk.bench.gpu import limits, worker

    def broken(card: Card) -> Iterator[Finding]:
        yield Finding("half", "", 1.0, numbers={"copy": 2.0})
        raise ValueError("no such thing\nand more")

    monkeypatch.setattr(limits, "measure_limits", broken)
    monkeypatch.setattr(sys, "stderr", StringIO())
    said: list[dict[str, Any]] = []
    first = '{"measured": {}, "rehearsing": false}\n'
    worker.serve([first, "limits\n"], said.append)
    assert said[0]["tiny"] is True
    assert said[0]["device"]["name"] == CARD
    assert said[1]["finding"]["what"] == "half"
    assert said[2] == {"done": "ValueError: no such thing", "lost": False}
