"""Expert parallelism through the public class: ranks with whole experts, which may move."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator, Sequence
from operator import attrgetter
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from safetensors.torch import load_file, save_file

import sdk.testing.tiny_models as tiny_models
from sdk import (
    LLM,
    AlignmentError,
    CheckpointError,
    EngineDeadError,
    LoRARequest,
    RequestError,
    RequestOutput,
    SamplingParams,
)
from sdk.engine.rank.experts import shares_of
from sdk.engine.rank.runner_config import RunnerConfig
from sdk.models.decoder import Decoder
from sdk.models.source import Source
from tests.api.engines import LIMIT, Gate, tokens

SPREAD: dict[str, Any] = {"tensor_parallel_size": 2, "enable_expert_parallel": True}
SMALL: dict[str, Any] = {
    "max_model_len": 256,
    "max_num_batched_tokens": 32,
    "max_num_seqs": 8,
    "num_threads": 2,
    "enable_prefix_caching": False,
}
GREEDY = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True, logprobs=1)


def ids(seed: int, length: int = 6) -> dict[str, Any]:
    return {"prompt_token_ids": [5 + (seed * 37 + i * 11) % 370 for i in range(length)]}


PROMPTS = [ids(seed, length) for seed, length in ((1, 70), (2, 3), (3, 21), (4, 40))]


def _tiny(folder: Path, architecture: str, format: str, experts: int) -> Path:
    """Six query heads and three key/value heads, so that there may be three ranks."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(tiny_models._EXPERTS, "count", experts)
        for name, value in (("num_attention_heads", 6), ("num_key_value_heads", 3)):
            patch.setitem(tiny_models._SHAPE, name, value)
        return tiny_models.tiny_model(folder, format, architecture)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("experts")


@pytest.fixture(scope="module")
def mixtral(folder: Path) -> Path:
    """A GGUF file with five experts."""
    return _tiny(folder, "mixtral", "q8_0", 5)


@pytest.fixture(scope="module")
def spread(mixtral: Path) -> Iterator[LLM]:
    """Two ranks, with four and three experts, two of them copies."""
    options = {**SMALL, **SPREAD, "num_redundant_experts": 2, "compute": "exact"}
    with LLM(mixtral, **options) as llm:
        yield llm


@pytest.fixture(scope="module")
def expected(mixtral: Path) -> list[RequestOutput]:
    """The answers of one rank."""
    with LLM(mixtral, compute="exact", **SMALL) as llm:
        return llm.generate(PROMPTS, GREEDY)


def facts(outputs: Sequence[RequestOutput]) -> list[tuple[list[int], Any]]:
    return [(tokens(output), output.outputs[0].logprobs) for output in outputs]


def distance(one: RequestOutput, other: RequestOutput) -> float:
    """The largest difference of the log-probabilities of the same tokens."""
    rows, others = one.outputs[0].logprobs, other.outputs[0].logprobs
    assert rows is not None and others is not None
    pairs = zip(tokens(one), rows, others, strict=True)
    return max(abs(row[token].logprob - also[token].logprob) for token, row, also in pairs)


#: With exact arithmetic only the order of fp32 sums over ranks differs (after attention): below
#: 2e-6 when this was measured, for log-probabilities of up to 6.
EXACT = 2e-5


def test_ranks_give_the_tokens_of_one_in_a_batch_alone_and_in_chunks(
    spread: LLM, expected: list[RequestOutput]
) -> None:
    """Prompts of 70 and 40 tokens run in chunks of at most 32."""
    assert "one recorded graph" in spread.explain()
    assert spread.load_warnings == ()
    together = spread.generate(PROMPTS, GREEDY)
    assert [tokens(output) for output in together] == [tokens(output) for output in expected]
    assert max(map(distance, expected, together)) < EXACT
    alone = [spread.generate(prompt, GREEDY)[0] for prompt in PROMPTS]
    assert facts(alone) == facts(together)


def test_the_load_counts_every_token_once_for_each_of_its_experts(spread: LLM) -> None:
    before = spread.expert_load()
    spread.generate(ids(9, 40), GREEDY)
    after = spread.expert_load()
    assert list(after) == [0, 1]
    for layer, counts in after.items():
        new = [a - b for a, b in zip(counts, before[layer], strict=True)]
        assert len(new) == 5 and min(new) >= 0
        assert sum(new) == 2 * (40 + 12 - 1)  # the last token is not run


def placements(llm: LLM) -> list[Any]:
    runner = llm._runner()
    assert runner is not None and isinstance(runner.model, Decoder)
    return [share.placement for share in shares_of(runner.model).values()]


def test_experts_move_between_two_steps_and_answers_stay_bitwise_the_same(spread: LLM) -> None:
    before = facts(spread.generate(PROMPTS, GREEDY))
    places = placements(spread)
    moves = [spread.rebalance_experts()]
    assert all(sum(counts) == 0 for counts in spread.expert_load().values())
    assert facts(spread.generate(PROMPTS, GREEDY)) == before
    # prompts that repeat one token load few experts
    for token in range(20, 60, 4):
        spread.generate({"prompt_token_ids": [token] * 50}, GREEDY.clone(max_tokens=1))
        moves.append(spread.rebalance_experts())
    assert sum(moves) > 0 and placements(spread) != places
    assert facts(spread.generate(PROMPTS, GREEDY)) == before
    assert "one recorded graph" in spread.explain()


def test_experts_move_while_requests_run(spread: LLM) -> None:
    params = GREEDY.clone(max_tokens=60)
    undisturbed = facts(spread.generate(PROMPTS, params))
    gate = Gate(at=20)
    found: list[list[RequestOutput]] = []
    held = [params.clone(logits_processors=[gate]), *[params] * 3]
    thread = threading.Thread(target=lambda: found.append(spread.generate(PROMPTS, held)))
    thread.start()
    assert gate.reached.wait(LIMIT)
    moved: list[int] = []
    mover = threading.Thread(target=lambda: moved.append(spread.rebalance_experts()))
    mover.start()
    gate._open.set()
    for each in (mover, thread):
        each.join(LIMIT)
        assert not each.is_alive()
    assert len(moved) == 1
    assert facts(found[0]) == undisturbed


def test_a_move_that_fails_leaves_all_experts_usable(
    spread: LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rank 0 fails: the other one has opened the file, or loaded its experts, and forgets them."""
    before = facts(spread.generate(PROMPTS, GREEDY))

    def broken(*args: Any, **kwargs: Any) -> Any:
        raise CheckpointError("cannot be read")

    failed = 0
    for token in range(21, 80, 4):
        spread.generate({"prompt_token_ids": [token] * 50}, GREEDY.clone(max_tokens=1))
        with monkeypatch.context() as patch:
            if token % 8 == 5:
                patch.setattr(RunnerConfig, "open_model", broken)
            else:
                patch.setattr(Source, "expert_row", broken)
            try:
                spread.rebalance_experts()
            except CheckpointError as error:
                assert str(error) == "cannot be read"
                failed += 1
    assert failed > 1
    assert facts(spread.generate(PROMPTS, GREEDY)) == before


def test_options_that_do_not_fit_are_refused_before_a_process_starts(
    mixtral: Path, tiny_path: Path
) -> None:
    before = len(psutil.Process().children(recursive=True))
    cases: list[tuple[Path, dict[str, Any], type[Exception], str]] = [
        (mixtral, {"enable_expert_parallel": 1}, RequestError, "expected True or False, found 1"),
        (mixtral, {"num_redundant_experts": -1}, RequestError, "expected an integer in 0"),
        (
            mixtral,
            {"num_redundant_experts": 1, "enable_expert_parallel": True},
            RequestError,
            "copies of experts need enable_expert_parallel=True and a tensor_parallel_size",
        ),
        (mixtral, {"num_redundant_experts": 1}, RequestError, "copies of experts need"),
        (mixtral, {**SPREAD, "disk_offload": "1MiB"}, RequestError, "disk_offload: not supported"),
        (mixtral, {**SPREAD, "num_redundant_experts": 6}, AlignmentError, "expected at most 5"),
        (
            mixtral,
            {**SPREAD, "tensor_parallel_size": 6},
            AlignmentError,
            "cannot spread 5 experts over 6 ranks",
        ),
        (tiny_path, SPREAD, RequestError, "expected a mixture of experts, but this model has none"),
    ]
    for make in (LLM, LLM.plan):
        for path, options, kind, message in cases:
            with pytest.raises(kind, match=message):
                make(path, max_model_len=64, **options)
    assert len(psutil.Process().children(recursive=True)) == before


def test_one_rank_needs_no_exchange_and_has_nothing_to_balance(mixtral: Path) -> None:
    with LLM(mixtral, enable_expert_parallel=True, **SMALL) as llm:
        assert llm.generate(ids(1), GREEDY)[0].finished
        for call in (llm.expert_load, llm.rebalance_experts):
            with pytest.raises(RequestError, match=f"{call.__name__} needs enable_expert_parallel"):
                call()


def test_a_plan_counts_each_expert_once_and_its_copies(mixtral: Path) -> None:
    one, spread = (LLM.plan(mixtral, **SMALL, **more) for more in ({}, SPREAD))
    copied = LLM.plan(mixtral, **SMALL, **SPREAD, num_redundant_experts=5)
    assert spread.weights == one.weights
    # two layers, three matrices of 256 x 256 for each expert, in Q8_0
    expert = 3 * 256 * 256 * 34 // 32
    assert copied.weights - one.weights == 2 * 5 * expert
    # while experts move, those of one layer are in memory twice
    assert copied.workspace - spread.workspace == 5 * expert


def test_a_budget_that_is_too_small_names_what_would_fit(mixtral: Path) -> None:
    whole = LLM.plan(mixtral, **SMALL, **SPREAD)
    budget = whole.total - whole.kv_cache + 4 * whole.page_bytes
    plan = LLM.plan(mixtral, **SMALL, **SPREAD, memory=budget)
    assert not plan.fits and plan.alternatives
    assert not any("disk_offload" in each.options for each in plan.alternatives)
    assert all(each.plan.config.enable_expert_parallel for each in plan.alternatives)


def expert_bytes(llm: LLM) -> int:
    layers = llm.quant_report().layers
    return sum(layer.nbytes for layer in layers if ".experts." in layer.name)


@pytest.mark.slow
def test_a_rank_holds_the_bytes_of_its_own_experts(mixtral: Path, spread: LLM) -> None:
    with LLM(mixtral, **SMALL) as llm:
        whole = expert_bytes(llm)
    placed = placements(spread)
    own = sum(len(layer[0]) for layer in placed)
    assert sum(len(held) for layer in placed for held in layer) == 2 * 7
    assert expert_bytes(spread) == whole * own // (2 * 5)


FILES: dict[str, tuple[str, str, int, int]] = {
    "qwen3_moe as safetensors": ("qwen3_moe", "float16", 6, 2),
    "qwen3_moe as GGUF, 3 ranks": ("qwen3_moe", "q8_0", 7, 3),
    "mixtral as safetensors, 3 ranks": ("mixtral", "float16", 4, 3),
    "mixtral as fp8": ("mixtral", "fp8", 3, 2),
    "gpt_oss as safetensors, 3 ranks": ("gpt_oss", "float16", 5, 3),
    "gpt_oss as GGUF": ("gpt_oss", "q8_0", 4, 2),
}


@pytest.mark.slow
@pytest.mark.parametrize("case", [*FILES, "gpt_oss as MXFP4"])
def test_every_architecture_and_container(case: str, folder: Path, golden: Path) -> None:
    if case in FILES:
        architecture, format, experts, ranks = FILES[case]
        path = _tiny(folder, architecture, format, experts)
    else:
        path, ranks = golden / "gptoss-mxfp4", 2
    options = {**SMALL, "compute": "exact", "skip_tokenizer_init": True}
    with LLM(path, **options) as llm:
        one = llm.generate(PROMPTS, GREEDY)
    options |= {**SPREAD, "tensor_parallel_size": ranks, "num_redundant_experts": ranks}
    with LLM(path, **options) as llm:
        assert llm.load_warnings == ()
        several = llm.generate(PROMPTS, GREEDY)
        alone = [llm.generate(prompt, GREEDY)[0] for prompt in PROMPTS]
        llm.rebalance_experts()
        again = llm.generate(PROMPTS, GREEDY)
    assert [tokens(output) for output in several] == [tokens(output) for output in one]
    assert max(map(distance, one, several)) < EXACT
    assert facts(alone) == facts(several) == facts(again)


@pytest.mark.slow
def test_with_rounded_activations_whole_experts_are_no_further_away_than_parts(
    mixtral: Path,
) -> None:
    """Ranks add in another order. Most positions differ by that only (1e-6); in every tenth, an
    activation is rounded to another 8-bit value (1e-3). A mean needs hundreds of those: with 130
    positions, ratios from 0.7 to 2.2 were measured on one machine."""
    prompts = [ids(seed, 200) for seed in range(12)]
    params = GREEDY.clone(max_tokens=1, prompt_logprobs=0)
    scores = []
    for options in ({}, SPREAD, {"tensor_parallel_size": 2}):
        with LLM(mixtral, **SMALL, **options) as llm:
            rows = [output.prompt_logprobs for output in llm.generate(prompts, params)]
        found = [next(iter(each.values())).logprob for row in rows for each in (row or ())[1:]]
        scores.append(torch.tensor(found))
    one, whole, parts = scores
    # 0.0004 for both when this was measured
    assert (whole - one).abs().median() < 1e-5
    assert (whole - one).abs().mean() < 0.002
    assert (whole - one).abs().mean() < 1.5 * (parts - one).abs().mean()


@pytest.mark.slow
def test_steps_run_operator_by_operator_give_the_same_bits(mixtral: Path, spread: LLM) -> None:
    options = {**SMALL, **SPREAD, "compute": "exact", "enforce_eager": True}
    with LLM(mixtral, **options) as llm:
        assert "one recorded graph" not in llm.explain()
        assert facts(llm.generate(PROMPTS, GREEDY)) == facts(spread.generate(PROMPTS, GREEDY))


@pytest.mark.slow
def test_ranks_agree_not_to_record_if_the_experts_of_one_have_other_formats(folder: Path) -> None:
    """Experts 0 and 2 are on rank 0. The bits of one rank show that 1 and 3 ran as before."""
    path = _tiny(folder / "mixed", "mixtral", "float16", 4)
    tensors = load_file(path / "model.safetensors")
    for name, tensor in tensors.items():
        if ".layers.0." in name and ".experts.2." in name:
            tensors[name] = tensor.float()
    save_file(tensors, path / "model.safetensors", metadata={"format": "pt"})
    options = {**SMALL, "compute": "exact"}
    with LLM(path, **options) as llm:
        one = llm.generate(PROMPTS, GREEDY)
    with LLM(path, **options, **SPREAD) as llm:
        ranks = llm._driver.engine._executor.on_ranks(attrgetter("strategy.eager_reason"))
        assert len(ranks) == 2 and "cannot be recorded" in ranks[1] and ranks[0]
        several = llm.generate(PROMPTS, GREEDY)
        llm.rebalance_experts()
        again = llm.generate(PROMPTS, GREEDY)
    assert [tokens(output) for output in several] == [tokens(output) for output in one]
    assert max(map(distance, one, several)) < EXACT
    assert facts(again) == facts(several)


@pytest.mark.slow
def test_preempted_requests_get_the_same_answers(mixtral: Path, spread: LLM) -> None:
    params = GREEDY.clone(max_tokens=40)
    prompts = [ids(seed, 20) for seed in range(4)]
    page = LLM.plan(mixtral, **SMALL, compute="exact").page_bytes
    options = {**SMALL, **SPREAD, "compute": "exact", "kv_cache_memory_bytes": 9 * page}
    options["max_model_len"] = 128
    with LLM(mixtral, **options) as llm:
        found = llm.generate(prompts, params)
        assert llm.get_metrics()["num_preemptions"] > 0
    assert facts(found) == facts(spread.generate(prompts, params))


@pytest.mark.slow
def test_concurrent_callers_and_sleep(mixtral: Path) -> None:
    with LLM(mixtral, **SMALL, **SPREAD, compute="exact") as llm:
        alone = [facts(llm.generate(prompt, GREEDY))[0] for prompt in PROMPTS]
        found: dict[int, Any] = {}

        def ask(index: int) -> None:
            found[index] = facts(llm.generate(PROMPTS[index], GREEDY))[0]

        threads = [threading.Thread(target=ask, args=(index,)) for index in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(LIMIT)
        assert [found[index] for index in range(4)] == alone
        for level in (1, 2):
            llm.sleep(level)
            llm.wake_up()
            assert facts(llm.generate(PROMPTS[:1], GREEDY)) == alone[:1]


@pytest.mark.slow
def test_a_killed_rank_is_an_error_and_leaves_nothing_behind(mixtral: Path) -> None:
    before = set(psutil.Process().children(recursive=True))
    llm = LLM(mixtral, **SMALL, **SPREAD)
    [worker] = set(psutil.Process().children(recursive=True)) - before
    assert llm.generate(ids(1), GREEDY)[0].finished
    worker.kill()
    for call in (lambda: llm.generate(ids(1), GREEDY), llm.rebalance_experts):
        with pytest.raises(EngineDeadError):
            call()
    llm.close()
    assert set(psutil.Process().children(recursive=True)) == before


@pytest.mark.slow
def test_files_that_have_changed_are_not_read(folder: Path) -> None:
    path = _tiny(folder, "mixtral", "q4_0", 4)
    with LLM(path, **SMALL, **SPREAD) as llm:
        before = facts(llm.generate(PROMPTS, GREEDY))
        kept = path.with_suffix(".kept")
        path.rename(kept)
        with pytest.raises(CheckpointError, match=r"rebalance_experts: the files of .* changed"):
            llm.rebalance_experts()
        kept.rename(path)
        llm.rebalance_experts()
        assert facts(llm.generate(PROMPTS, GREEDY)) == before


@pytest.mark.slow
def test_adapters_run_on_attention_and_are_refused_for_experts(
    mixtral: Path, tmp_path: Path
) -> None:
    def adapter(name: str, path: str, out: int) -> LoRARequest:
        target = tmp_path / name
        target.mkdir()
        config = {"peft_type": "LORA", "r": 4, "lora_alpha": 8, "target_modules": [path]}
        (target / "adapter_config.json").write_text(json.dumps(config))
        generator = torch.Generator().manual_seed(1)
        key = f"base_model.model.model.layers.0.{path}"
        factors = {
            f"{key}.lora_A.weight": torch.randn(4, 256, generator=generator),
            f"{key}.lora_B.weight": torch.randn(out, 4, generator=generator) / 16,
        }
        save_file(factors, target / "adapter_model.safetensors")
        return LoRARequest(name, out, str(target))

    attention = adapter("attention", "self_attn.q_proj", 384)
    expert = adapter("expert", "mlp.experts.1.gate_proj", 256)
    options = {**SMALL, "compute": "exact", "enable_lora": True}
    answers = []
    for more in ({}, SPREAD):
        with LLM(mixtral, **options, **more) as llm:
            answers.append(
                [tokens(x) for x in llm.generate(PROMPTS, GREEDY, lora_request=attention)]
            )
            with pytest.raises(CheckpointError, match="adapters of experts are not supported"):
                llm.generate(PROMPTS, GREEDY, lora_request=expert)
    assert answers[0] == answers[1]
