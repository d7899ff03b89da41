"""tiny_model: real checkpoints in every format, small, the same bytes for the same arguments."""

from __future__ import annotations

import hashlib
from pathlib import Path

import pytest

from sdk import LLM, CheckpointError, QuantizationError, RequestError, SamplingParams
from sdk.models.architecture import architectures
from sdk.testing import tiny_model
from sdk.testing.tiny_models import RandomCheckpoint, tiny_architectures

PARAMS = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)
CHAT = [{"role": "user", "content": "the cat sat"}]
ONLINE = ("float16", "f16", "q8_0", "q4_0", "q4_k_m", "int8", "int4", "fp8", "mxfp4", "nvfp4")
#: A factor of its queries would have to be in the weights.
NO_GGUF = ("muse_glimmer_text", "kimi_linear")
CALIBRATED = ("gptq", "gptq-w3g64", "awq", "w8a8", "gptq-q4_0")


def num_bytes(path: Path) -> int:
    files = [path] if path.is_file() else [file for file in path.rglob("*") if file.is_file()]
    return sum(file.stat().st_size for file in files)


def digest(path: Path) -> str:
    files = [path] if path.is_file() else sorted(path.glob("*.safetensors"))
    assert files
    return hashlib.sha256(b"".join(file.read_bytes() for file in files)).hexdigest()


@pytest.mark.quick_cases(4)
@pytest.mark.parametrize(
    "name", [*ONLINE, *(pytest.param(one, marks=pytest.mark.slow) for one in CALIBRATED)]
)
def test_every_format_loads_chats_and_is_small(name: str, tmp_path: Path) -> None:
    path = tiny_model(tmp_path, name)
    assert list(tmp_path.iterdir()) == [path]
    assert num_bytes(path) < 3_000_000
    with LLM(path, max_model_len=64, num_threads=1) as llm:
        assert llm.load_warnings == ()
        [output] = llm.chat(CHAT, PARAMS)
        assert len(set(output.outputs[0].token_ids)) > 2  # no model that repeats itself
        assert output.prompt == "<|user|>the cat sat<|end|><|assistant|>"
        formats = {layer.format for layer in llm.quant_report().layers}
    assert (formats == {"f16"}) == (name in ("float16", "f16"))


def test_a_text_survives_the_tokenizer(tmp_path: Path) -> None:
    with LLM(tiny_model(tmp_path, "q8_0"), max_model_len=128) as llm:
        tokenizer = llm.get_tokenizer()
        for text in ("the cat", "héllo 😀", "  two\n\nlines"):
            assert tokenizer.decode(tokenizer.encode(text)) == text
        assert len(tokenizer.encode("the cat")) == 2
        assert tokenizer.eos_token == "<|end|>"


def test_the_seed_decides_the_weights(tmp_path: Path) -> None:
    found = [
        digest(tiny_model(tmp_path / str(index), "float16", seed=seed))
        for index, seed in enumerate((0, 0, 1))
    ]
    assert found[0] == found[1] != found[2]
    same = [digest(tiny_model(tmp_path / name, "q4_k_m")) for name in ("x", "y")]
    assert same[0] == same[1]


@pytest.mark.quick_cases(5)
@pytest.mark.parametrize("name", [one.model_type for one in tiny_architectures()])
def test_every_architecture_is_written_as_a_folder(name: str, tmp_path: Path) -> None:
    path = tiny_model(tmp_path, "float16", name)
    with LLM(path, max_model_len=64, num_threads=1) as llm:
        assert llm.load_warnings == ()
        [output] = llm.chat(CHAT, PARAMS)
        assert output.outputs[0].finish_reason == "length"


@pytest.mark.slow
@pytest.mark.parametrize(
    "name",
    [
        own.model_type
        for own in tiny_architectures()
        if own.gguf is not None and not own.tensors.names and own.model_type not in NO_GGUF
    ],
)
def test_every_architecture_is_written_as_a_gguf_file(name: str, tmp_path: Path) -> None:
    path = tiny_model(tmp_path, "q4_k_m", name)
    with LLM(path, max_model_len=64, num_threads=1) as llm:
        [output] = llm.generate("the cat", PARAMS)
        assert output.outputs[0].finish_reason == "length"


def test_wrong_arguments_are_named_and_leave_nothing(tmp_path: Path) -> None:
    with pytest.raises(RequestError, match=r"architecture: expected one of .*, found 'gpt5'"):
        tiny_model(tmp_path, "f16", "gpt5")
    with pytest.raises(RequestError, match=r"architecture: expected one of .*, found 'bert'"):
        tiny_model(tmp_path, "f16", "bert")
    with pytest.raises(QuantizationError, match="did you mean 'q4_k_m'"):
        tiny_model(tmp_path, "q4_km")
    with pytest.raises(RequestError, match="seed: expected an integer of at least 0, found -1"):
        tiny_model(tmp_path, seed=-1)
    with pytest.raises(RequestError, match="format: expected a name, found 4"):
        tiny_model(tmp_path, 4)  # type: ignore[arg-type]
    with pytest.raises(QuantizationError, match=r"^tiny_model: afmoe-f16: models of type afmoe"):
        tiny_model(tmp_path, "f16", "afmoe")
    with pytest.raises(QuantizationError, match=r"^tiny_model: mixtral-awq: awq-w4g128 scales"):
        tiny_model(tmp_path, "awq", "mixtral")
    assert list(tmp_path.iterdir()) == []
    path = tiny_model(tmp_path, "float16")
    with pytest.raises(QuantizationError, match="exists already"):
        tiny_model(tmp_path, "float16")
    assert list(tmp_path.iterdir()) == [path]


def test_a_tensor_of_unknown_shape_is_named(tmp_path: Path) -> None:
    known = architectures()[0]
    made = RandomCheckpoint(tmp_path, {"model_type": known.model_type}, known, 0)
    with pytest.raises(CheckpointError, match=r"model\.strange: its shape is unknown"):
        made.weight("model.strange")
    assert made.tensors == {} and made.entries() == made.unused() == []
