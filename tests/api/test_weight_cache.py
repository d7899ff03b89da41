"""``weight_cache``: a second opening maps what the first packed, and no file makes it wrong."""

from __future__ import annotations

import shutil
import threading
from pathlib import Path
from typing import Any

import pytest

from sdk import LLM, OutOfMemoryError
from sdk.testing import tiny_adapter, tiny_model
from tests.api.weight_cache import (
    GOLDEN,
    LIMITS,
    PARAMS,
    PROMPTS,
    answers,
    cache_folder,
    first,
    mapped,
    mappings,
    process,
    store,
    until,
)


@pytest.fixture(autouse=True)
def weights(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    return cache_folder(tmp_path, monkeypatch)


@pytest.fixture
def tiny(tmp_path: Path) -> Path:
    return shutil.copy(GOLDEN / "gguf-Q4_K_M" / "model.gguf", tmp_path / "model.gguf")


#: Every kind of packed weight: blocks with one and two levels of scales, halves of bytes, tables,
#: permuted columns, nested scales, 8-bit floats, floats, codes of activations, experts.
MODELS = [
    "gguf-Q4_K_M/model.gguf",
    "gguf-Q2_K/model.gguf",
    "gguf-Q3_K_M/model.gguf",
    "gguf-Q8_0/model.gguf",
    "gguf-IQ3_S/model.gguf",
    "gguf-IQ4_XS/model.gguf",
    "arch-gemma3/model.gguf",
    "arch-qwen3/hf",
    "awq-gemm",
    "gptq-w4-g128-act",
    "gptq-w3-g128-asym",
    "bnb-nf4-double",
    "bnb-int8",
    "fp8-block",
    "ct-w8a8-int8",
    "ct-nvfp4a16",
    "gptoss-mxfp4",
]


@pytest.mark.quick_cases(5)
@pytest.mark.parametrize("name", MODELS)
def test_a_second_opening_reads_no_matrix_and_answers_the_same_bits(name: str) -> None:
    model = GOLDEN / name
    with LLM(model, **LIMITS) as llm:
        expected, unused = answers(llm), llm._runner().unused_tensors
        assert llm._runner().weights.weight_store is None
    assert first(model) == expected
    with mapped(model) as llm:
        assert answers(llm) == expected
        assert llm._runner().unused_tensors == unused


def test_weights_are_what_they_were_before_packing(tiny: Path) -> None:
    with LLM(tiny, **LIMITS) as llm:
        values = {path: one.weight.dequantize() for path, one in llm._runner().model.linears()}
        specs = {path: str(one.weight.spec) for path, one in llm._runner().model.linears()}
        kernels = str(llm.quant_report())
    first(tiny)
    with mapped(tiny) as llm:
        found = dict(llm._runner().model.linears())
        assert found.keys() == values.keys()
        for path, one in found.items():
            assert bool((one.weight.dequantize() == values[path]).all())
            assert str(one.weight.spec) == specs[path]
        assert str(llm.quant_report()) == kernels


@pytest.mark.parametrize("options", [{"quantization": "int4"}, {"compute": "exact"}])
def test_options_that_change_weights_have_files_of_their_own(
    options: dict[str, Any], tmp_path: Path, weights: Path
) -> None:
    model = tiny_model(tmp_path, "float16")
    plain = first(model)
    expected = first(model, **options)
    assert expected != plain
    assert len(list(weights.iterdir())) == 2
    with mapped(model, **options) as llm:
        assert answers(llm) == expected


def test_adapters_run_on_mapped_weights(tiny: Path, tmp_path: Path) -> None:
    adapter = tiny_adapter(tmp_path / "adapter", tiny, rank=4)

    def with_adapter(llm: LLM) -> list[Any]:
        llm.add_lora("a", adapter)
        found = llm.generate(PROMPTS, PARAMS, lora_request="a", use_tqdm=False)
        return [one.outputs[0].token_ids for one in found]

    first(tiny)
    with LLM(tiny, enable_lora=True, **LIMITS) as llm:
        expected = with_adapter(llm)
    with mapped(tiny, enable_lora=True) as llm:
        assert with_adapter(llm) == expected


def test_a_mixture_of_experts_is_mapped(tmp_path: Path) -> None:
    model = tiny_model(tmp_path, "q4_k_m", "qwen3_moe")
    expected = first(model)
    with mapped(model) as llm:
        assert answers(llm) == expected


@pytest.mark.slow
def test_each_rank_has_a_file(weights: Path) -> None:
    tiny = GOLDEN / "gguf-Q8_0" / "model.gguf"
    options: dict[str, Any] = {"tensor_parallel_size": 2, **LIMITS}
    with LLM(tiny, weight_cache=True, **options) as llm:
        expected = answers(llm)
        until(lambda: len(list(weights.glob("*.weights"))) == 2)
    with LLM(tiny, weight_cache=True, **options) as llm:
        assert "mapped from" in llm.explain()
        assert answers(llm) == expected
    assert len(list(weights.iterdir())) == 2


@pytest.mark.slow
def test_replicas_share_the_mapping(tiny: Path) -> None:
    expected = first(tiny)
    with LLM(tiny, weight_cache=True, data_parallel_size=2, **LIMITS) as llm:
        assert answers(llm) == expected


def test_a_forked_engine_keeps_the_mapping(tiny: Path) -> None:
    expected = first(tiny)
    with mapped(tiny) as llm:
        other = llm.fork()
    with other:
        assert answers(other) == expected


def test_sleep_frees_the_mapping_and_waking_maps_again(tiny: Path) -> None:
    expected = first(tiny)
    with mapped(tiny) as llm:
        assert answers(llm) == expected
        llm.sleep(level=2)
        assert not mappings()
        llm.wake_up()
        assert "mapped from" in str(store(llm))
        assert answers(llm) == expected


def test_closing_frees_the_mapping_and_its_thread(tiny: Path) -> None:
    first(tiny)
    with mapped(tiny):
        assert mappings()
    assert not mappings()
    until(lambda: not any(one.name.startswith("embedlm-w") for one in threading.enumerate()))


def test_explain_and_the_plan_name_the_cache(tiny: Path) -> None:
    expected = first(tiny)
    with mapped(tiny) as llm:
        assert "which all processes share" in llm.explain()
        assert "once the cache has them" in str(llm.memory_plan)
        assert llm.memory_plan.weights == LLM.plan(tiny, **LIMITS).weights
        assert answers(llm) == expected
    with pytest.raises(OutOfMemoryError):  # what is mapped counts like what is not
        LLM(tiny, weight_cache=True, memory=llm.memory_plan.weights, **LIMITS)


def test_progress_is_that_of_the_cache(tiny: Path) -> None:
    first(tiny)
    seen: list[tuple[str, int, int]] = []

    def note(stage: str, done: int, total: int) -> None:
        seen.append((stage, done, total))

    with mapped(tiny, on_progress=note):
        pass
    loads = [one for one in seen if one[0] == "load"]
    assert loads == sorted(loads) and loads[-1][1] == loads[-1][2] > 0


OPEN = """
import sys
from sdk import LLM, SamplingParams
with LLM(sys.argv[1], weight_cache=True, max_model_len=128, max_num_seqs=2, num_threads=1) as llm:
    llm.generate("Hello", SamplingParams(max_tokens=2), use_tqdm=False)
    print("ready", flush=True)
    sys.stdin.readline()
"""


def test_a_second_process_adds_less_than_a_twentieth(smollm2: Path) -> None:
    with LLM(smollm2, weight_cache=True, **LIMITS) as llm:
        store(llm).wait()
    with process(OPEN, smollm2) as one, process(OPEN, smollm2) as other:
        for child in (one, other):
            sizes = smaps(child.pid)
            assert sizes["Rss"] > 0.9 * sizes["Size"] > 80 << 10
            assert sizes["Private_Clean"] + sizes["Private_Dirty"] < 0.05 * sizes["Size"]


def smaps(pid: int) -> dict[str, int]:
    """KiB of the mapped weights of a process."""
    found: dict[str, int] = {}
    inside = False
    for line in Path(f"/proc/{pid}/smaps").read_text().splitlines():
        name, _, rest = line.partition(":")
        if "-" in name.split(" ")[0]:
            inside = line.endswith(".weights")
        elif inside and rest.endswith("kB"):
            found[name] = found.get(name, 0) + int(rest.split()[0])
    return found
