"""SmallThinker, which transformers has no class for, against its formulae in torch: the layers of a
Qwen3 without norms of heads, whose experts are run here by the router's reading of the layer's
input."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.functional import linear, rms_norm

from sdk import LLM, SamplingParams
from sdk.loaders.open import open_checkpoint
from sdk.models.auto import quantized_online
from sdk.models.configs.config import ModelConfig
from sdk.quant.errors import CheckpointError
from tests.gguf_models import F32, U32, save_gguf
from tests.loaders.conftest import GgufBytes
from tests.models.conftest import Paged, Ranks, prompt
from tests.models.reference_decoders import attend, folder_of, gguf_of_experts, rotated
from tests.models.reference_encoders import Maker, State

Load = Callable[..., Any]
LAYERS = 5
#: As in SmallThinker 21B, but for the width of the window.
SLIDES = [0, 1, 1, 1, 0]
IDS = prompt(75, 1)


def config_of(**options: Any) -> dict[str, Any]:
    return {
        "architectures": ["SmallThinkerForCausalLM"],
        "auto_map": {"AutoModelForCausalLM": "modeling_smallthinker.SmallThinkerForCausalLM"},
        "bos_token_id": 1,
        "eos_token_id": [1, 2],
        "head_dim": 16,
        "hidden_size": 64,
        "max_position_embeddings": 256,
        "model_name": "smallthinker_21b_instruct",
        "model_type": "smallthinker",
        "moe_enable_early_router": True,
        "moe_enable_secondary_experts": False,
        "moe_ffn_hidden_size": 48,
        "moe_layer_layout": [1] * LAYERS,
        "moe_num_active_primary_experts": 3,
        "moe_num_primary_experts": 6,
        "moe_primary_router_apply_softmax": False,
        "num_attention_heads": 4,
        "num_hidden_layers": LAYERS,
        "num_key_value_heads": 2,
        "rms_norm_eps": 1e-6,
        "rope_layout": SLIDES,
        "rope_theta": 3000.0,
        "sliding_window_layout": SLIDES,
        "sliding_window_size": 9,
        "tie_word_embeddings": False,
        "vocab_size": 96,
        **options,
    }


#: Configs: that of the 21B; that of the 4B, all of whose layers rotate and see all tokens.
CONFIGS: dict[str, dict[str, Any]] = {
    "21b": config_of(),
    "4b": config_of(
        rope_layout=[1] * LAYERS,
        sliding_window_layout=[0] * LAYERS,
        moe_primary_router_apply_softmax=True,
        tie_word_embeddings=True,
    ),
}


def state_of(config: Mapping[str, Any], seed: int = 0) -> State:
    make, hidden, wide = Maker(seed), config["hidden_size"], config["moe_ffn_hidden_size"]
    heads, keys = 4 * config["head_dim"], 2 * config["head_dim"]
    make.matrix("model.embed_tokens.weight", config["vocab_size"], hidden)
    for i in range(config["num_hidden_layers"]):
        layer = f"model.layers.{i}"
        for name, rows in (("q", heads), ("k", keys), ("v", keys)):
            make.matrix(f"{layer}.self_attn.{name}_proj.weight", rows, hidden)
        make.matrix(f"{layer}.self_attn.o_proj.weight", hidden, heads)
        make.matrix(f"{layer}.block_sparse_moe.primary_router.weight", 6, hidden)
        for expert in range(config["moe_num_primary_experts"]):
            own = f"{layer}.block_sparse_moe.experts.{expert}"
            for name, shape in (("gate", (wide, hidden)), ("up", (wide, hidden))):
                make.matrix(f"{own}.{name}.weight", *shape)
            make.matrix(f"{own}.down.weight", hidden, wide)
        for name in ("input_layernorm", "post_attention_layernorm"):
            make.norm(f"{layer}.{name}", hidden)
    make.norm("model.norm", hidden)
    if not config["tie_word_embeddings"]:
        make.matrix("lm_head.weight", config["vocab_size"], hidden)
    return {name: values for name, values in make.state.items() if not name.endswith("norm.bias")}


def _attention(config: Mapping[str, Any], state: State, i: int, x: Tensor) -> Tensor:
    own, dim = f"model.layers.{i}.self_attn", config["head_dim"]
    q, k, v = (
        linear(x, state[f"{own}.{n}_proj.weight"]).unflatten(-1, (-1, dim)) for n in ("q", "k", "v")
    )
    if config["rope_layout"][i]:
        q, k = rotated(q, config["rope_theta"]), rotated(k, config["rope_theta"])
    window = config["sliding_window_size"] if config["sliding_window_layout"][i] else None
    return linear(attend(q, k, v, window), state[f"{own}.o_proj.weight"])


def _experts(config: Mapping[str, Any], state: State, i: int, x: Tensor, logits: Tensor) -> Tensor:
    own, y = f"model.layers.{i}.block_sparse_moe.experts", torch.zeros_like(x)
    best, chosen = logits.topk(config["moe_num_active_primary_experts"])
    if config["moe_primary_router_apply_softmax"]:
        shares = best.softmax(-1)
    else:
        shares = best.sigmoid() / best.sigmoid().sum(-1, keepdim=True)
    for t, row in enumerate(x):
        for share, expert in zip(shares[t], chosen[t].tolist(), strict=True):
            gate, up, down = (
                state[f"{own}.{expert}.{name}.weight"] for name in ("gate", "up", "down")
            )
            y[t] += share * (down @ (torch.relu(gate @ row) * (up @ row)))
    return y


def logits_of(config: Mapping[str, Any], state: State, ids: Sequence[int]) -> Tensor:
    """``[T, vocab]``."""

    def norm(path: str, x: Tensor) -> Tensor:
        return rms_norm(x, x.shape[-1:], state[f"{path}.weight"], config["rms_norm_eps"])

    embedding = state["model.embed_tokens.weight"]
    x = embedding[torch.tensor(ids)]
    for i in range(config["num_hidden_layers"]):
        layer = f"model.layers.{i}"
        routed = linear(x, state[f"{layer}.block_sparse_moe.primary_router.weight"])
        x = x + _attention(config, state, i, norm(f"{layer}.input_layernorm", x))
        y = norm(f"{layer}.post_attention_layernorm", x)
        x = x + _experts(config, state, i, y, routed)
    return linear(norm("model.norm", x), state.get("lm_head.weight", embedding))


_NAMES = {"block_sparse_moe.primary_router": "ffn_gate_inp"}


def gguf_of(config: Mapping[str, Any], state: State) -> GgufBytes:
    """The file that llama.cpp's converter writes."""
    softmax = config["moe_primary_router_apply_softmax"]
    facts: dict[str, tuple[int, Any]] = {
        "block_count": (U32, config["num_hidden_layers"]),
        "context_length": (U32, config["max_position_embeddings"]),
        "embedding_length": (U32, config["hidden_size"]),
        "feed_forward_length": (U32, config["moe_ffn_hidden_size"]),
        "expert_feed_forward_length": (U32, config["moe_ffn_hidden_size"]),
        "expert_count": (U32, config["moe_num_primary_experts"]),
        "expert_used_count": (U32, config["moe_num_active_primary_experts"]),
        "expert_gating_func": (U32, 1 if softmax else 2),
        "attention.head_count": (U32, config["num_attention_heads"]),
        "attention.head_count_kv": (U32, config["num_key_value_heads"]),
        "attention.key_length": (U32, config["head_dim"]),
        "attention.value_length": (U32, config["head_dim"]),
        "attention.layer_norm_rms_epsilon": (F32, config["rms_norm_eps"]),
        "rope.freq_base": (F32, config["rope_theta"]),
    }
    if any(config["sliding_window_layout"]):
        facts["attention.sliding_window"] = (U32, config["sliding_window_size"])
    return gguf_of_experts("smallthinker", facts, state, _NAMES, 6)


@pytest.mark.parametrize("name", CONFIGS)
def test_a_folder_has_the_logits_however_the_work_is_cut(
    name: str, tmp_path: Path, load: Load
) -> None:
    config = CONFIGS[name]
    state = state_of(config)
    expected = logits_of(config, state, IDS)
    checkpoint = open_checkpoint(folder_of(config, state, tmp_path))
    model = load(checkpoint)
    assert 0.5 < expected.std() < 20
    for splits in ([], [1, 40, 74]):
        assert (Paged(model).run("a", IDS, splits) - expected).abs().max() <= 1e-4
    assert checkpoint.unused() == []


@pytest.mark.parametrize("name", CONFIGS)
def test_a_gguf_file_has_the_logits_of_the_folder(name: str, tmp_path: Path, load: Load) -> None:
    config = CONFIGS[name]
    state = state_of(config)
    checkpoint = open_checkpoint(save_gguf(tmp_path / "m.gguf", gguf_of(config, state)))
    found = Paged(load(checkpoint)).run("a", IDS)
    assert (found - logits_of(config, state, IDS)).abs().max() <= 1e-4
    assert checkpoint.unused() == []


def test_the_router_reads_what_enters_the_layer(tmp_path: Path, load: Load) -> None:
    """With one that reads what experts read the logits are others."""
    config = CONFIGS["4b"]
    state = state_of(config)
    model = load(open_checkpoint(folder_of(config, state, tmp_path)))
    for layer in model.layers:
        layer.early = None
    found = Paged(model).run("a", IDS)
    assert (found - logits_of(config, state, IDS)).abs().max() > 0.1


def test_two_ranks_have_the_same_logits(tmp_path: Path, load: Load) -> None:
    config = CONFIGS["21b"]
    state = state_of(config)
    folder, expected = folder_of(config, state, tmp_path), logits_of(config, state, IDS)

    def work(mesh: Any) -> Tensor:
        return Paged(load(open_checkpoint(folder), mesh=mesh), kv_heads=1).run("a", IDS)

    for found in Ranks(2).run(work):
        assert (found - expected).abs().max() <= 1e-4


def test_the_plan_knows_that_routers_stay_in_float(tmp_path: Path) -> None:
    config = CONFIGS["21b"]
    checkpoint = open_checkpoint(folder_of(config, state_of(config), tmp_path))
    entries = quantized_online(checkpoint, "int8").entries()
    packed = {one.name.rpartition("layers.0.")[2] for one in entries if one.packed is not None}
    assert "block_sparse_moe.experts.0.gate.weight" in packed
    assert "block_sparse_moe.primary_router.weight" not in packed


@pytest.mark.parametrize("quantization", [None, "rtn-w8s"])
def test_an_engine_answers_the_same_alone_and_in_a_batch(
    quantization: str | None, tmp_path: Path
) -> None:
    """Recorded steps, chunks, hits and packed experts."""
    config = CONFIGS["21b"]
    state = state_of(config)
    folder_of(config, state, tmp_path)
    ids = [prompt(30 + 9 * i, i) for i in range(4)]
    params = SamplingParams(temperature=0.0, max_tokens=10, ignore_eos=True)
    options: dict[str, Any] = {"skip_tokenizer_init": True, "num_threads": 1, "compute": "exact"}
    sizes = {"max_num_batched_tokens": 16, "max_num_seqs": 8}
    with LLM(tmp_path, quantization=quantization, **sizes, **options) as llm:
        together = [one.outputs[0].token_ids for one in llm.generate(ids, params)]
        alone = [llm.generate([one], params)[0].outputs[0].token_ids for one in ids]
        assert llm.load_warnings == ()
    assert together == alone and len({tuple(one) for one in alone}) > 1
    if quantization is None:
        firsts = [int(logits_of(config, state, one)[-1].argmax()) for one in ids]
        assert [one[0] for one in alone] == firsts


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"moe_enable_early_router": False}, "moe_enable_early_router: expected True, found False"),
        ({"moe_enable_secondary_experts": True}, "moe_enable_secondary_experts: expected False"),
        ({"moe_layer_layout": [0, 1, 1, 1, 1]}, "moe_layer_layout: expected 1 for each layer"),
        ({"rope_layout": [1, 1]}, r"rope_layout: expected a list of 0 or 1 for each of 5 layers"),
        ({"sliding_window_layout": [2] * 5}, "sliding_window_layout: expected a list of 0 or 1"),
        ({"moe_num_primary_experts": 0}, "num_local_experts: expected an integer"),
    ],
)
def test_what_is_not_computed_is_refused_by_name(changes: dict[str, Any], words: str) -> None:
    with pytest.raises(CheckpointError, match=words):
        ModelConfig.from_dict(config_of(**changes))
