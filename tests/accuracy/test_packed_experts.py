"""Mixtures whose experts are packed one by one, as gptqmodel, autoawq and others write them.

The oracle is transformers' model with the values the codes stand for.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import save_file
from torch import Tensor

from tests.loaders.test_awq_folder import nibbles
from tests.loaders.test_gptq_folder import Layer, stream

EXPERTS, HIDDEN, WIDTH, GROUP = 4, 64, 96, 32
SIZES = {
    "vocab_size": 64, "hidden_size": HIDDEN, "intermediate_size": WIDTH, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "num_experts_per_tok": 2,
    "num_local_experts": EXPERTS, "tie_word_embeddings": False,
}  # fmt: skip
MODELS: dict[str, dict[str, Any]] = {
    "mixtral": {},
    "qwen3_moe": {"num_experts": EXPERTS, "moe_intermediate_size": WIDTH},
}
#: How Mixtral's files name what is ours, and transformers', by another name; llm-compressor has
#: half of it.
HALF_SPELLING = {"mlp": "block_sparse_moe"}
FIRST_SPELLING = {**HALF_SPELLING, "gate_proj": "w1", "down_proj": "w2", "up_proj": "w3"}


def gptq(layer: Layer) -> dict[str, Tensor]:
    return layer.tensors()


def awq(layer: Layer) -> dict[str, Tensor]:
    order = (0, 2, 4, 6, 1, 3, 5, 7)
    return {
        "qweight": nibbles(layer.codes.T, order),
        "qzeros": nibbles(layer.zeros, order),
        "scales": layer.scales,
    }


def compressed(layer: Layer) -> dict[str, Tensor]:
    return {
        "weight_packed": stream(layer.codes, 4),
        "weight_scale": layer.scales.t().contiguous(),
        "weight_zero_point": stream(layer.zeros, 4).t().contiguous(),
        "weight_shape": torch.tensor(layer.codes.shape),
    }


SHARED = {"bits": 4, "group_size": GROUP}
CT = {
    "num_bits": 4, "type": "int", "strategy": "group", "group_size": GROUP, "symmetric": False,
}  # fmt: skip
FORMATS: dict[str, tuple[Callable[[Layer], dict[str, Tensor]], dict[str, Any]]] = {
    "gptq": (gptq, {**SHARED, "sym": False, "checkpoint_format": "gptq_v2"}),
    "awq": (awq, {**SHARED, "zero_point": True, "version": "gemm"}),
    "compressed-tensors": (
        compressed,
        {
            "format": "pack-quantized",
            "config_groups": {"0": {"targets": ["Linear"], "weights": CT}},
        },
    ),
}


@pytest.mark.quick_cases(5)
@pytest.mark.parametrize("method", FORMATS)
@pytest.mark.parametrize(
    ("kind", "spelling"),
    [
        *(("mixtral", {}), ("mixtral", HALF_SPELLING), ("mixtral", FIRST_SPELLING)),
        ("qwen3_moe", {}),
    ],
)
def test_experts_packed_one_by_one_give_the_logits_of_their_values(
    method: str,
    kind: str,
    spelling: dict[str, str],
    tmp_path: Path,
    logits_of: Callable[..., Tensor],
) -> None:
    pack, settings = FORMATS[method]
    torch.manual_seed(1)
    config = transformers.AutoConfig.for_model(kind, **{**SIZES, **MODELS[kind]})
    model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager")
    state = {name: tensor for name, tensor in model.state_dict().items() if "experts." not in name}
    for index, whole in enumerate(layer.mlp.experts for layer in model.model.layers):
        for expert in range(EXPERTS):
            for number, part in enumerate(("gate_proj", "up_proj", "down_proj")):
                rows, columns = (HIDDEN, WIDTH) if part == "down_proj" else (WIDTH, HIDDEN)
                seed = 100 * index + 10 * expert + number
                layer = Layer(4, GROUP, rows=rows, columns=columns, seed=seed)
                layer.scales *= 0.2  # values around 0.1: no expert outweighs the residual
                values = whole.down_proj if part == "down_proj" else whole.gate_up_proj
                begin = WIDTH if part == "up_proj" else 0
                values.data[expert, begin : begin + rows] = layer.values
                name = f"model.layers.{index}.mlp.experts.{expert}.{part}"
                state |= {f"{name}.{ending}": tensor for ending, tensor in pack(layer).items()}
    for ours, theirs in spelling.items():
        state = {
            name.replace(f".{ours}.", f".{theirs}.") if ".layers." in name else name: tensor
            for name, tensor in state.items()
        }
    save_file(
        {name: tensor.contiguous() for name, tensor in state.items()},
        tmp_path / "model.safetensors",
    )
    fields = {**config.to_dict(), "quantization_config": {"quant_method": method, **settings}}
    (tmp_path / "config.json").write_text(json.dumps(fields))
    prompt = torch.randint(0, 64, (20,), generator=torch.Generator().manual_seed(2))
    with torch.inference_mode():
        expected = model.eval()(prompt[None]).logits[0]
    found = logits_of(tmp_path, prompt, "exact", len(prompt))
    assert float((found - expected).norm() / expected.norm()) < 1e-5
    whole = logits_of(tmp_path, prompt, "auto", len(prompt))  # rounding may choose other experts
    assert torch.equal(logits_of(tmp_path, prompt, "auto", 7), whole)
