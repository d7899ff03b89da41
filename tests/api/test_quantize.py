"""Quantizing whole models: what is made runs, can be interrupted, and refuses what cannot be."""

from __future__ import annotations

import errno
import json
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

import sdk
from sdk import (
    LLM,
    LoadCancelled,
    QuantizationError,
    RequestError,
    SamplingParams,
    UnsupportedError,
)
from sdk.cli import main
from sdk.loaders.open import open_checkpoint
from sdk.loaders.writers import parts
from sdk.quant.scheme import Scheme

TOKENS = 24
Ids = list[list[int]]


@pytest.fixture(scope="module")
def ids() -> Ids:
    """Calibration text of the tiny models, whose vocabulary is 448."""
    return torch.randint(3, 448, (6, TOKENS), generator=torch.Generator().manual_seed(3)).tolist()


@pytest.fixture(
    params=["llama3", *(pytest.param(x, marks=pytest.mark.slow) for x in ("qwen3", "gemma3"))]
)
def folder(request: pytest.FixtureRequest, golden: Path) -> Path:
    return golden / f"arch-{request.param}" / "hf"


@pytest.fixture
def llama(golden: Path) -> Path:
    return golden / "arch-llama3" / "hf"


def logprobs(model: Path, prompt: list[int], **options: object) -> Tensor:
    params = SamplingParams(max_tokens=1, prompt_logprobs=-1, temperature=0, detokenize=False)
    with LLM(model, compute="exact", max_model_len=64, **options) as llm:
        found = llm.generate({"prompt_token_ids": prompt}, params)[0].prompt_logprobs
    assert found is not None
    rows = [[row[i].logprob for i in sorted(row)] for row in found if row is not None]
    return torch.tensor(rows)


def divergence(model: Path, base: Path, prompt: list[int], **options: object) -> float:
    expected, got = logprobs(base, prompt), logprobs(model, prompt, **options)
    return float((expected.exp() * (expected - got)).sum(1).mean())


#: Mean divergence to the original on the three tiny models, at most.
SCHEMES = {
    "gptq-w4g32": 0.1, "gptq-w4g32-act": 0.1, "gptq-w4g32-mix-h5": 0.1, "awq-w4g32": 0.1,
    "hqq-w4g32": 0.1, "int4": 0.1, "int8": 2e-3, "rtn-w8s": 1e-3, "rtn-w8a8s": 1e-3, "w8a8": 1e-3,
    "fp8": 0.01, "fp8-block": 0.01, "nvfp4": 0.2, "mxfp4": 0.3,
    "q8_0": 1e-3, "q4_0": 0.2, "q4_k_m": 0.1, "iq4_nl": 0.2, "gptq-q4_0": 0.1, "gptq-q4_k_m": 0.1,
}  # fmt: skip


def target(tmp_path: Path, scheme: str) -> Path:
    return tmp_path / ("made.gguf" if Scheme.parse(scheme).container == "gguf" else "made")


@pytest.mark.quick_cases(4)
@pytest.mark.parametrize("scheme", SCHEMES)
def test_a_model_is_quantized_into_what_every_part_of_the_package_reads(
    scheme: str, folder: Path, tmp_path: Path, ids: Ids
) -> None:
    out = target(tmp_path, scheme)
    assert sdk.quantize(folder, out, scheme, calibration=ids, tokens=TOKENS) == out
    assert [p.name for p in tmp_path.iterdir()] == [out.name]
    assert divergence(out, folder, ids[0]) < SCHEMES[scheme]
    with LLM(out, max_model_len=64) as llm:
        assert llm.load_warnings == ()
        assert llm.generate("hello", SamplingParams(max_tokens=4))[0].outputs[0].token_ids


OWN = (
    *("model", "pre", "merges", "scores", "token_type", "add_space_prefix", "add_sep_token"),
    "padding_token_id",
)


def test_a_gguf_file_says_what_the_converter_of_llama_cpp_says(
    folder: Path, tmp_path: Path
) -> None:
    """Every tensor and every key the converter writes, but for labels, and for what it makes of
    this toy tokenizer: there the tokens of texts are compared."""
    out = tmp_path / "made.gguf"
    sdk.quantize(folder, out, "f16")
    expected, found = gguf.GGUFReader(folder.parent / "model.gguf"), gguf.GGUFReader(out)
    ours = {t.name: t for t in found.tensors}
    assert sorted(ours) == sorted(t.name for t in expected.tensors)
    for tensor in expected.tensors:
        assert list(ours[tensor.name].shape) == list(tensor.shape), tensor.name
        theirs = gguf.dequantize(tensor.data, tensor.tensor_type)
        mine = gguf.dequantize(ours[tensor.name].data, ours[tensor.name].tensor_type)
        np.testing.assert_allclose(mine, theirs, rtol=1e-3, atol=1e-6, err_msg=tensor.name)
    for key, field in expected.fields.items():
        if key.startswith(("GGUF.", "general.")) or key.removeprefix("tokenizer.ggml.") in OWN:
            continue
        assert key in found.fields, key
        theirs, mine = field.contents(), found.fields[key].contents()
        if isinstance(theirs, float):
            np.testing.assert_allclose(mine, theirs, rtol=1e-6, err_msg=key)
        else:
            assert mine == theirs, key
    made, original = open_checkpoint(out), open_checkpoint(folder)
    for text in ("Hello, World!", "two  spaces", "naïve ÿ 12345", "</s>"):
        assert made.tokenizer.encode(text) == original.tokenizer.encode(text), text
    made.close()
    original.close()


def test_a_gguf_file_becomes_another_one(golden: Path, tmp_path: Path, ids: Ids) -> None:
    source, out = golden / "arch-llama3" / "model.gguf", tmp_path / "made.gguf"
    sdk.quantize(source, out, "q8_0")
    assert divergence(out, source, ids[0]) < 1e-3
    with LLM(out, max_model_len=64) as llm, LLM(source, max_model_len=64) as original:
        text = "Hello, World! 123"
        params = SamplingParams(max_tokens=1)
        ours, theirs = (one.generate(text, params)[0].prompt_token_ids for one in (llm, original))
        assert ours == theirs


def test_weights_are_what_the_methods_make_of_the_originals(
    llama: Path, tmp_path: Path, ids: Ids
) -> None:
    """A layer's GPTQ sees the inputs that the quantized layers before it give."""
    from sdk.quant.methods.integers import round_to_nearest
    from sdk.quant.spec import QuantSpec
    from sdk.quant.weight import weight_of

    sdk.quantize(llama, tmp_path / "made", "rtn-w4g32")
    made, original = open_checkpoint(tmp_path / "made"), open_checkpoint(llama)
    for name in ("model.layers.0.self_attn.v_proj", "model.layers.1.mlp.down_proj"):
        expected = round_to_nearest(original.weight(name).dequantize(), QuantSpec.parse("w4a16g32"))
        assert torch.equal(made.weight(name).dequantize(), weight_of(expected).dequantize())
    for name in ("model.norm.weight", "model.layers.1.input_layernorm.weight"):
        assert torch.equal(made.tensor(name), original.tensor(name))
    made.close()
    original.close()


def test_a_mixture_has_one_bit_more_for_values_and_the_outputs_of_the_mlp(
    llama: Path, tmp_path: Path, ids: Ids
) -> None:
    out = tmp_path / "made"
    sdk.quantize(llama, out, "gptq-w4g32-mix", calibration=ids, tokens=TOKENS)
    made = open_checkpoint(out)
    specs = {
        part: str(made.weight(f"model.layers.1.{part}").spec)
        for part in ("self_attn.q_proj", "self_attn.v_proj", "mlp.up_proj", "mlp.down_proj")
    }
    made.close()
    assert list(specs.values()) == ["w4a16g32", "w5a16g32", "w4a16g32", "w5a16g32"]
    groups = json.loads((out / "config.json").read_text())["quantization_config"]["config_groups"]
    bits = {tuple(group["targets"]): group["weights"]["num_bits"] for group in groups.values()}
    assert bits == {("Linear",): 4, ("re:.*v_proj$", "re:.*down_proj$"): 5}


class Stopping:
    """``on_progress`` that stops after this many layers."""

    def __init__(self, after: int) -> None:
        self.after = after
        self.seen: list[tuple[str, int, int]] = []

    def __call__(self, stage: str, done: int, total: int) -> bool:
        self.seen.append((stage, done, total))
        return done < self.after


@pytest.mark.parametrize("scheme", ["gptq-w4g32", "awq-w4g32", "q4_0"])
def test_a_stopped_job_goes_on_where_it_was_and_makes_the_same_bytes(
    scheme: str, llama: Path, tmp_path: Path, ids: Ids
) -> None:
    whole, halves = tmp_path / "whole", tmp_path / "halves"
    if scheme == "q4_0":
        whole, halves = whole.with_suffix(".gguf"), halves.with_suffix(".gguf")
    options = {"calibration": ids, "tokens": TOKENS}
    sdk.quantize(llama, whole, scheme, **options)
    stopping = Stopping(1)
    with pytest.raises(LoadCancelled, match="quantize was cancelled by on_progress at 1 of 2"):
        sdk.quantize(llama, halves, scheme, on_progress=stopping, **options)
    assert stopping.seen == [("quantize", 0, 2), ("quantize", 1, 2)]
    assert not halves.exists()
    going_on = Stopping(99)
    sdk.quantize(llama, halves, scheme, on_progress=going_on, **options)
    assert going_on.seen == [("quantize", 1, 2), ("quantize", 2, 2)]
    first, second = (p / "model.safetensors" if p.is_dir() else p for p in (whole, halves))
    assert first.read_bytes() == second.read_bytes()
    assert sorted(p.name for p in tmp_path.iterdir()) == sorted([whole.name, halves.name])


def test_another_job_does_not_go_on_from_an_unfinished_one(
    llama: Path, tmp_path: Path, ids: Ids
) -> None:
    out = tmp_path / "made"
    with pytest.raises(LoadCancelled):
        sdk.quantize(llama, out, "rtn-w8s", on_progress=Stopping(1))
    with pytest.raises(QuantizationError, match="unfinished job of another model, scheme"):
        sdk.quantize(llama, out, "rtn-w4g32")
    sdk.quantize(llama, out, "rtn-w8s")


@pytest.fixture
def changed(llama: Path, tmp_path: Path) -> Iterator[Callable[[str, Tensor], Path]]:
    """``changed(name, values)``: a copy of the tiny llama with another tensor."""

    def change(name: str, values: Tensor) -> Path:
        folder = tmp_path / "changed"
        shutil.copytree(llama, folder)
        tensors = load_file(folder / "model.safetensors")
        save_file({**tensors, name: values}, folder / "model.safetensors")
        return folder

    yield change


@pytest.mark.parametrize("scheme", ["rtn-w8s", "gptq-w4g32", "awq-w4g32", "q4_0", "fp8"])
def test_a_weight_that_is_not_a_number_is_named(
    scheme: str, changed: Callable[[str, Tensor], Path], tmp_path: Path, ids: Ids
) -> None:
    values = torch.randn(64, 128).half()
    values[3, 4] = float("nan")
    model = changed("model.layers.1.mlp.down_proj.weight", values)
    with pytest.raises(QuantizationError, match=r"layers\.1\.mlp\.down_proj.* not"):
        sdk.quantize(model, target(tmp_path, scheme), scheme, calibration=ids, tokens=TOKENS)


def test_groups_that_do_not_divide_the_columns_are_refused_before_anything_is_done(
    llama: Path, tmp_path: Path, ids: Ids
) -> None:
    with pytest.raises(QuantizationError, match="64 columns do not divide into groups of 128"):
        sdk.quantize(llama, tmp_path / "made", "gptq-w4g128", calibration=ids, tokens=TOKENS)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"scheme": "q4_k_x"}, QuantizationError, "did you mean"),
        ({"scheme": "q4_0"}, QuantizationError, "is written as a .gguf file"),
        ({"calibration": "short"}, RequestError, "expected at least 512 tokens"),
        ({"calibration": [[1, 2, 448]], "tokens": 3}, RequestError, "ids from 0 to 447"),
        ({"calibration": [[1, 2, -1]], "tokens": 3}, RequestError, "ids from 0 to 447"),
        ({"tokens": 0}, RequestError, "1 or more sequences and tokens"),
        ({"tokens": 513}, RequestError, "sequences of at most 512 tokens"),
    ],
)
def test_what_cannot_be_done_is_refused(
    options: dict[str, object], error: type[Exception], message: str, llama: Path, tmp_path: Path
) -> None:
    with pytest.raises(error, match=message):
        sdk.quantize(llama, tmp_path / "made", **{"scheme": "gptq-w4g32", **options})
    assert list(tmp_path.iterdir()) == []


def test_a_result_is_never_written_over(llama: Path, tmp_path: Path) -> None:
    out = tmp_path / "made"
    out.mkdir()
    with pytest.raises(QuantizationError, match="exists already"):
        sdk.quantize(llama, out, "rtn-w8s")
    assert list(out.iterdir()) == []


def test_a_place_that_cannot_be_written_is_an_error_of_ours(llama: Path, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(QuantizationError, match="cannot be written"):
        sdk.quantize(llama, tmp_path / "file" / "made", "rtn-w8s")


def test_a_full_disk_leaves_no_half_written_part(
    llama: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sdk.quantizing.job_folder.free_space", lambda folder: 1000)
    with pytest.raises(QuantizationError, match="MB of free space, found 0 MB"):
        sdk.quantize(llama, tmp_path / "made", "rtn-w8s")
    monkeypatch.undo()

    def full(fd: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(parts.os, "fsync", full)
    with pytest.raises(QuantizationError, match="No space left"):
        sdk.quantize(llama, tmp_path / "made", "rtn-w8s")
    assert not list(tmp_path.rglob("*.safetensors"))
    monkeypatch.undo()
    sdk.quantize(llama, tmp_path / "made", "rtn-w8s")


def test_a_model_run_by_transformers_code_is_not_written(tmp_path: Path) -> None:
    import transformers

    sizes = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "vocab_size": 64}
    folder = tmp_path / "gpt"
    config = transformers.BioGptConfig(**sizes, intermediate_size=64, max_position_embeddings=32)
    transformers.BioGptForCausalLM(config).save_pretrained(folder)
    with pytest.raises(UnsupportedError, match="biogpt models run through transformers"):
        sdk.quantize(folder, tmp_path / "made", "rtn-w8s")


def test_matrices_that_a_file_stores_turned_are_packed_while_loading(tmp_path: Path) -> None:
    import transformers

    sizes = {"n_embd": 64, "n_layer": 1, "n_head": 2, "vocab_size": 64, "n_positions": 64}
    config = transformers.OpenAIGPTConfig(**sizes)
    transformers.OpenAIGPTLMHeadModel(config).save_pretrained(tmp_path)
    options = {"skip_tokenizer_init": True, "num_threads": 1}
    plain = logprobs(tmp_path, [3, 5, 9], **options)
    packed = logprobs(tmp_path, [3, 5, 9], quantization="int8", **options)
    assert 0 < (plain - packed).abs().max() < 0.01


def test_a_model_in_use_can_be_quantized(llama: Path, tmp_path: Path, ids: Ids) -> None:
    with LLM(llama, max_model_len=64) as llm:
        out = llm.quantize(tmp_path / "made", "int8")
        assert llm.generate("hello", SamplingParams(max_tokens=2))[0].outputs[0].token_ids
    assert divergence(out, llama, ids[0]) < SCHEMES["int8"]


# -- at load ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(("scheme", "bound"), [("int4", 0.1), ("int8", 1e-3), ("fp8", 0.01)])
def test_a_model_is_packed_while_it_is_loaded(
    scheme: str, bound: float, folder: Path, ids: Ids
) -> None:
    assert divergence(folder, folder, ids[0], quantization=scheme) < bound
    plain = LLM.plan(folder, max_model_len=64)
    small = LLM.plan(folder, max_model_len=64, quantization=scheme)
    assert small.weights < plain.weights
    with LLM(folder, max_model_len=64, quantization=scheme) as llm:
        model = llm._runner().model
        weights = [linear.weight for _, linear in model.linears()] + [model.embedding.weight]
        held = sum({id(weight): weight.nbytes for weight in weights}.values())
    assert 0.9 * small.weights < held < small.weights  # 4 % are for kernels that take more


@pytest.mark.slow
def test_ranks_pack_their_own_part(llama: Path, ids: Ids) -> None:
    alone = logprobs(llama, ids[0], quantization="hqq-w4g32")
    both = logprobs(llama, ids[0], quantization="hqq-w4g32", tensor_parallel_size=2)
    assert torch.allclose(alone, both, atol=1e-3)


@pytest.mark.parametrize("scheme", ["gptq", "awq-w4g32", "q4_0", "int5", ""])
def test_schemes_that_need_text_or_make_files_are_refused_at_load(scheme: str, llama: Path) -> None:
    with pytest.raises(RequestError, match="expected"):
        LLM(llama, quantization=scheme)


@pytest.mark.parametrize(
    ("name", "found"), [("gguf-Q4_K_M/model.gguf", "Q4_K, Q"), ("awq-gemm", "awq-w4g128")]
)
def test_a_model_that_is_packed_already_is_not_packed_in_silence(
    name: str, found: str, golden: Path
) -> None:
    for make in (LLM, LLM.plan):
        with pytest.raises(UnsupportedError, match=f"float matrices to pack, found {found}"):
            make(golden / name, quantization="int8")


# -- the command -----------------------------------------------------------------------------------


def test_the_command_makes_a_model_and_prints_where(
    llama: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    text = tmp_path / "text"
    text.write_text("Hello world, this is some text to calibrate with. " * 40)
    out = tmp_path / "made"
    command = ["quantize", str(llama), str(out), "--scheme", "gptq-w4g32"]
    assert main([*command, "--calibration", str(text), "--tokens", "32", "--sequences", "4"]) == 0
    assert capsys.readouterr().out == f"{out}\n"
    settings = json.loads((out / "config.json").read_text())["quantization_config"]
    assert settings["quant_method"] == "gptq" and settings["bits"] == 4
    assert main(command) == 2
    assert "exists already" in capsys.readouterr().err
