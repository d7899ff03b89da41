"""Architectures without a file of their own run through transformers on our pages and linears."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from sdk.kernels.operators.ops import Ops
from sdk.kernels.weights.layouts import Affine
from sdk.models.parallel import Mesh
from sdk.models.transformers_code.backend import ATTENTION_NAME, HFModel, build_hf_model
from sdk.quant.errors import CheckpointError, UnsupportedError
from sdk.quant.weight import Weight, weight_of
from tests.models.conftest import (
    DictCheckpoint,
    Paged,
    checkpoint_of,
    expected_logits,
    prompt,
    tiny,
)
from tests.models.sweep import outcome

#: Attention biases, partial rotation, layer norms, clipping, windows, parallel blocks, learned
#: positions, Conv1D, interleaved rotation, logit scales, experts, sinks.
OTHERS: dict[str, dict[str, Any]] = {
    "stablelm": {"partial_rotary_factor": 0.5, "use_qkv_bias": True},
    "gpt_neox": {"num_key_value_heads": 4},
    "starcoder2": {"sliding_window": 9},
    "olmo": {"clip_qkv": 2.0},
    "cohere": {"logit_scale": 0.5},
    "cohere2": {"logit_scale": 1.0, "sliding_window": 7, "num_hidden_layers": 5},
    "gpt2": {"num_key_value_heads": 4, "n_inner": 128},
    "opt": {"num_key_value_heads": 4, "ffn_dim": 128, "word_embed_proj_dim": 64},
    "phi": {},
    "mellum": {"num_experts": 4, "num_experts_per_tok": 2},
    "granite_swa": {"sliding_window": 8},
}


#: Of models that have code of their own, too, as their files are.
_stored = partial(checkpoint_of, stored=True)


@pytest.fixture
def load(ops: Ops) -> Callable[..., Any]:
    """As the fixture of the other tests, but always through transformers' code: models get code of
    the library's own over time."""

    def load(source: Any, mesh: Mesh | None = None) -> Any:
        checkpoint = source if hasattr(source, "unused") else _stored(source)
        return build_hf_model(checkpoint, checkpoint.config, mesh or Mesh(), ops)

    return load


@pytest.mark.quick_cases(5)
@pytest.mark.parametrize("name", OTHERS)
def test_logits_match_transformers_in_one_prefill_in_chunks_and_in_a_batch(
    name: str, load: Callable[..., Any]
) -> None:
    oracle = tiny(name, **OTHERS[name])
    checkpoint = _stored(oracle)
    model = load(checkpoint)
    assert isinstance(model, HFModel)
    assert checkpoint.unused() == []
    ids, other = prompt(41, 1), prompt(30, 2)
    expected = expected_logits(oracle, ids)
    assert 0.1 < expected.std() < 20
    whole = Paged(model).run("a", ids)
    assert (whole - expected).abs().max() <= 1e-4

    chunked = Paged(model).run("a", ids, [3, 17, 38, 39, 40])
    batch = Paged(model)
    first = batch.step({"b": other[:20], "a": ids[:21]})["a"]
    second = batch.step({"a": ids[21:40], "b": other[20:]})["a"]
    third = batch.step({"a": ids[40:]})["a"]
    batched = torch.cat((first, second, third))
    for found in (chunked, batched):
        if name == "mellum":  # the product of transformers' own router depends on the batch
            assert (found - expected).abs().max() <= 1e-4
        else:
            assert torch.equal(found, whole)


@pytest.mark.parametrize("name", ["axk1", "sarvam_mla", "nanochat"])
def test_a_saved_folder_agrees_with_transformers(name: str, tmp_path: Path) -> None:
    # Latent attention with experts; looked-up rotations; norms without weights.
    assert outcome(name, tmp_path) == "transformers"


def test_a_mask_of_a_models_own_is_refused_not_ignored(tmp_path: Path) -> None:
    assert "'doge': its attention has a mask of its own" in outcome("doge", tmp_path)


def test_experts_stay_packed_and_are_multiplied_as_one(load: Callable[..., Any]) -> None:
    model = load(tiny("mellum", num_experts=4, num_experts_per_tok=2, moe_intermediate_size=128))
    experts = dict(model.linears())["model.layers.1.mlp.experts.gate_up_proj"]
    assert experts.weight.shape == (4 * 256, 64)
    assert experts.weight._grouped is not None
    assert not [name for name, p in model._body.named_parameters() if p.dim() == 3]


def test_linears_are_ours_and_named_as_in_the_checkpoint(load: Callable[..., Any]) -> None:
    model = load(tiny("stablelm"))
    names = dict(model.linears())
    assert len(names) == 3 * 6 + 1
    assert names["model.layers.2.mlp.down_proj"].weight.shape == (64, 128)
    gate_up = names["model.layers.2.mlp.gate_up_proj"]  # one product, as in our own layers
    assert gate_up.weight.shape == (256, 64)
    assert {part.path.rpartition(".")[2] for part in gate_up.parts} == {
        *("gate_proj", "up_proj", "gate_up_proj")
    }
    assert all(linear.weight.choices() for linear in names.values())


def test_a_tied_head_shares_the_weight_of_the_embedding(load: Callable[..., Any]) -> None:
    model = load(tiny("cohere", tie_word_embeddings=True))
    weight = dict(model.linears())["lm_head"].weight
    assert model._body.embed_tokens.packed is weight


def test_embeddings_can_be_given_instead_of_ids(load: Callable[..., Any]) -> None:
    oracle = tiny("stablelm")
    model = load(oracle)
    ids = prompt(9, 3)
    expected = Paged(model).run("a", ids)
    embedded = oracle.get_input_embeddings()(torch.tensor(ids)).detach()
    assert torch.equal(model.embed(torch.tensor(ids)), embedded)
    assert torch.equal(Paged(model).step({"a": embedded})["a"], expected)


def test_the_registered_attention_leaves_the_hosts_models_alone(load: Callable[..., Any]) -> None:
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    oracle = tiny("stablelm")
    before = set(ALL_ATTENTION_FUNCTIONS) - {ATTENTION_NAME}
    expected, random = expected_logits(oracle, [5, 6, 7]), torch.random.get_rng_state()
    register, dtype = nn.Module.register_parameter, torch.get_default_dtype()
    load(oracle)
    assert set(ALL_ATTENTION_FUNCTIONS) - {ATTENTION_NAME} == before
    assert torch.equal(expected_logits(oracle, [5, 6, 7]), expected)
    assert nn.Module.register_parameter is register
    assert torch.get_default_dtype() == dtype
    assert torch.equal(torch.random.get_rng_state(), random)


@pytest.mark.parametrize(
    ("config", "error", "words"),
    [
        ({"model_type": "no_such_model"}, UnsupportedError, "'no_such_model'.*newer transformers"),
        ({"model_type": "vit"}, UnsupportedError, "'vit': a model of images, which does not run"),
        ({"model_type": "stablelm", "hidden_size": "x"}, CheckpointError, "rejects it"),
        ({"model_type": "stablelm", "num_hidden_layers": 10**9}, CheckpointError, "1..512"),
        ({"model_type": "bloom"}, UnsupportedError, "'bloom'.*code of its own.*paged KV cache"),
        ({"model_type": "falcon"}, UnsupportedError, "'falcon'.*code of its own"),
        ({"model_type": "bert"}, UnsupportedError, "'bert' .is_decoder is false.: an encoder"),
        ({"model_type": "t5"}, UnsupportedError, "'t5': an encoder-decoder"),
        (
            {
                "model_type": "qwen2_moe",
                "num_hidden_layers": 2,
                "use_sliding_window": True,
                "sliding_window": 0,
                "layer_types": ["sliding_attention"] * 2,
            },
            CheckpointError,
            "sliding_window of at least 1",
        ),
        (
            {
                "model_type": "mellum",
                "num_hidden_layers": 1,
                "layer_types": ["linear_attention"],
            },
            UnsupportedError,
            "layer_types: expected full_attention or sliding_attention, found 'linear_attention'",
        ),
    ],
)
def test_what_cannot_run_is_refused_by_name(
    config: dict[str, Any], error: type[Exception], words: str, load: Callable[..., Any]
) -> None:
    with pytest.raises(error, match=words):
        load(DictCheckpoint(config, {}))


def test_attention_of_another_shape_than_the_config_says_is_refused(
    load: Callable[..., Any],
) -> None:
    oracle = tiny("persimmon", num_key_value_heads=4)
    checkpoint = _stored(oracle)
    checkpoint.config["num_key_value_heads"] = 2
    with pytest.raises(UnsupportedError, match=r"layer 0: expected key heads .* \(2, 16\).*4, 16"):
        load(checkpoint)


def test_more_than_one_rank_is_refused(load: Callable[..., Any]) -> None:
    class Unused:
        pass

    with pytest.raises(UnsupportedError, match="expected tensor_parallel_size=1, found 2"):
        load(tiny("stablelm"), mesh=Mesh(0, 2, Unused()))  # type: ignore[arg-type]


def test_a_gpt_neox_file_calls_its_head_embed_out(load: Callable[..., Any]) -> None:
    oracle = tiny("gpt_neox", num_key_value_heads=4)
    checkpoint = _stored(oracle)
    checkpoint.tensors["embed_out.weight"] = checkpoint.tensors.pop("lm_head.weight")
    found = Paged(load(checkpoint)).run("a", [5, 6, 7])
    assert (found - expected_logits(oracle, [5, 6, 7])).abs().max() <= 1e-4


def test_a_body_saved_alone_has_no_prefix(load: Callable[..., Any]) -> None:
    oracle = tiny("gpt2", num_key_value_heads=4, n_inner=128)
    checkpoint = _stored(oracle)
    named = checkpoint.tensors.items()
    checkpoint.tensors = {name.removeprefix("transformer."): t for name, t in named}
    found = Paged(load(checkpoint)).run("a", [5, 6, 7])
    assert (found - expected_logits(oracle, [5, 6, 7])).abs().max() <= 1e-4


def test_quantizers_write_gpt_2s_matrices_as_all_others(load: Callable[..., Any]) -> None:
    class Quantized(DictCheckpoint):
        """``c_proj`` as 8-bit integers ``[out, in]``, nearly its values."""

        def weight(self, name: str) -> Weight:
            if not name.endswith("attn.c_proj"):
                return super().weight(name)
            values = self._take(f"{name}.weight").t()
            scale = values.abs().amax(dim=1, keepdim=True) / 127
            codes = (values / scale).round().to(torch.int8).view(torch.uint8).contiguous()
            shape = (values.shape[0], values.shape[1])
            return weight_of(Affine(shape, 8, shape[1], codes, scale, signed=True))

    oracle = tiny("gpt2", num_key_value_heads=4, n_inner=128)
    plain = _stored(oracle)
    expected = expected_logits(oracle, [5, 6, 7])
    found = Paged(load(Quantized(plain.config, plain.tensors))).run("a", [5, 6, 7])
    assert (found - expected).norm() < 0.03 * expected.norm()
    name = "transformer.h.0.attn.c_proj.weight"
    plain.tensors[name] = plain.tensors[name][:, :32].clone()
    with pytest.raises(CheckpointError, match=r"c_proj: expected shape \[64, 64\], found \[32, 64"):
        load(plain)


def test_experts_stored_one_by_one_are_refused(load: Callable[..., Any]) -> None:
    checkpoint = _stored(tiny("mellum", num_experts=2, num_experts_per_tok=1, num_hidden_layers=1))
    del checkpoint.tensors["model.layers.0.mlp.experts.gate_up_proj"]
    with pytest.raises(UnsupportedError, match=r"mlp\.experts.gate_up_proj: .*one by one"):
        load(checkpoint)


def test_the_model_does_not_keep_the_checkpoint_open(load: Callable[..., Any]) -> None:
    import gc
    import weakref

    checkpoint = _stored(tiny("stablelm"))
    model, watched = load(checkpoint), weakref.ref(checkpoint)
    del checkpoint
    gc.collect()
    assert watched() is None
    assert model.config.num_layers == 3


def test_a_missing_or_misshapen_tensor_is_named(load: Callable[..., Any]) -> None:
    for name in ("model.layers.1.self_attn.q_proj.weight", "model.norm.bias"):
        checkpoint = _stored(tiny("stablelm"))
        tensor = checkpoint.tensors.pop(name)
        with pytest.raises(CheckpointError, match=name.removesuffix(".weight")):
            load(checkpoint)
        checkpoint.tensors[name] = torch.cat((tensor, tensor))
        with pytest.raises(CheckpointError, match=r"expected shape \[64.*found \[128"):
            load(checkpoint)
