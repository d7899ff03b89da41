"""PLM, which transformers has no class for: Youtu with another MLP."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from sdk import LLM, SamplingParams
from sdk.loaders.open import open_checkpoint
from sdk.models.configs.config import ModelConfig
from sdk.quant.errors import CheckpointError
from tests.gguf_models import U32, gguf_of, save_gguf
from tests.models.conftest import Paged, Ranks, expected_logits, prompt, tiny
from tests.models.tiny_architectures import LATENT

Load = Callable[..., Any]
SIZES = {
    **LATENT,
    "q_lora_rank": None,
    "tie_word_embeddings": True,
    "rms_norm_eps": 1e-6,
    "rope_parameters": {"rope_type": "default", "rope_theta": 3000.0},
}
FACTS = {
    "attention.kv_lora_rank": (U32, 48),
    "attention.key_length": (U32, 40),
    "attention.value_length": (U32, 32),
    "rope.dimension_count": (U32, 16),
}
IDS = prompt(75, 1)


class _SquaredReLU(torch.nn.Module):
    """``down(relu(up(x)) ** 2)``."""

    def __init__(self, gated: Any) -> None:
        super().__init__()
        self.up_proj, self.down_proj = gated.up_proj, gated.down_proj

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down_proj(torch.relu(self.up_proj(x)).square())


@pytest.fixture(scope="module")
def oracle() -> Any:
    model = tiny("youtu", **SIZES)
    for layer in model.model.layers:
        layer.mlp = _SquaredReLU(layer.mlp)
    return model


def published(oracle: Any, folder: Path, **options: Any) -> Path:
    """A folder as PLM-1.8B's is."""
    c = oracle.config
    config = {
        "architectures": ["PLMForCausalLM"],
        "attention_bias": False,
        "attention_dropout": 0.0,
        "auto_map": {"AutoModelForCausalLM": "modeling_plm.PLMForCausalLM"},
        "bos_token_id": 1,
        "eos_token_id": 2,
        "hidden_act": "relu2",
        "model_type": "plm",
        "q_lora_rank": None,
        "rope_scaling": None,
        "rope_theta": 3000.0,
        **{name: getattr(c, name) for name in _STATED},
        **options,
    }
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    tensors = {name: values.contiguous() for name, values in oracle.state_dict().items()}
    tensors.pop("lm_head.weight", None)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


_STATED = (
    *("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "rms_norm_eps"),
    *("num_attention_heads", "num_key_value_heads", "max_position_embeddings", "kv_lora_rank"),
    *("qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim", "tie_word_embeddings"),
)


def test_a_folder_has_the_logits_however_the_work_is_cut(
    oracle: Any, tmp_path: Path, load: Load
) -> None:
    expected = expected_logits(oracle, IDS)
    checkpoint = open_checkpoint(published(oracle, tmp_path))
    model = load(checkpoint)
    assert 0.5 < expected.std() < 20
    for splits in ([], [1, 40, 74]):
        assert (Paged(model).run("a", IDS, splits) - expected).abs().max() <= 1e-4
    assert checkpoint.unused() == []


def test_a_gguf_file_has_the_logits_of_the_folder(oracle: Any, tmp_path: Path, load: Load) -> None:
    checkpoint = open_checkpoint(save_gguf(tmp_path / "m.gguf", gguf_of(oracle, FACTS, arch="plm")))
    found = Paged(load(checkpoint)).run("a", IDS)
    assert (found - expected_logits(oracle, IDS)).abs().max() <= 1e-4
    assert checkpoint.unused() == []


def test_two_ranks_have_the_heads_and_the_rows_of_theirs(
    oracle: Any, tmp_path: Path, load: Load
) -> None:
    folder, expected = published(oracle, tmp_path), expected_logits(oracle, IDS)

    def work(mesh: Any) -> torch.Tensor:
        return Paged(load(open_checkpoint(folder), mesh=mesh), kv_heads=1).run("a", IDS)

    for found in Ranks(2).run(work):
        assert (found - expected).abs().max() <= 1e-4


def test_an_engine_answers_the_same_from_both_files(oracle: Any, tmp_path: Path) -> None:
    file = save_gguf(tmp_path / "m.gguf", gguf_of(oracle, FACTS, arch="plm"))
    params = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True)
    found = []
    for path in (published(oracle, tmp_path / "m"), file):
        with LLM(path, skip_tokenizer_init=True, num_threads=1, compute="exact") as llm:
            assert llm.load_warnings == ()
            [output] = llm.generate([IDS], params)
            found.append(output.outputs[0].token_ids)
    first = int(expected_logits(oracle, IDS)[-1].argmax())
    assert found[0] == found[1] and found[0][0] == first


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"hidden_act": "silu"}, "hidden_act: expected relu2, found silu"),
        ({"q_lora_rank": 16}, "q_lora_rank: expected None, found 16"),
        ({"kv_lora_rank": None}, "kv_lora_rank: expected an integer"),
    ],
)
def test_what_is_not_computed_is_refused_by_name(
    changes: dict[str, Any], words: str, oracle: Any, tmp_path: Path
) -> None:
    config = json.loads((published(oracle, tmp_path) / "config.json").read_text())
    with pytest.raises(CheckpointError, match=words):
        ModelConfig.from_dict({**config, **changes})
