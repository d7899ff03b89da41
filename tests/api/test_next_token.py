"""Blocks of multi-token prediction: they draft what their authors' code would, from folders and
GGUF files, in several weight formats; what is loaded and planned; what is refused. That answers
stay the same is tested with all methods, in test_speculation.py.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from sdk import LLM, RequestError, SamplingParams, UnsupportedError, quantize
from sdk.api.speculative_config import speculative_config
from sdk.loaders.next_token_names import next_token_name
from sdk.loaders.open import open_checkpoint
from sdk.memory.drafting_heads import next_token_head
from sdk.models.configs.config import ModelConfig
from tests.api.test_drafting_heads import Drawn, answers, rate
from tests.drafting_heads import PROMPTS, one_thread
from tests.next_token import (
    HIDDEN,
    KINDS,
    LAYERS,
    VOCAB,
    NextToken,
    draft_logits,
    write_gguf,
    write_next_token,
)

GREEDY = SamplingParams(temperature=0.0, max_tokens=16, ignore_eos=True)
#: Only the block drafts.
DRAFTS = {"method": "mtp", "adaptive": False, "num_speculative_tokens": 3, "prompt_lookup_min": 0}
EXACT: dict[str, Any] = {"compute": "exact", "enable_prefix_caching": False}
BLOCK = f"model.layers.{LAYERS}"


def opened(path: Path, **options: Any) -> LLM:
    settings: dict[str, Any] = {
        "max_model_len": 192,
        "max_num_seqs": 6,
        "skip_tokenizer_init": True,
        "speculative_config": DRAFTS,
    }
    return LLM(path, **settings | options)


def checked(drawn: Drawn, tiny: NextToken) -> None:
    """Compare the logits from which drafts were drawn with those in torch."""
    with one_thread():
        for tokens, known, logits in drawn.seen:
            expected = draft_logits(tiny, tokens, known)
            # float32 in another order of additions: 3e-6 was seen of at most 8
            torch.testing.assert_close(logits, expected, rtol=0, atol=1e-4)


@pytest.mark.quick_cases(5)
@pytest.mark.parametrize("kind", ["folder", "gguf", *sorted(KINDS.keys() - {"glm4_moe"})])
def test_logits_of_drafts_are_those_of_the_published_block(
    tiny_next_token: NextToken, kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also with a prompt in chunks. EXAONE's files call the tensors otherwise, and its block has a
    window and no experts."""
    tiny = write_next_token(tmp_path, kind) if "_" in kind else tiny_next_token
    path = tiny.gguf if kind == "gguf" else tiny.folder
    assert path is not None
    drawn = Drawn(monkeypatch)
    for prompts, tokens in (PROMPTS[:2], 64), (PROMPTS[:1], 16):
        with opened(path, **EXACT, max_num_batched_tokens=tokens) as llm:
            answers(llm, prompts, GREEDY.clone(max_tokens=9))
    assert len(drawn.seen) > 12
    assert {len(tokens) - known for tokens, known, _ in drawn.seen} == {0, 1, 2}
    checked(drawn, tiny)


def test_drafts_are_accepted_and_counted(tiny_next_token: NextToken) -> None:
    """The block knows what the model says but for what the first token does to it."""
    found = []
    for path in (tiny_next_token.folder, tiny_next_token.gguf):
        assert path is not None
        with opened(path, speculative_config=None) as llm:
            plain = answers(llm, PROMPTS, GREEDY)
        with opened(path) as llm:
            assert rate(llm, PROMPTS, GREEDY) > 0.4
            assert rate(llm, PROMPTS, GREEDY) > 0.4  # after prefix hits
            assert rate(llm, PROMPTS[0], GREEDY.clone(n=3, temperature=0.1, seed=1)) > 0.4
            assert answers(llm, PROMPTS, GREEDY) == plain
            found.append(llm.get_metrics())
            lines = llm.explain().splitlines()
        assert any(
            line.startswith(
                "drafts     mtp: up to 3 draft tokens per request, from the model's own"
            )
            for line in lines
        )
        assert not any("unused" in line for line in lines)
    assert found[0]["num_accepted_tokens"] == found[1]["num_accepted_tokens"]


STEPS: dict[str, dict[str, Any]] = {
    "default": {},
    "short steps": {"max_num_batched_tokens": 16},
    "operator by operator": {"enforce_eager": True},
    "no prefix cache": {"enable_prefix_caching": False},
}


@pytest.mark.quick_cases(2)
@pytest.mark.parametrize("steps", STEPS)
@pytest.mark.parametrize("kind", ["qwen3_next", "deepseek_v3"])
def test_states_and_latents_are_as_without_drafts(tmp_path: Path, kind: str, steps: str) -> None:
    """Most drafts of a warm request are wrong: the states of the delta nets roll back."""
    path, options = write_next_token(tmp_path, kind).folder, STEPS[steps]
    params = [GREEDY, GREEDY.clone(temperature=0.9, top_p=0.9, seed=3)]
    with opened(path, **options, speculative_config=None) as llm:
        plain = [answers(llm, PROMPTS, each) for each in params]
    with opened(path, **options) as llm:
        for _ in range(2):  # again after prefix hits
            assert [answers(llm, PROMPTS, each) for each in params] == plain
        metrics = llm.get_metrics()
    assert 0 < metrics["num_accepted_tokens"] < metrics["num_draft_tokens"]


@pytest.mark.slow
def test_states_come_back_after_preemptions(tmp_path: Path) -> None:
    path, params = write_next_token(tmp_path, "qwen3_next").folder, GREEDY.clone(max_tokens=70)
    with opened(path, speculative_config=None) as llm:
        plain = answers(llm, PROMPTS, params)
    few = {"max_model_len": 128, "kv_cache_memory_bytes": 130_000}  # fewer than five requests need
    with opened(path, **few) as llm:
        assert answers(llm, PROMPTS, params) == plain
        metrics = llm.get_metrics()
    assert metrics["num_preemptions"] > 0 < metrics["num_accepted_tokens"]


@pytest.mark.slow
def test_rank_0_drafts_for_two_ranks(tiny_next_token: NextToken) -> None:
    options: dict[str, Any] = {"tensor_parallel_size": 2, "compute": "exact", "num_threads": 2}
    params = [GREEDY, GREEDY.clone(temperature=0.4, seed=3), GREEDY.clone(logprobs=2)]
    path = tiny_next_token.folder
    with opened(path, **options | {"speculative_config": None}) as llm:
        plain = answers(llm, PROMPTS[:3], params)
        weights = llm.memory_plan.weights
    with opened(path, **options) as llm:
        assert answers(llm, PROMPTS[:3], params) == plain
        assert llm.get_metrics()["num_accepted_tokens"] > 0
        made = llm.memory_plan
    again = 2 * VOCAB * HIDDEN * 4  # embedding and head as a whole
    assert made.drafting_weights == pytest.approx(block_bytes(path) + again, rel=0.03)
    assert made.weights == weights + made.drafting_weights


# -- memory ------------------------------------------------------------------------------------


def block_bytes(path: Path) -> int:
    tensors = load_file(path / "model.safetensors")
    return sum(own.nbytes for name, own in tensors.items() if name.startswith(f"{BLOCK}."))


def test_a_block_takes_memory_only_if_it_drafts(tiny_next_token: NextToken) -> None:
    path, options = tiny_next_token.folder, {"max_model_len": 128, "max_num_seqs": 6}
    plain = LLM.plan(path, **options)
    made = LLM.plan(path, **options, speculative_config="mtp")
    everything = sum(own.nbytes for own in load_file(path / "model.safetensors").values())
    assert plain.weights == pytest.approx(everything - block_bytes(path), rel=0.03)
    assert made.drafting_weights == pytest.approx(block_bytes(path), rel=0.03)
    assert made.weights == plain.weights + made.drafting_weights
    assert plain.page_bytes < made.page_bytes <= 1.5 * plain.page_bytes  # two layers and the block
    assert made.workspace > plain.workspace
    with opened(path, speculative_config=None) as llm:
        [warning] = [line for line in llm.explain().splitlines() if "unused" in line]
    assert f"such as {BLOCK}.eh_proj.weight (of layers after the model's {LAYERS})" in warning
    options["kv_cache_memory_bytes"] = 10 * made.page_bytes
    needed = LLM.plan(path, **options, speculative_config="mtp").total
    small = LLM.plan(path, **options, memory=needed - 2**16, speculative_config="mtp")
    assert not small.fits and small.alternatives[0].options == {"speculative_config": None}


def rewritten(
    tiny: NextToken, to: Path, change: Callable[[dict[str, Tensor]], None], **config: Any
) -> Path:
    to.mkdir()
    values = json.loads((tiny.folder / "config.json").read_text())
    (to / "config.json").write_text(json.dumps(values | config))
    tensors = load_file(tiny.folder / "model.safetensors")
    change(tensors)
    save_file(tensors, to / "model.safetensors", {"format": "pt"})
    return to


def with_ends(tensors: dict[str, Tensor]) -> None:
    """As GLM and DeepSeek publish it: embedding and head of the model once more."""
    tensors[f"{BLOCK}.embed_tokens.weight"] = tensors["model.embed_tokens.weight"].clone()
    tensors[f"{BLOCK}.shared_head.head.weight"] = tensors["lm_head.weight"].clone()


def with_own_ends(tensors: dict[str, Tensor]) -> None:
    """Others, with which it says something else: each token that of the next row."""
    with_ends(tensors)
    name = f"{BLOCK}.shared_head.head.weight"
    tensors[name] = tensors[name].roll(1, 0)
    tensors[f"{BLOCK}.embed_tokens.weight"] *= 1.0078125


def test_an_embedding_and_a_head_that_are_the_models_are_not_loaded_twice(
    tiny_next_token: NextToken, tmp_path: Path
) -> None:
    paths = {
        "none": tiny_next_token.folder,
        "copies": rewritten(tiny_next_token, tmp_path / "copies", with_ends),
        "own": rewritten(tiny_next_token, tmp_path / "own", with_own_ends),
    }
    found, sizes = {}, {}
    for name, path in paths.items():
        with opened(path) as llm:
            found[name] = answers(llm, PROMPTS, GREEDY), rate(llm, PROMPTS, GREEDY)
            sizes[name] = llm.memory_plan.drafting_weights
    assert found["copies"] == found["none"]
    assert found["own"][0] == found["none"][0]
    assert found["own"][1] < 0.1 < 0.4 < found["none"][1]
    assert sizes["copies"] == sizes["none"]
    assert sizes["own"] == pytest.approx(sizes["none"] + 2 * VOCAB * HIDDEN * 4, rel=0.03)


@pytest.mark.parametrize("same", [True, False])
def test_a_gguf_file_may_have_them_too(
    tiny_next_token: NextToken, tmp_path: Path, same: bool
) -> None:
    state = tiny_next_token.model.state_dict()
    parts = {
        **tiny_next_token.parts,
        "embed_tokens.weight": state["model.embed_tokens.weight"],
        "shared_head.head.weight": state["lm_head.weight"].roll(0 if same else 1, 0),
    }
    path = write_gguf(tmp_path / "m.gguf", tiny_next_token.model, parts)
    with opened(path) as llm:
        assert (rate(llm, PROMPTS, GREEDY) > 0.4) == same
    checkpoint = open_checkpoint(path)
    head = next_token_head(checkpoint, ModelConfig.from_dict(checkpoint.config))
    checkpoint.close()
    assert (head.own_embedding, head.own_head) == (False, not same)


# -- weight formats ----------------------------------------------------------------------------

_FP8 = {"quant_method": "fp8", "fmt": "e4m3", "weight_block_size": [32, 32]}


def in_float8(tensors: dict[str, Tensor]) -> None:
    """Blocks of 32 x 32 with a factor each; routers, embeddings and ``eh_proj`` stay."""
    for name, values in list(tensors.items()):
        packed = name.endswith("_proj.weight") and "eh_proj" not in name
        if not packed or values.dim() != 2:
            continue
        rows, columns = values.shape
        blocks = values.view(rows // 32, 32, columns // 32, 32)
        scale = blocks.abs().amax((1, 3)) / 448
        codes = (blocks / scale[:, None, :, None]).to(torch.float8_e4m3fn)
        tensors[name] = codes.view(rows, columns)
        tensors[f"{name}_scale_inv"] = scale


def with_single_experts(tensors: dict[str, Tensor]) -> None:
    for name, values in list(tensors.items()):
        stem, _, own = name.rpartition(".experts.")
        if not stem or own not in ("gate_up_proj", "down_proj"):
            continue
        del tensors[name]
        for expert, matrix in enumerate(values):
            parts = zip(("gate", "up"), matrix.chunk(2), strict=True)
            for part, rows in [("down", matrix)] if own == "down_proj" else parts:
                tensors[f"{stem}.experts.{expert}.{part}_proj.weight"] = rows.contiguous()


def test_a_block_of_float8_weights_drafts(tiny_next_token: NextToken, tmp_path: Path) -> None:
    def change(tensors: dict[str, Tensor]) -> None:
        with_single_experts(tensors)
        in_float8(tensors)

    path = rewritten(tiny_next_token, tmp_path / "fp8", change, quantization_config=_FP8)
    with opened(path, speculative_config=None) as llm:
        plain = answers(llm, PROMPTS, GREEDY)
    with opened(path) as llm:
        assert rate(llm, PROMPTS, GREEDY) > 0.4
        assert answers(llm, PROMPTS, GREEDY) == plain
        specs = block_specs(llm)
    assert any("fp8" in spec or "f8" in spec for spec in specs.values())


@pytest.mark.parametrize("scheme", ["rtn-w4g32", "fp8"])
def test_a_block_in_packed_files_drafts(
    tiny_next_token: NextToken, tmp_path: Path, scheme: str
) -> None:
    """The quantizer packs all layers of a model that has the block for its last one."""
    whole = rewritten(
        tiny_next_token, tmp_path / "whole", without_parts, num_hidden_layers=LAYERS + 1
    )
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(tiny_next_token.folder / name, whole)
    path = quantize(whole, tmp_path / "packed", scheme)
    config = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps(config | {"num_hidden_layers": LAYERS}))
    parts = {f"{BLOCK}.{name}": own for name, own in tiny_next_token.parts.items()}
    save_file(load_file(path / "model.safetensors") | parts, path / "model.safetensors")
    with opened(path, speculative_config=None) as llm:
        plain = answers(llm, PROMPTS, GREEDY)
    with opened(path) as llm:
        assert rate(llm, PROMPTS, GREEDY) > 0.4
        assert answers(llm, PROMPTS, GREEDY) == plain
        specs, made = block_specs(llm), llm.memory_plan
    assert not {spec for name, spec in specs.items() if name.endswith("qkv_proj")} & {"f32", "f16"}
    assert made.drafting_weights < 0.6 * block_bytes(tiny_next_token.folder)


def without_parts(tensors: dict[str, Tensor]) -> None:
    for name in [name for name in tensors if name.startswith(f"{BLOCK}.")]:
        if name.endswith(("eh_proj.weight", "enorm.weight", "hnorm.weight", "head.norm.weight")):
            del tensors[name]


def block_specs(llm: LLM) -> dict[str, str]:
    runner: Any = llm._runner()
    [passes] = runner.drafting._passes
    return {path: str(linear.weight.spec) for path, linear in passes._model.linears()}


def test_a_block_is_packed_as_the_model_is(tiny_next_token: NextToken) -> None:
    with opened(tiny_next_token.folder, speculative_config=None, quantization="int8") as llm:
        plain = answers(llm, PROMPTS, GREEDY)
    with opened(tiny_next_token.folder, quantization="int8") as llm:
        assert rate(llm, PROMPTS, GREEDY) > 0.4
        assert answers(llm, PROMPTS, GREEDY) == plain
        specs = block_specs(llm)
        made = llm.memory_plan
    assert {spec for path, spec in specs.items() if path.endswith("qkv_proj")} == {"w8a16s"}
    assert made.drafting_weights < 0.5 * block_bytes(tiny_next_token.folder)


# -- names and refusals ------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("theirs", "ours"),
    [
        ("mtp.fc.weight", "model.layers.40.eh_proj.weight"),
        ("mtp.pre_fc_norm_embedding.weight", "model.layers.40.enorm.weight"),
        ("mtp.pre_fc_norm_hidden.weight", "model.layers.40.hnorm.weight"),
        ("model.mtp.norm.weight", "model.layers.40.shared_head.norm.weight"),
        ("mtp.layers.1.mlp.experts.3.up_proj.qweight", None),
        ("mtp.odd.weight", "mtp.odd.weight"),
        ("model.layers.3.mlp.up_proj.weight", "model.layers.3.mlp.up_proj.weight"),
    ],
)
def test_blocks_beside_the_model_come_behind_its_layers(theirs: str, ours: str | None) -> None:
    ours = ours or "model.layers.41.mlp.experts.3.up_proj.qweight"
    assert next_token_name(theirs, 40) == ours


def test_older_names_of_vllm_mean_the_same() -> None:
    found = speculative_config({"method": "glm4_moe_mtp", "num_speculative_tokens": 2})
    assert found == speculative_config({"method": "mtp", "num_speculative_tokens": 2})


@pytest.fixture
def stripped(tiny_next_token: NextToken, tmp_path: Path) -> Iterator[list[tuple[Path, str]]]:
    """Files without the block, and the tensor that each lacks."""

    def without(tensors: dict[str, Tensor]) -> None:
        for name in [name for name in tensors if name.startswith(f"{BLOCK}.")]:
            del tensors[name]

    folder = rewritten(tiny_next_token, tmp_path / "stripped", without)
    gguf = write_gguf(tmp_path / "m.gguf", tiny_next_token.model, {})
    yield [(folder, f"'{BLOCK}.eh_proj'"), (gguf, f"'blk.{LAYERS}.nextn.eh_proj'")]


def test_files_without_a_block_are_refused_by_the_tensor_they_lack(
    stripped: list[tuple[Path, str]],
) -> None:
    for path, name in stripped:
        with pytest.raises(RequestError, match=f"'mtp': .*expected a tensor {name} .*left out"):
            LLM.plan(path, speculative_config="mtp")
        LLM.plan(path)


def test_a_model_whose_blocks_are_not_run_is_refused(golden: Path) -> None:
    with pytest.raises(UnsupportedError, match=r"'mtp': .*are run \(.*glm4_moe, .*found 'llama'"):
        LLM.plan(golden / "arch-llama3" / "hf", speculative_config="mtp")


def test_a_block_needs_a_layer_to_be_like(tiny_next_token: NextToken) -> None:
    checkpoint = open_checkpoint(tiny_next_token.folder)
    model = ModelConfig.from_dict(checkpoint.config)
    with pytest.raises(UnsupportedError, match="a layer that attends to all tokens, found none"):
        next_token_head(checkpoint, replace(model, sliding_windows=(8,) * LAYERS))
    checkpoint.close()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"pipeline_parallel_size": 2}, "method 'mtp' needs pipeline_parallel_size=1, found 2"),
        ({"disk_offload": "auto"}, "method 'mtp' needs disk_offload=0, found 'auto'"),
        ({"device": "cuda"}, "method 'mtp' is not supported on a GPU"),
    ],
)
def test_what_a_block_cannot_do_is_refused(
    tiny_next_token: NextToken, options: dict[str, Any], message: str
) -> None:
    with pytest.raises(RequestError, match=f"^speculative_config: .*{message}"):
        LLM.plan(tiny_next_token.folder, speculative_config="mtp", **options)


@pytest.mark.parametrize("name", ["model", "quantization"])
def test_a_block_has_no_files_of_its_own(name: str) -> None:
    with pytest.raises(RequestError, match=f"{name} belongs to method"):
        speculative_config({"method": "mtp", name: "int8"})
