"""What the memory plan promises is what the scheduler does."""

from __future__ import annotations

import contextlib
import re
from dataclasses import replace
from pathlib import Path

import pytest
import torch

import sdk
from sdk import LLM, OutOfMemoryError, RequestError, SamplingParams
from sdk.api.config import EngineConfig
from sdk.api.machine import installed_memory
from sdk.api.options import engine_config
from sdk.api.sizes import parse_bytes
from sdk.kernels import gpu
from sdk.loaders.open import open_checkpoint
from sdk.loading import alternatives as alternatives_of
from sdk.loading.alternatives import expected_losses
from sdk.memory import planning, resolve
from sdk.memory.demand import MemoryDemand, WeightBytes
from sdk.memory.fitting import plan_memory
from sdk.memory.plan import MemoryPlan
from sdk.memory.weights import held_bytes
from sdk.quant.online import online_quantized, online_scheme
from tests.models.conftest import tiny
from tests.models.tiny_architectures import ARCHITECTURES


@pytest.mark.parametrize("max_model_len", [64, 50])
def test_the_plans_full_length_requests_run_at_once_and_undisturbed(
    tiny_path: Path, max_model_len: int
) -> None:
    limits = {"max_model_len": max_model_len, "max_num_seqs": 6, "max_num_batched_tokens": 512}
    with LLM(tiny_path, **limits) as llm:
        assert llm.memory_plan.num_pages == 6 * 4
        assert llm.memory_plan.full_requests == 6
        prompts = [{"prompt_token_ids": [3 + i] * (max_model_len - 3)} for i in range(6)]
        llm.enqueue(prompts, SamplingParams(max_tokens=None, ignore_eos=True, temperature=0))
        llm.step()
        assert llm.get_metrics()["num_running"] == 6
        outputs = llm.wait_for_completion()
        assert all(len(o.outputs[0].token_ids) == 3 for o in outputs)
        assert llm.get_metrics()["num_preemptions"] == 0


def test_a_context_that_ends_within_a_page_needs_all_of_it(tiny_path: Path) -> None:
    page = LLM.plan(tiny_path).page_bytes
    plan = LLM.plan(tiny_path, max_model_len=17, kv_cache_memory_bytes=3 * page)
    assert (plan.num_pages, plan.full_requests) == (3, 1.5)


def test_weights_that_grow_at_load_are_planned_as_they_are_held(golden: Path) -> None:
    """IQ3_S takes 3.44 bits per weight in the file and 4.31 in memory."""
    path = golden / "gguf-IQ3_S" / "model.gguf"
    entries = open_checkpoint(path).entries()
    assert {entry.format for entry in entries if entry.held is not None} == {"IQ3_S"}
    held = sum(entry.nbytes if entry.held is None else entry.held for entry in entries)
    assert held > 1.1 * sum(entry.nbytes for entry in entries)
    assert held <= LLM.plan(path).weights <= 1.03 * held


@pytest.mark.parametrize("kind", ["Q2_K", "Q3_K_M", "Q4_K_M", "Q5_K_M", "Q6_K", "Q8_0", "IQ4_XS"])
def test_the_planned_weights_are_those_of_the_loaded_model(golden: Path, kind: str) -> None:
    path = golden / f"gguf-{kind}" / "model.gguf"
    plan = LLM.plan(path, max_model_len=64)
    with LLM(path, max_model_len=64) as llm:
        report = llm.quant_report()
    entries = {entry.name: entry for entry in open_checkpoint(path).entries()}
    others = sum(entry.nbytes for entry in entries.values() if len(entry.shape) == 1)
    if "output.weight" in entries:  # else the embedding is among the linear layers, as the head
        others += held_bytes(entries["token_embd.weight"], "cpu")
    assert plan.weights == report.nbytes + others
    planned = {(share.format, share.kernel) for share in plan.kernels}
    assert {(layer.format, layer.kernel) for layer in report.layers} <= planned
    assert {layer.kernel for layer in report.layers} == {kernel for _, kernel in planned}


def test_an_engine_loads_what_was_planned_and_stays_in_its_limits(tiny_path: Path) -> None:
    page = LLM.plan(tiny_path).page_bytes
    plan = LLM.plan(tiny_path, kv_cache_memory_bytes=5 * page, max_num_seqs=3)
    with LLM(plan=plan) as llm:
        assert replace(llm.memory_plan, config=plan.config) == plan
        assert llm.get_metrics()["num_pages"] == 5
        assert llm.max_model_len == 5 * plan.page_size
        assert llm.generate([[5, 6, 7]], SamplingParams(max_tokens=3))[0].finished


def test_a_plan_and_other_options_together_are_refused(tiny_path: Path) -> None:
    plan = LLM.plan(tiny_path, max_model_len=64)
    with pytest.raises(TypeError, match=r"takes model and options from the plan.*a model, seed"):
        LLM(tiny_path, plan=plan, seed=3)
    with pytest.raises(TypeError, match="needs a model"):
        LLM()


def test_a_plan_of_recurrent_layers_alone_says_what_would_help(tmp_path: Path) -> None:
    """Their pages have no bytes, only their states do."""
    tiny("mamba", **ARCHITECTURES["mamba"]).save_pretrained(tmp_path)
    options = {"skip_tokenizer_init": True, "max_model_len": 64}
    plan = LLM.plan(tmp_path, kv_cache_memory_bytes=1000, **options)
    assert not plan.fits
    found = re.search(r"memory='(\d+MiB)' is enough with kv_cache_memory_bytes=None", plan.problem)
    assert found is not None
    assert LLM.plan(tmp_path, memory=found[1], **options).fits
    asked = {"kv_cache_memory_bytes": "3MiB", **options}
    problem = LLM.plan(tmp_path, memory="1MiB", **asked).problem
    found = re.search(r"memory='(\d+MiB)' is enough$", problem, re.MULTILINE)
    assert found is not None
    assert LLM.plan(tmp_path, memory=found[1], **asked).fits


def test_what_would_fit_is_planned_too_and_loads(golden: Path) -> None:
    path = golden / "arch-llama3"
    whole = LLM.plan(path, max_model_len=64, max_num_seqs=4)
    budget = whole.total - whole.weights // 4
    plan = LLM.plan(path, max_model_len=64, max_num_seqs=4, memory=budget)
    assert not plan.fits
    assert "what would help" in plan.problem
    with pytest.raises(OutOfMemoryError, match="what would help"):
        LLM(plan=plan)
    assert plan.alternatives
    fast = [other for other in plan.alternatives if not other.plan.offloaded]
    losses = [other.loss for other in fast if other.keeps_limits]
    assert losses == sorted(losses)
    assert losses
    for other in plan.alternatives:
        assert other.plan.fits
        assert other.plan.total <= budget
        assert str(other).startswith(f"{next(iter(other.options))}=")
    first = plan.alternatives[0]
    assert first.keeps_limits
    options = {"max_model_len": 64, "max_num_seqs": 4, "memory": budget, **first.options}
    assert LLM.plan(path, **options) == first.plan
    with LLM(plan=first.plan) as llm:
        assert llm.memory_plan.total == first.plan.total


def test_help_asks_for_no_more_than_was_asked_for(smollm2: Path) -> None:
    plan = LLM.plan(smollm2, memory="60MiB", max_num_seqs=1, max_model_len=64)
    assert not plan.fits
    assert re.search(r"memory='\d+MiB' is enough$", plan.problem, re.MULTILINE)
    assert "max_num_seqs=" not in plan.problem and "max_model_len=" not in plan.problem
    assert all(other.plan.max_num_seqs == 1 for other in plan.alternatives)


def test_a_shorter_context_is_offered_where_the_kv_cache_is_what_does_not_fit(
    tiny_path: Path,
) -> None:
    page = LLM.plan(tiny_path).page_bytes
    plan = LLM.plan(tiny_path, max_model_len=128, kv_cache_memory_bytes=3 * page)
    lengths = {tuple(o.options): o.plan.max_model_len for o in plan.alternatives}
    assert lengths["max_model_len",] == 3 * plan.page_size
    assert lengths["kv_cache_dtype", "max_model_len"] > 3 * plan.page_size


def test_losses_are_known_by_names_that_schemes_and_kv_types_have() -> None:
    weights, kv = expected_losses()
    assert kv["float16"] < 1e-5
    assert kv["int8"] < kv["int4"]
    assert online_scheme("int8")
    assert weights["int8"] < weights["rtn-w4g64"]


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_types_of_the_kv_cache_are_tried_where_kernels_read_them(
    tiny_path: Path, monkeypatch: pytest.MonkeyPatch, device: str
) -> None:
    asked, tried = LLM.plan(tiny_path, max_model_len=128), set()

    def planned(config: EngineConfig, *rest: object) -> MemoryPlan:
        tried.add(config.kv_cache_dtype)
        return asked

    monkeypatch.setattr(alternatives_of, "plan_for", planned)
    monkeypatch.setattr(alternatives_of, "weight_bytes", lambda *_: None)  # asks for the card
    config = engine_config(tiny_path, max_model_len=128)
    with contextlib.closing(resolve.open_model(config)) as checkpoint:
        alternatives_of.alternatives(replace(config, device=device), checkpoint, asked)
    known = {"auto", *expected_losses()[1]}
    assert "int16" in known
    assert tried == (known if device == "cpu" else known - {"int16"})


def test_a_stream_is_expected_to_read_the_weights_and_the_context(smollm2: Path) -> None:
    plan = LLM.plan(smollm2, max_model_len=1024)
    assert plan.read == plan.weights  # embedding and head are one
    alone = plan.tokens_per_second(20e9)
    assert 100 < alone < 20e9 / plan.weights
    assert plan.tokens_per_second(20e9, context=1000) < alone


@pytest.mark.parametrize(
    "memory", [0, -1, "0", "lots", "6GB GB", "-2GiB", "", True, None.__class__]
)
def test_a_budget_that_is_no_size_is_refused(tiny_path: Path, memory: object) -> None:
    for make in (LLM, LLM.plan):
        with pytest.raises(RequestError, match=r"memory: expected a size such as '2GiB'"):
            make(tiny_path, memory=memory)


@pytest.mark.parametrize("text", ["6GB ", " 6 GB", "6gb"])
def test_a_size_may_have_spaces_and_small_letters(tiny_path: Path, text: str) -> None:
    assert LLM.plan(tiny_path, memory=text).budget == 6 * 10**9


def test_a_budget_too_small_lists_the_sums_and_one_that_is_enough(tiny_path: Path) -> None:
    plan = LLM.plan(tiny_path, memory="1MiB")
    assert not plan.fits
    with pytest.raises(OutOfMemoryError) as error:
        LLM(tiny_path, memory="1MiB")
    for part in ("weights", "workspace", "KV cache", "budget", "1.0 MiB", "what would help"):
        assert part in str(error.value)
    enough = str(error.value).partition("memory='")[2].partition("'")[0]
    with LLM(
        tiny_path, memory=enough, max_model_len=256, max_num_seqs=4, max_num_batched_tokens=64
    ) as llm:
        assert llm.generate([[5, 6, 7]], SamplingParams(max_tokens=3))[0].finished


def test_the_sums_of_what_does_not_fit_add_up_and_are_too_much(
    tiny_path: Path, golden: Path
) -> None:
    tiny = LLM.plan(tiny_path, max_model_len=64)
    for path, options in (
        (tiny_path, {"memory": tiny.total - tiny.kv_cache - 2**20}),
        (tiny_path, {"memory": "1MiB", "max_model_len": 64}),
        (tiny_path, {"memory": tiny.total, "kv_cache_memory_bytes": 2 * tiny.kv_cache}),
        (golden / "arch-llama3", {"memory": "10MiB", "quantization": "int4", "max_num_seqs": 1}),
    ):
        problem = LLM.plan(path, **options).problem
        found = re.findall(r"  (\w+(?: cache)?) +([\d.]+ \w+)", problem.partition("what would")[0])
        rows = {name: parse_bytes(size) for name, size in found}
        limit, needed, tokenizer = rows.pop("budget"), rows.pop("needed"), rows.pop("tokenizer")
        most = max(rows.pop("loading", 0), sum(rows.values()))
        assert needed > limit
        assert most + tokenizer == pytest.approx(needed, abs=0.4 * 2**20)  # each is rounded


def test_a_context_asked_for_may_take_all_that_is_free(tiny_path: Path) -> None:
    """Without one the KV cache takes half of it."""
    few = {"max_num_seqs": 1, "max_num_batched_tokens": 16}
    entire = LLM.plan(tiny_path, max_model_len=64, **few)
    fixed, page = entire.total - entire.kv_cache, entire.page_bytes

    def free(pages: int, **limits: int) -> MemoryPlan:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(resolve, "available_memory", lambda: fixed + pages * page)
            return LLM.plan(tiny_path, **few, **limits)

    assert free(4, max_model_len=64).num_pages == 4
    assert not free(3, max_model_len=64).fits
    assert free(4).max_model_len == 32


def test_a_budget_for_several_hosts_is_compared_with_all_of_them(tiny_path: Path) -> None:
    hosts = {
        "tensor_parallel_size": 2,
        "remote_workers": {"listen": "127.0.0.1:7000", "token": "t" * 32},
    }
    memory = 3 * installed_memory()
    problem = LLM.plan(tiny_path, memory=memory, max_num_seqs=4, **hosts).problem
    assert "larger than the memory of 2 machines like this one" in problem
    assert re.search(r"\n +machines +[\d.]+ \wiB", problem)
    memory //= 2
    assert "larger than" not in LLM.plan(tiny_path, memory=memory, max_num_seqs=4, **hosts).problem


def test_a_budget_larger_than_the_machine_is_refused_with_both_sizes(tiny_path: Path) -> None:
    memory = 2 * installed_memory()
    problem = LLM.plan(tiny_path, memory=memory, max_num_seqs=4).problem
    assert "larger than this machine" in problem
    [enough] = re.findall(r"memory='(\w+)' is all that these limits need", problem)
    assert LLM.plan(tiny_path, memory=enough, max_num_seqs=4).full_requests == 4
    with pytest.raises(OutOfMemoryError, match=r"budget +[\d.]+ \wiB\n +machine +[\d.]+ \wiB"):
        LLM(tiny_path, memory=memory)


def test_a_budget_that_is_not_free_now_is_refused_naming_one_that_is(
    smollm2: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(resolve, "available_memory", lambda: 300 * 2**20)
    with pytest.raises(OutOfMemoryError) as error:
        LLM(smollm2, memory="400MiB", max_num_seqs=4)
    *_, title, only = str(error.value).splitlines()
    assert title == "what would help:"
    assert only == "  memory='294MiB' is free now"


def test_pages_the_machine_cannot_give_are_refused_before_loading(smollm2: Path) -> None:
    with pytest.raises(OutOfMemoryError, match=r"does not fit|cannot give"):
        LLM(
            smollm2,
            max_num_seqs=4096,
            max_num_batched_tokens=4096,
            kv_cache_memory_bytes=4 * installed_memory(),
        )


def test_a_gguf_files_attn_output_is_no_head_where_it_is_packed_at_load(
    tiny_path: Path, tmp_path: Path
) -> None:
    """``int4`` packs the head in 8 bits and the blocks in 4, also the one GGUF calls output."""
    path = sdk.quantize(tiny_path, tmp_path / "float.gguf", "f16")
    entries = online_quantized(open_checkpoint(path), "hqq-w4g32-h8").entries()
    bits = {entry.name: entry.held * 8 / entry.num_elements for entry in entries if entry.held}
    assert bits["blk.0.attn_output.weight"] == bits["blk.0.attn_q.weight"] == 5.0
    assert bits["output.weight"] > 8


def demand_on_a_gpu(monkeypatch: pytest.MonkeyPatch, path: Path, **options: object) -> MemoryDemand:
    monkeypatch.setattr(resolve, "device_of", lambda config: "cuda")
    config = engine_config(path, **{"max_num_seqs": 8, **options})
    with contextlib.closing(resolve.open_model(config)) as checkpoint:
        model = planning.model_config(config, checkpoint)
        weights = WeightBytes(1000, 1000, 1000)
        return planning._demand(config, model, weights, torch.bfloat16)


def test_the_plan_counts_what_recorded_steps_hold_on_a_gpu(
    tiny_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def planned(**options: object) -> MemoryPlan:
        demand = demand_on_a_gpu(monkeypatch, tiny_path, **options)
        limits = {"budget": 2**30, "kv_budget": 2**20, "max_model_len": 256, "available": 0}
        return plan_memory(demand, **limits)

    eager, small, large, huge = (
        planned(enforce_eager=True),
        planned(max_num_batched_tokens=16),
        planned(max_num_batched_tokens=512),
        planned(max_num_batched_tokens=2048),
    )
    assert eager.graphs == 0 and "graphs" not in str(eager)
    demand = demand_on_a_gpu(monkeypatch, tiny_path)
    model = demand.model
    hidden, width, vocab = model.hidden_size, model.intermediate_size, model.vocab_size
    kept = 4 * 8 * (hidden + 2 * vocab)
    # residual, what is added to it and the last hidden state; queries, results and all others
    token = 4 * 3 * hidden + 2 * (6 * hidden + 3 * width)
    assert small.graphs == kept + 16 * token
    assert large.graphs == kept + 512 * token
    assert large.recorded_tokens == 512 and eager.recorded_tokens == 0
    assert huge.graphs == kept + 2048 * token  # and no larger step is recorded
    assert planned(max_num_batched_tokens=4096).graphs == huge.graphs
    serving = large.weights + large.workspace + large.kv_cache + large.tokenizer
    assert large.total == serving + large.graphs
    assert "activations and logits of recorded steps" in str(large)


def test_where_memory_is_scarce_only_smaller_steps_are_recorded(
    tiny_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    demand = demand_on_a_gpu(monkeypatch, tiny_path, max_num_batched_tokens=2048)
    limits = {"kv_budget": None, "max_model_len": 256, "available": 0}

    def planned(budget: int, tokens: int = 2048) -> MemoryPlan:
        return plan_memory(replace(demand, captured_tokens=tokens), budget=budget, **limits)

    half, whole = (planned(2**40, n).graphs - planned(2**40, 512).graphs for n in (1024, 2048))
    budgets = {32 * whole: 2048, 32 * whole - 1: 1024, 32 * half: 1024, 32 * half - 1: 512}
    assert {budget: planned(budget).recorded_tokens for budget in budgets} == budgets
    assert planned(2**16, 300).recorded_tokens == 300


def test_a_gpu_s_recorded_steps_may_be_what_does_not_fit(
    tiny_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    demand = demand_on_a_gpu(monkeypatch, tiny_path, max_num_batched_tokens=512)
    limits = {"kv_budget": None, "max_model_len": 256, "available": 0}
    room = plan_memory(demand, budget=2**30, **limits)
    without = room.total - room.graphs - room.kv_cache + 16 * room.page_bytes
    plan = plan_memory(demand, budget=without, **limits)
    assert not plan.fits and "  graphs  " in plan.problem
    assert plan_memory(replace(demand, captured_tokens=0), budget=without, **limits).fits


def test_activations_are_what_all_matrices_are_stored_as_where_a_file_says_nothing(
    golden: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(resolve, "device_of", lambda config: "cuda")
    monkeypatch.setattr(gpu, "matrix_type", lambda device: torch.bfloat16)

    def found(name: str, **options: object) -> torch.dtype:
        silent = {"dtype": None, "torch_dtype": None}
        config = engine_config(golden / name, **{"hf_overrides": silent, **options})
        with contextlib.closing(resolve.open_model(config)) as checkpoint:
            return planning.activations_of(config, checkpoint)

    assert found("arch-llama3") == torch.float16
    assert found("arch-llama3", quantization="int4") == torch.bfloat16
    assert found("gptq-w4-g128-act") == torch.bfloat16  # embedding and head alone are float16
    assert found("arch-gemma3/hf") == torch.bfloat16
