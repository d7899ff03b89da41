"""What is written is read again bit for bit, in every format and every number of bits."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from safetensors import safe_open
from torch import Tensor

from sdk.loaders.folders.hf_folder import HfFolder
from sdk.loaders.open import open_checkpoint
from sdk.loaders.writers.gguf_metadata import rope_factors
from sdk.loaders.writers.hf_writer import HfWriter
from sdk.loaders.writers.parts import join_parts, read_parts, write_part
from sdk.quant.calibration import InputStatistics
from sdk.quant.errors import QuantizationError, UnsupportedError
from sdk.quant.permuted import Permuted, PermutedWeight
from sdk.quant.quantize import quantize_joined, quantize_without_data
from sdk.quant.scheme import Scheme
from sdk.quant.weight import Weight, weight_of

CONFIG: dict[str, Any] = {
    "model_type": "llama", "architectures": ["LlamaForCausalLM"], "vocab_size": 64,
    "hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 1,
    "num_attention_heads": 4, "num_key_value_heads": 2, "rms_norm_eps": 1e-5,
    "max_position_embeddings": 64, "tie_word_embeddings": True,
}  # fmt: skip
Q, DOWN = "model.layers.0.self_attn.q_proj", "model.layers.0.mlp.down_proj"


def matrix(rows: int, columns: int) -> Tensor:
    return torch.randn(rows, columns, generator=torch.Generator().manual_seed(rows)) * 0.05


@pytest.fixture
def source(tmp_path: Path) -> HfFolder:
    """A folder with an embedding and nothing else."""
    folder = tmp_path / "source"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps({**CONFIG, "quantization_config": None}))
    (folder / "tokenizer_config.json").write_text("{}")
    write_part(folder / "model.safetensors", {"model.embed_tokens.weight": matrix(64, 128)}, {})
    return HfFolder(folder)


def packed(scheme: Scheme, name: str, weight: Tensor) -> Any:
    if not scheme.needs_data or scheme.method != "gptq":
        if scheme.method in ("awq", "smoothquant"):
            scheme = replace(scheme, method="rtn")
        return quantize_without_data(name, weight, scheme)
    seen = InputStatistics(weight.shape[1])
    seen.add(torch.randn(300, weight.shape[1], generator=torch.Generator().manual_seed(5)))
    return quantize_joined({name: weight}, seen, scheme, scheme.spec)[name]


def value(found: Any) -> Tensor:
    if isinstance(found, Permuted):
        return PermutedWeight(weight_of(found.layout), found.order).dequantize()
    return weight_of(found).dequantize()


EXACT = [
    *(f"gptq-w{bits}g{group}" for bits in (2, 3, 4, 8) for group in (32, 64, 128)),
    *("gptq-w4g32s", "gptq-w4g32-act", "gptq-w3g64s-act"),
    *("awq-w4g32", "awq-w4g128"),
    *(f"rtn-w{bits}g64{sym}" for bits in range(2, 9) for sym in ("", "s")),
    *("rtn-w4", "rtn-w8s", "rtn-w8a8s", "smoothquant-w8", "mxfp4", "nvfp4"),
    *("fp8-tensor", "fp8-channel", "fp8-block"),
]


@pytest.mark.quick_cases(14)
@pytest.mark.parametrize("text", EXACT)
def test_a_folder_gives_back_the_weights_that_were_written(
    text: str, source: HfFolder, tmp_path: Path
) -> None:
    scheme = Scheme.parse(text)
    weights = {Q: matrix(128, 128), DOWN: matrix(128, 256)}
    made = {name: packed(scheme, name, weight) for name, weight in weights.items()}
    found = written(source, scheme, made, tmp_path / "out")
    for name in weights:
        assert torch.equal(found.weight(name).dequantize(), value(made[name])), name
    assert torch.equal(found.weight("model.embed_tokens").dequantize(), matrix(64, 128))
    again = [entry.format for entry in found.entries() if "embed" not in entry.name]
    assert len(again) == 2
    assert found.unused() == []
    found.close()


@pytest.mark.parametrize("bits", [2, 3, 4, 8])
def test_an_hqq_folder_gives_back_its_weights_to_the_last_bit_but_one(
    bits: int, source: HfFolder, tmp_path: Path
) -> None:
    scheme = Scheme.parse(f"hqq-w{bits}g64")
    made = {Q: packed(scheme, Q, matrix(128, 128))}
    found = written(source, scheme, made, tmp_path / "out")
    assert torch.allclose(found.weight(Q).dequantize(), value(made[Q]), rtol=1e-5, atol=1e-7)


def written(source: HfFolder, scheme: Scheme, made: dict[str, Any], out: Path) -> HfFolder:
    writer = HfWriter(source, scheme)
    parts = []
    for i, (name, weight) in enumerate(made.items()):
        parts.append(out.with_name(f"part-{i}"))
        write_part(parts[-1], writer.matrix(name, weight)[0], {})
    parts.append(out.with_name("part-last"))
    whole: Weight = source.weight("model.embed_tokens")
    write_part(parts[-1], writer.whole("model.embed_tokens", whole)[0], {})
    writer.finish(parts, out)
    assert (out / "tokenizer_config.json").is_file()
    return HfFolder(out)


def test_awq_refuses_outputs_that_are_no_eights(source: HfFolder) -> None:
    scheme = Scheme.parse("awq-w4g32")
    with pytest.raises(QuantizationError, match="multiple of 8 outputs, found 4 bits and 12"):
        HfWriter(source, scheme).matrix(Q, packed(scheme, Q, matrix(12, 128)))


def test_a_folder_cannot_be_made_of_a_gguf_file(golden: Path) -> None:
    checkpoint = open_checkpoint(golden / "gguf-Q8_0" / "model.gguf")
    with pytest.raises(UnsupportedError, match="config and tokenizer of the original folder"):
        HfWriter(checkpoint, Scheme.parse("gptq"))
    checkpoint.close()


def test_parts_become_numbered_files_with_an_index_where_one_would_be_too_large(
    tmp_path: Path,
) -> None:
    tensors = {f"t{i}": torch.arange(i, i + 100, dtype=torch.int32) for i in range(5)}
    parts = [tmp_path / "a", tmp_path / "b"]
    write_part(parts[0], {name: tensors[name] for name in ("t0", "t1", "t2")}, {"t0": "note"})
    write_part(parts[1], {name: tensors[name] for name in ("t3", "t4")}, {})
    assert read_parts(parts)[1] == {"t0": "note"}
    out = tmp_path / "out"
    out.mkdir()
    join_parts(parts, out, max_shard=900)
    index = json.loads((out / "model.safetensors.index.json").read_text())
    assert index["metadata"]["total_size"] == 2000
    assert sorted(set(index["weight_map"].values())) == [
        f"model-0000{i}-of-00003.safetensors" for i in (1, 2, 3)
    ]
    for name, file in index["weight_map"].items():
        with safe_open(out / file, "pt") as opened:
            assert torch.equal(opened.get_tensor(name), tensors[name])


def test_llama_3s_rotary_rule_becomes_the_factors_that_the_converter_writes(golden: Path) -> None:
    config = json.loads((golden / "arch-llama3" / "hf" / "config.json").read_text())
    reader = gguf.GGUFReader(golden / "arch-llama3" / "model.gguf")
    stored = next(t.data for t in reader.tensors if t.name == "rope_freqs.weight")
    found = rope_factors(config)["rope_freqs.weight"]
    assert len(set(found.tolist())) > 2
    np.testing.assert_allclose(found, stored, rtol=1e-6)
