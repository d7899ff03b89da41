"""A field that config.json omits has the default of transformers' config class."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import transformers

from sdk.kernels.operators.ops import Ops
from sdk.loaders.folders.hf_folder import complete_config, filled_by_transformers
from sdk.loaders.open import open_checkpoint
from sdk.models.architecture import architecture, architectures, states_everything
from sdk.models.auto import build_model
from sdk.models.configs.config import ModelConfig
from sdk.models.parallel import Mesh
from sdk.quant.errors import CheckpointError, UnsupportedError
from tests.models.conftest import Paged, expected_logits, prompt
from tests.models.sweep import configs_of, random_model

#: Of the text parts of vision models transformers has no model of their own: test_vision_text.py.
OURS = tuple(
    own.model_type
    for own in architectures()
    if own.config.causal
    and own.model_type in transformers.CONFIG_MAPPING
    and transformers.CONFIG_MAPPING[own.model_type] in transformers.MODEL_FOR_CAUSAL_LM_MAPPING
)
#: By the defaults of their classes they have layers that are not supported.
OTHER_LAYERS = ("granitemoehybrid",)


@pytest.mark.quick_cases(5)
@pytest.mark.parametrize("name", [*(name for name in OURS if name not in OTHER_LAYERS), "stablelm"])
def test_a_config_of_nothing_but_sizes_gives_transformers_logits(name: str, tmp_path: Path) -> None:
    model = random_model(configs_of(name)[0])
    model.save_pretrained(tmp_path)
    path = tmp_path / "config.json"
    defaults = transformers.CONFIG_MAPPING[name]().to_dict()
    values = json.loads(path.read_text())
    kept = {k: v for k, v in values.items() if k not in defaults or v != defaults[k]}
    assert not kept.keys() & {"tie_word_embeddings", "rms_norm_eps", "layer_norm_eps"}
    path.write_text(json.dumps({**kept, "model_type": name}))

    ops = Ops(num_threads=1, compute="exact")
    built = build_model(open_checkpoint(tmp_path), Mesh(), ops, max_model_len=256)
    found = Paged(built).run("a", prompt(41, 1))
    ops.close()
    expected = expected_logits(model, prompt(41, 1))
    assert (found - expected).abs().max() <= 2e-4 * max(1.0, float(expected.abs().max()))


#: What loaders read of a config besides what ``ModelConfig`` reads.
READ_BY_LOADERS = (
    *("eos_token_id", "head_dim", "num_key_value_heads", "tie_word_embeddings", "num_experts"),
    *("num_local_experts", "moe_intermediate_size", "intermediate_size", "vocab_size"),
)
WITHOUT_TRANSFORMERS = [
    name for name in OURS if (known := architecture(name)) is not None and known.config.stated
]


def spellings(name: str) -> list[dict[str, object]]:
    """A whole config as transformers 5 and as transformers 4 write it."""
    new = configs_of(name)[0].to_dict()
    rope = new["rope_parameters"]
    old = {**new, "rope_theta": rope["rope_theta"], "rope_scaling": None, "torch_dtype": "float32"}
    del old["rope_parameters"]
    sliding = {"use_sliding_window": True, "sliding_window": 16, "layer_types": None}
    return [new, old, *([{**old, **sliding}] if "use_sliding_window" in old else [])]


@pytest.mark.parametrize("name", WITHOUT_TRANSFORMERS)
def test_a_config_is_read_without_transformers_only_if_it_would_add_nothing(name: str) -> None:
    assert len(WITHOUT_TRANSFORMERS) > 3
    read = 0
    for whole in spellings(name):
        assert states_everything(whole)
        for key in [*whole, "nothing"]:
            for value in (None, "absent"):
                raw = {**whole, key: None}
                if value == "absent":
                    del raw[key]
                if key == "model_type" or not states_everything(raw):
                    continue
                assert complete_config(dict(raw), "here") == raw
                try:
                    filled = filled_by_transformers(dict(raw), "here")
                except CheckpointError:  # a null where transformers wants a value
                    continue
                read += 1
                assert ModelConfig.from_dict(raw) == ModelConfig.from_dict(filled), key
                for one in READ_BY_LOADERS:
                    if one != "head_dim" or raw.get(one) is not None:
                        assert raw.get(one) == filled.get(one), (key, one)
    assert read > 20


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"layer_types": ["attention", "linear"]}, "layer_types: .* found 'linear'"),
        ({"position_embedding_type": "alibi"}, "position_embedding_type: expected rope or null"),
    ],
)
def test_layers_that_granite_4_may_have_besides_are_refused_by_name(
    changed: dict[str, object], message: str
) -> None:
    sizes = {"hidden_size": 64, "num_attention_heads": 4, "num_hidden_layers": 2}
    dense = {"num_local_experts": 0, "layer_types": ["attention"] * 2, "rms_norm_eps": 1e-5}
    config = {"model_type": "granitemoehybrid", **sizes, **dense, "vocab_size": 96, **changed}
    config |= {"max_position_embeddings": 64, "intermediate_size": 128}
    with pytest.raises(UnsupportedError, match=message):
        ModelConfig.from_dict(config)
