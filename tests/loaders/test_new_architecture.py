"""A model that one new file describes is known everywhere: configs, files, shapes and writers."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import sdk.models.architectures as package
from sdk.kernels.operators.ops import Ops
from sdk.loaders.model_shapes import expected_shape
from sdk.loaders.open import open_checkpoint, read_headers
from sdk.loaders.writers.gguf_metadata import model_metadata
from sdk.models.architecture import architecture, architectures, gguf_rules
from sdk.models.auto import build_model, model_type
from sdk.models.configs.activation_type import activation_type
from sdk.models.configs.config import ModelConfig
from sdk.models.parallel import Mesh
from sdk.quant.errors import CheckpointError, UnsupportedError

Save = Callable[..., Path]
TOY = """
from sdk.models.architecture import Architecture, ConfigRules, GgufRules, LayerRules, TensorRules
from sdk.models.configs.sliding import all_but_every


def read(config, keys):
    config["logits_scaling"] = keys.number("toy.scale", 1.0)


ARCHITECTURE = Architecture(
    "toy",
    aliases=("toy_multimodal",),
    layer=LayerRules(sinks=True),
    config=ConfigRules(
        keys=("sliding_window", "sliding_window_pattern", "logits_scaling"),
        defaults={"head_dim": 8, "rope_theta": 5000.0},
        sliding=all_but_every(3),
        embedding_scale=lambda hidden: 2.0 * hidden,
    ),
    tensors=TensorRules(norms_minus_one=True),
    gguf=GgufRules(
        "toy-llm",
        tensors={"mlp.up_proj": "ffn_toy", "self_attn.sinks": "attn_toy"},
        read=read,
        write=lambda config, source: {"toy.scale": float(config["logits_scaling"])},
    ),
    wide_range=True,
)
"""
CONFIG = {
    "model_type": "toy",
    "vocab_size": 8,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "rms_norm_eps": 1e-5,
    "sliding_window": 9,
    "logits_scaling": 4.0,
}


@pytest.fixture
def toy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A folder with the file toy.py, joined to models/architectures."""
    folder = tmp_path / "architectures"
    folder.mkdir()
    (folder / "toy.py").write_text(TOY)
    monkeypatch.setattr(package, "__path__", [*package.__path__, str(folder)])
    architectures.cache_clear()
    yield
    sys.modules.pop(f"{package.__name__}.toy", None)
    architectures.cache_clear()


@pytest.fixture
def toy_file(toy: None, files: Any, save: Save) -> Path:
    model = files.llama()
    model.metadata = {
        key.replace("llama.", "toy-llm.", 1) if key.startswith("llama.") else key: value
        for key, value in model.metadata.items()
    }
    model.metadata |= {"general.architecture": (8, "toy-llm"), "toy-llm.toy.scale": (6, 4.0)}
    model.tensors["blk.0.ffn_toy.weight"] = model.tensors.pop("blk.0.ffn_up.weight")
    model.tensors["blk.0.attn_toy.weight"] = ((4,), 0, np.arange(4, dtype="<f4").tobytes())
    return save(model.build())


def test_its_configs_are_read_with_its_own_rules(toy: None) -> None:
    config = ModelConfig.from_dict({**CONFIG, "model_type": "toy_multimodal"})
    assert config.model_type == model_type({"model_type": "toy_multimodal"}) == "toy"
    assert config.sliding_windows == (9, 9, None, 9)
    assert (config.head_dim, config.ropes[0].theta, config.embedding_scale) == (8, 5000.0, 64.0)
    assert activation_type(CONFIG, torch.float16) == torch.float32


def test_its_tensors_have_shapes_by_its_facts(toy: None) -> None:
    assert expected_shape(CONFIG, "model.layers.0.self_attn.sinks") == (4,)
    assert expected_shape(CONFIG, "model.layers.0.mlp.up_proj") == (64, 32)


def test_its_gguf_files_are_opened_and_built(toy_file: Path) -> None:
    checkpoint = open_checkpoint(toy_file)
    assert read_headers(toy_file).config["model_type"] == checkpoint.config["model_type"] == "toy"
    assert checkpoint.config["logits_scaling"] == 4.0
    ops = Ops(num_threads=1)
    try:
        model: Any = build_model(checkpoint, Mesh(), ops, max_model_len=64)
    finally:
        ops.close()
    assert model.layers[0].mixers[0].sinks.tolist() == [0, 1, 2, 3]
    stored = checkpoint.tensor("model.norm.weight")  # a folder has the weight minus 1
    assert torch.equal(model.norm.weight, stored + 1.0)
    assert checkpoint.unused() == []


def test_a_wrong_shape_is_found_by_its_own_rule(toy_file: Path, files: Any) -> None:
    checkpoint = open_checkpoint(toy_file)
    checkpoint.config = {**checkpoint.config, "num_attention_heads": 8}
    with pytest.raises(CheckpointError, match=r"self_attn.sinks.*shape \[8\].*found \[4\]"):
        checkpoint.tensor("model.layers.0.self_attn.sinks")


def test_its_metadata_are_written(toy: None) -> None:
    found = model_metadata(CONFIG, "here")
    assert found["general.architecture"] == "toy-llm"
    assert found["toy-llm.toy.scale"] == 4.0
    assert found["toy-llm.attention.sliding_window"] == 9


def test_without_the_file_nothing_knows_it(files: Any, save: Save) -> None:
    assert architecture("toy") is None
    assert expected_shape(CONFIG, "model.layers.0.mlp.up_proj") is None
    model = files.llama()
    model.metadata["general.architecture"] = (8, "toy-llm")
    known = r"'toy-llm' is not known; .*, gemma3, gemma3n, gemma4, "
    with pytest.raises(UnsupportedError, match=known):
        open_checkpoint(save(model.build()))
    with pytest.raises(UnsupportedError, match=r"toy cannot be written as GGUF.*gemma2, gemma3_t"):
        model_metadata(CONFIG, "here")


def test_descriptions_name_themselves_and_are_unique() -> None:
    known = architectures()
    files = sorted(path.stem for path in Path(next(iter(package.__path__))).glob("*.py"))
    assert [own.model_type for own in known] == files
    names = [name for own in known for name in (own.model_type, *own.aliases)]
    assert len(names) == len(set(names))
    rest = [r.name for own in known for r in gguf_rules(own) if r.matches is None]
    assert len(rest) == len(set(rest))


def test_descriptions_are_read_without_torch() -> None:
    code = (
        "import sys; from sdk.models.architecture import architectures; architectures()\n"
        "print(sorted({'torch', 'numpy', 'transformers'} & set(sys.modules)))"
    )
    root = Path(__file__).parents[2]
    done = subprocess.run([sys.executable, "-c", code], cwd=root, capture_output=True, text=True)
    assert done.stdout.strip() == "[]", done.stderr
