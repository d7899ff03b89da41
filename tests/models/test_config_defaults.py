"""A field that config.json omits has the default of transformers' config class."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import transformers

from sdk.kernels.ops import Ops
from sdk.loaders.open import open_checkpoint
from sdk.models.auto import build_model
from sdk.models.parallel import Mesh
from tests.models.conftest import Paged, expected_logits, prompt
from tests.models.sweep import config_of, random_model

OURS = (
    *("llama", "mistral", "qwen2", "qwen3", "gemma2", "gemma3_text", "phi3", "olmo2"),
    *("granite", "mixtral", "qwen3_moe", "gpt_oss"),
)


@pytest.mark.parametrize("name", [*OURS, "gemma"])
def test_a_config_of_nothing_but_sizes_gives_transformers_logits(name: str, tmp_path: Path) -> None:
    model = random_model(config_of(name))
    model.save_pretrained(tmp_path)
    path = tmp_path / "config.json"
    defaults = transformers.CONFIG_MAPPING[name]().to_dict()
    values = json.loads(path.read_text())
    kept = {k: v for k, v in values.items() if k not in defaults or v != defaults[k]}
    assert "tie_word_embeddings" not in kept and "rms_norm_eps" not in kept
    path.write_text(json.dumps({**kept, "model_type": name}))

    ops = Ops(num_threads=1, compute="exact")
    built = build_model(open_checkpoint(tmp_path), Mesh(), ops, max_model_len=256)
    found = Paged(built).run("a", prompt(41, 1))
    ops.close()
    expected = expected_logits(model, prompt(41, 1))
    assert (found - expected).abs().max() <= 2e-4 * max(1.0, float(expected.abs().max()))
