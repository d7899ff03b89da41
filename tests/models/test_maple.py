"""Maple, which transformers has no class for, against its formulae in torch."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.functional import linear, rms_norm, silu

from sdk import LLM, SamplingParams
from sdk.loaders.open import open_checkpoint
from sdk.models.configs.config import ModelConfig
from sdk.quant.errors import CheckpointError
from tests.gguf_models import ARRAY, BOOL, F32, U32, save_gguf
from tests.loaders.conftest import GgufBytes
from tests.models.conftest import Paged, Ranks, prompt
from tests.models.reference_decoders import attend, folder_of, gguf_of_experts, rotated
from tests.models.reference_encoders import Maker, State

Load = Callable[..., Any]
KINDS = [*["sliding_attention"] * 3, "full_attention", "sliding_attention"]
EXPERTS, IDS = 6, prompt(75, 1)


def config_of(**options: Any) -> dict[str, Any]:
    return {
        "architectures": ["MapleForCausalLM"],
        "attention_dropout": 0.0,
        "auto_map": {"AutoModelForCausalLM": "modeling_maple.MapleForCausalLM"},
        "bos_token_id": 1,
        "eos_token_id": 2,
        "head_dim": 16,
        "hidden_act": "silu",
        "hidden_size": 64,
        "intermediate_size": 128,
        "layer_types": KINDS,
        "max_position_embeddings": 256,
        "model_type": "maple",
        "moe_intermediate_size": 48,
        "moe_router_enable_expert_bias": False,
        "nope_on_global_attention": True,
        "norm_topk_prob": True,
        "num_attention_heads": 4,
        "num_experts": EXPERTS,
        "num_experts_per_tok": 3,
        "num_hidden_layers": len(KINDS),
        "num_key_value_heads": 2,
        "num_shared_experts": 0,
        "partial_rotary_factor": 0.5,
        "rms_norm_eps": 1e-6,
        "rope_theta": 3000.0,
        "sliding_window": 9,
        "tie_word_embeddings": False,
        "use_bias": False,
        "use_qk_norm": True,
        "vocab_size": 96,
        **options,
    }


def state_of(config: Mapping[str, Any], seed: int = 0) -> State:
    """``up`` and ``gate`` have large rows: of both about a seventh is beyond the clamp."""
    make, hidden, wide = Maker(seed), config["hidden_size"], config["moe_intermediate_size"]
    make.matrix("model.word_embeddings.weight", config["vocab_size"], hidden)
    for i in range(config["num_hidden_layers"]):
        layer = f"model.layers.{i}"
        for name, heads in (("q", 4), ("k", 2), ("v", 2)):
            make.matrix(f"{layer}.self_attn.{name}_proj.weight", heads * 16, hidden)
        make.matrix(f"{layer}.self_attn.o_proj.weight", hidden, 64)
        for name in ("q_norm", "k_norm"):
            make.norm(f"{layer}.self_attn.{name}", 16)
        make.matrix(f"{layer}.mlp.gate.weight", EXPERTS, hidden)
        for expert in range(EXPERTS):
            own = f"{layer}.mlp.experts.{expert}"
            for name in ("gate", "up"):
                make.matrix(f"{own}.{name}_proj.weight", wide, hidden)
                make.state[f"{own}.{name}_proj.weight"] *= 3
            make.matrix(f"{own}.down_proj.weight", hidden, wide)
            make.state[f"{own}.down_proj.weight"] *= 0.1
        for name in ("input_layernorm", "post_attention_layernorm"):
            make.norm(f"{layer}.{name}", hidden)
    make.norm("model.norm", hidden)
    make.matrix("lm_head.weight", config["vocab_size"], hidden)
    return {name: values for name, values in make.state.items() if not name.endswith("norm.bias")}


class Reference:
    """The model in torch; ``clamped``: how many of the values that enter an activation are."""

    def __init__(self, config: Mapping[str, Any], state: State) -> None:
        self.config, self.state = config, state
        self.clamped: list[float] = []

    def _norm(self, path: str, x: Tensor) -> Tensor:
        eps = self.config["rms_norm_eps"]
        return rms_norm(x, x.shape[-1:], self.state[f"{path}.weight"], eps)

    def _attention(self, i: int, x: Tensor) -> Tensor:
        own, c = f"model.layers.{i}.self_attn", self.config
        q, k, v = (
            linear(x, self.state[f"{own}.{n}_proj.weight"]).unflatten(-1, (-1, 16)) for n in "qkv"
        )
        q, k = self._norm(f"{own}.q_norm", q), self._norm(f"{own}.k_norm", k)
        slides = c["layer_types"][i] == "sliding_attention"
        if slides or not c["nope_on_global_attention"]:
            q, k = (rotated(one, c["rope_theta"], 8) for one in (q, k))
        y = attend(q, k, v, c["sliding_window"] if slides else None)
        return linear(y, self.state[f"{own}.o_proj.weight"])

    def _experts(self, i: int, x: Tensor) -> Tensor:
        own, y = f"model.layers.{i}.mlp", torch.zeros_like(x)
        shares = linear(x, self.state[f"{own}.gate.weight"]).softmax(-1)
        best, chosen = shares.topk(self.config["num_experts_per_tok"])
        best = best / best.sum(-1, keepdim=True)
        for t, row in enumerate(x):
            for share, expert in zip(best[t], chosen[t].tolist(), strict=True):
                path = f"{own}.experts.{expert}"
                gate, up, down = (
                    self.state[f"{path}.{name}_proj.weight"] for name in ("gate", "up", "down")
                )
                opened = gate @ row
                self.clamped.append(float((opened > 7).float().mean()))
                wide = silu(opened.clamp(max=7.0)) * (up @ row).clamp(-7.0, 7.0)
                y[t] += share * (down @ wide)
        return y

    def logits(self, ids: Sequence[int]) -> Tensor:
        """``[T, vocab]``."""
        x = self.state["model.word_embeddings.weight"][torch.tensor(ids)]
        for i in range(self.config["num_hidden_layers"]):
            layer = f"model.layers.{i}"
            x = x + self._attention(i, self._norm(f"{layer}.input_layernorm", x))
            x = x + self._experts(i, self._norm(f"{layer}.post_attention_layernorm", x))
        return linear(self._norm("model.norm", x), self.state["lm_head.weight"])


_NAMES = {
    "word_embeddings": "token_embd",
    "mlp.gate": "ffn_gate_inp",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
}


def gguf_of(config: Mapping[str, Any], state: State) -> GgufBytes:
    """The file that llama.cpp's converter writes."""
    layers = config["num_hidden_layers"]
    slides = [kind == "sliding_attention" for kind in config["layer_types"]]
    facts: dict[str, tuple[int, Any]] = {
        "block_count": (U32, layers),
        "context_length": (U32, config["max_position_embeddings"]),
        "embedding_length": (U32, config["hidden_size"]),
        "feed_forward_length": (U32, config["intermediate_size"]),
        "expert_feed_forward_length": (U32, config["moe_intermediate_size"]),
        "expert_count": (U32, EXPERTS),
        "expert_used_count": (U32, config["num_experts_per_tok"]),
        "attention.head_count": (U32, config["num_attention_heads"]),
        "attention.head_count_kv": (U32, config["num_key_value_heads"]),
        "attention.key_length": (U32, config["head_dim"]),
        "attention.value_length": (U32, config["head_dim"]),
        "attention.layer_norm_rms_epsilon": (F32, config["rms_norm_eps"]),
        "attention.sliding_window": (U32, config["sliding_window"]),
        "attention.sliding_window_pattern": (ARRAY, (BOOL, slides)),
        "rope.freq_base": (F32, config["rope_theta"]),
        "rope.dimension_count": (U32, 8),
        "swiglu_clamp_exp": (ARRAY, (F32, [7.0] * layers)),
    }
    return gguf_of_experts("maple", facts, state, _NAMES, EXPERTS)


@pytest.mark.parametrize("still", [True, False])
def test_a_folder_has_the_logits_however_the_work_is_cut(
    still: bool, tmp_path: Path, load: Load
) -> None:
    config = config_of(nope_on_global_attention=still)
    reference = Reference(config, state_of(config))
    expected = reference.logits(IDS)
    assert 0.5 < expected.std() < 20
    assert 0.05 < sum(reference.clamped) / len(reference.clamped) < 0.5
    checkpoint = open_checkpoint(folder_of(config, reference.state, tmp_path))
    model = load(checkpoint)
    for splits in ([], [1, 40, 74]):
        assert (Paged(model).run("a", IDS, splits) - expected).abs().max() <= 1e-4
    assert checkpoint.unused() == []


def test_a_gguf_file_has_the_logits_of_the_folder(tmp_path: Path, load: Load) -> None:
    config = config_of()
    reference = Reference(config, state_of(config))
    file = gguf_of(config, reference.state)
    checkpoint = open_checkpoint(save_gguf(tmp_path / "m.gguf", file))
    found = Paged(load(checkpoint)).run("a", IDS)
    assert (found - reference.logits(IDS)).abs().max() <= 1e-4
    assert checkpoint.unused() == []
    del file.metadata["maple.swiglu_clamp_exp"]
    with pytest.raises(CheckpointError, match="swiglu_clamp_exp"):
        open_checkpoint(save_gguf(tmp_path / "m.gguf", file))


def test_two_ranks_have_the_same_logits(tmp_path: Path, load: Load) -> None:
    config = config_of()
    reference = Reference(config, state_of(config))
    folder, expected = folder_of(config, reference.state, tmp_path), reference.logits(IDS)

    def work(mesh: Any) -> Tensor:
        return Paged(load(open_checkpoint(folder), mesh=mesh), kv_heads=1).run("a", IDS)

    for found in Ranks(2).run(work):
        assert (found - expected).abs().max() <= 1e-4


def test_an_engine_answers_the_same_alone_and_in_a_batch(tmp_path: Path) -> None:
    config = config_of()
    reference = Reference(config, state_of(config))
    folder_of(config, reference.state, tmp_path)
    ids = [prompt(30 + 9 * i, i) for i in range(4)]
    params = SamplingParams(temperature=0.0, max_tokens=10, ignore_eos=True)
    options: dict[str, Any] = {"skip_tokenizer_init": True, "num_threads": 1, "compute": "exact"}
    with LLM(tmp_path, max_num_batched_tokens=16, max_num_seqs=8, **options) as llm:
        together = [one.outputs[0].token_ids for one in llm.generate(ids, params)]
        alone = [llm.generate([one], params)[0].outputs[0].token_ids for one in ids]
        assert llm.load_warnings == ()
    assert together == alone and len({tuple(one) for one in alone}) > 1
    firsts = [int(reference.logits(one)[-1].argmax()) for one in ids]
    assert [one[0] for one in alone] == firsts


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"num_shared_experts": 1}, "num_shared_experts: expected 0, found 1"),
        ({"use_qk_norm": False}, "use_qk_norm: expected True, found False"),
        ({"hidden_act": "gelu"}, "hidden_act: expected silu, found gelu"),
        ({"moe_router_enable_expert_bias": True}, "enable_expert_bias: expected False"),
        ({"swiglu_limits": [0.2] * 5}, "swiglu_limits: expected clamps of 1 or more, found 0.2"),
        ({"layer_types": KINDS[:3]}, "layer_types: expected a list of 5 names"),
    ],
)
def test_what_is_not_computed_is_refused_by_name(changes: dict[str, Any], words: str) -> None:
    with pytest.raises(CheckpointError, match=words):
        ModelConfig.from_dict(config_of(**changes))
