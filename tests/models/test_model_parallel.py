"""Tensor parallelism: how heads, MLP and vocabulary are cut, and that the cut models agree."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from sdk.kernels.weights.layouts import Affine
from sdk.models.parallel import Mesh
from sdk.quant.errors import AlignmentError
from sdk.quant.weight import AffineWeight, Weight
from tests.models.conftest import DictCheckpoint, Paged, Ranks, checkpoint_of, prompt, tiny
from tests.models.tiny_architectures import ARCHITECTURES


class NoGroup:
    """A group nothing may be sent over."""

    def all_reduce(self, x: Tensor) -> None:
        raise AssertionError

    def all_gather(self, x: Tensor) -> list[Tensor]:
        raise AssertionError


def mesh(rank: int, size: int) -> Mesh:
    return Mesh(rank, size, NoGroup())


def joined(runs: list[tuple[int, int]]) -> list[int]:
    return [i for start, count in runs for i in range(start, start + count)]


@pytest.mark.parametrize(
    ("heads", "kv_heads", "size"), [(9, 3, 2), (8, 8, 3), (32, 8, 4), (6, 3, 3)]
)
def test_ranks_own_every_head_once_with_its_key_head(heads: int, kv_heads: int, size: int) -> None:
    shards = [mesh(rank, size).heads(heads, kv_heads) for rank in range(size)]
    assert joined([(s.start, s.count) for s in shards]) == list(range(heads))
    assert joined([(s.kv_start, s.kv_count) for s in shards]) == list(range(kv_heads))
    for s in shards:
        assert s.start == s.kv_start * (heads // kv_heads)
        assert s.kv_copies == 1


def test_a_key_head_is_copied_when_there_are_fewer_than_ranks() -> None:
    shards = [mesh(rank, 4).heads(8, 2) for rank in range(4)]
    assert [(s.start, s.count) for s in shards] == [(0, 2), (2, 2), (4, 2), (6, 2)]
    assert [(s.kv_start, s.kv_count, s.kv_copies) for s in shards] == [
        (0, 1, 2),
        (0, 1, 2),
        (1, 1, 2),
        (1, 1, 2),
    ]


@pytest.mark.parametrize(("heads", "kv_heads", "size"), [(9, 3, 4), (9, 1, 2)])
def test_heads_that_cannot_be_dealt_out_are_refused(heads: int, kv_heads: int, size: int) -> None:
    with pytest.raises(AlignmentError, match=f"{heads} query and {kv_heads} key/value heads"):
        mesh(0, size).heads(heads, kv_heads)


@pytest.mark.parametrize(
    ("width", "size", "unit"), [(1536, 2, 256), (768, 2, 256), (160, 4, 32), (250, 2, 2), (7, 3, 1)]
)
def test_an_mlp_is_cut_at_multiples_of_the_largest_unit(width: int, size: int, unit: int) -> None:
    runs = [mesh(rank, size).columns(width) for rank in range(size)]
    assert joined(runs) == list(range(width))
    assert all(start % unit == 0 and count for start, count in runs)


def test_a_vocabulary_is_cut_in_equal_runs_but_the_last() -> None:
    assert [mesh(rank, 3).vocabulary(97) for rank in range(3)] == [(0, 33), (33, 33), (66, 31)]


def test_what_is_too_small_to_cut_is_refused() -> None:
    with pytest.raises(AlignmentError, match="cannot split 3 features over 4 ranks"):
        mesh(0, 4).columns(3)
    with pytest.raises(AlignmentError, match="cannot split a vocabulary of 4 over 3 ranks"):
        mesh(0, 3).vocabulary(4)


def test_a_mesh_checks_its_place() -> None:
    with pytest.raises(ValueError, match=r"expected a rank in 0\.\.1, found 2"):
        mesh(2, 2)
    with pytest.raises(ValueError, match="2 ranks need a group"):
        Mesh(0, 2)


#: Uneven heads, copied key heads, joined files, norms over the whole width, biases, soft caps.
CUT: dict[str, tuple[str, int, dict[str, Any]]] = {
    "llama": ("llama", 2, {}),
    "uneven": (
        "llama",
        2,
        {"hidden_size": 48, "num_attention_heads": 6, "num_key_value_heads": 3, "vocab_size": 97},
    ),
    "copied": ("llama", 4, {"tie_word_embeddings": True, "attention_bias": True, "mlp_bias": True}),
    "qwen2": ("qwen2", 2, {}),
    "qwen3": ("qwen3", 2, {}),
    "phi3": ("phi3", 2, {}),
    "olmo2": ("olmo2", 2, {}),
    "olmo2-copied": ("olmo2", 4, {}),
    "smollm3": ("smollm3", 2, {"no_rope_layer_interval": 2}),
    "glm4": ("glm4", 4, {"head_dim": 24}),
    "hunyuan": ("hunyuan_v1_dense", 2, {"attention_bias": True}),
    "granite_swa": ("granite_swa", 4, {"sliding_window": 9}),
    "olmoe": ("olmoe", 2, {"num_experts": 5, "num_experts_per_tok": 2}),
    "granite": ("granite", 2, {"logits_scaling": 2.0, "residual_multiplier": 0.5}),
    "gemma2": ("gemma2", 2, {"sliding_window": 9}),
    "gemma3": ("gemma3_text", 2, {"num_key_value_heads": 1, "sliding_window": 8}),
    "cohere": ("cohere", 2, {"use_qk_norm": True, "logit_scale": 0.5}),
    "stablelm": ("stablelm", 4, {"use_parallel_residual": True, "qk_layernorm": True}),
    "phi": ("phi", 2, {"vocab_size": 97}),
    "nemotron": ("nemotron", 2, {"mlp_bias": True}),
    "bitnet": ("bitnet", 2, {}),
    "apertus": ("apertus", 2, {}),
    "olmo": ("olmo", 2, {"clip_qkv": 1.5}),
    "mixtral": ("mixtral", 2, {"num_local_experts": 5}),
    "qwen3_moe": (
        "qwen3_moe",
        2,
        {"num_experts": 6, "num_experts_per_tok": 3, "moe_intermediate_size": 96},
    ),
    "qwen2_moe": ("qwen2_moe", 2, ARCHITECTURES["qwen2_moe"]),
    "dots1": ("dots1", 4, ARCHITECTURES["dots1"]),
    "ernie4_5_moe": ("ernie4_5_moe", 2, ARCHITECTURES["ernie4_5_moe"]),
    "afmoe": ("afmoe", 2, ARCHITECTURES["afmoe"]),
    "cohere2_moe": ("cohere2_moe", 4, ARCHITECTURES["cohere2_moe"]),
    "gpt_oss": ("gpt_oss", 4, {"num_local_experts": 6, "num_experts_per_tok": 3}),
    "laguna": ("laguna", 2, ARCHITECTURES["laguna"]),
    "latent": ("deepseek_v3", 2, ARCHITECTURES["deepseek_v3"]),
    "latent-lite": ("deepseek_v2", 4, ARCHITECTURES["deepseek_v2-lite"]),
    **{
        name: (name.split("-")[0], 2, ARCHITECTURES[name])
        for name in (
            *("lfm2-biased", "qwen3_5_text", "qwen3_next", "granitemoehybrid-experts"),
            *("nemotron_h-latent", "falcon_h1", "olmo_hybrid-rotated"),
        )
    },
    "gptj": ("gptj", 4, {"rotary_dim": 8}),
    "opt-350m": ("opt", 2, ARCHITECTURES["opt-350m"]),
}


@pytest.mark.quick_cases(9)
@pytest.mark.parametrize("case", CUT)
def test_ranks_together_give_the_tokens_and_logits_of_one(
    case: str, load: Callable[..., Any]
) -> None:
    name, size, options = CUT[case]
    checkpoint = checkpoint_of(tiny(name, **options))
    ids = prompt(37, 8)
    expected = Paged(load(checkpoint)).run("a", ids, [20])

    def work(own: Mesh) -> Tensor:
        model = load(DictCheckpoint(checkpoint.config, checkpoint.tensors), mesh=own)
        c = model.config
        shard = own.heads(c.num_heads, c.num_kv_heads)
        return Paged(model, shard.kv_count, ranks=size).run("a", ids, [20])

    found = Ranks(size).run(work)
    for logits in found:
        assert torch.equal(logits, found[0])
    assert (found[0] - expected).abs().max() <= 1e-4
    assert torch.equal(found[0].argmax(dim=1), expected.argmax(dim=1))


@pytest.mark.parametrize(
    ("name", "options", "sums"),
    [
        ("phi", {}, 1),  # per layer
        ("llama", {}, 2),
        ("cohere2_moe", ARCHITECTURES["cohere2_moe"], 2),  # experts sum theirs
    ],
)
def test_parallel_blocks_are_summed_over_ranks_at_once(
    name: str, options: dict[str, Any], sums: int, load: Callable[..., Any]
) -> None:
    checkpoint = checkpoint_of(tiny(name, **options))

    def work(own: Mesh) -> list[int]:
        model = load(DictCheckpoint(checkpoint.config, checkpoint.tensors), mesh=own)
        group, counts = own.group, [0]
        every = group.all_gather

        def counted(x: Tensor) -> Any:
            counts[0] += x.shape[-1] == model.config.hidden_size
            return every(x)

        group.all_gather = counted
        c = model.config
        Paged(model, own.heads(c.num_heads, c.num_kv_heads).kv_count).run("a", prompt(9, 8))
        return [counts[0], len(model.layers)]

    for count, layers in Ranks(2).run(work):
        dense = 1 if name == "cohere2_moe" else 0  # its first layer has no experts
        assert count == 1 + sums * layers - dense  # and the embedding


def test_ranks_share_the_weights_between_them(load: Callable[..., Any]) -> None:
    checkpoint = checkpoint_of(tiny("llama"))

    def held(model: Any) -> int:
        return sum(linear.weight.nbytes for _, linear in model.linears())

    def work(own: Mesh) -> int:
        return held(load(DictCheckpoint(checkpoint.config, checkpoint.tensors), mesh=own))

    assert sum(Ranks(2).run(work)) == held(load(checkpoint))


def test_a_cut_through_a_group_names_the_layer_and_the_number_of_ranks(
    load: Callable[..., Any],
) -> None:
    class Grouped(DictCheckpoint):
        def weight(self, name: str) -> Weight:
            if not name.endswith("o_proj"):
                return super().weight(name)
            self._take(f"{name}.weight")
            codes = torch.zeros(64, 32, dtype=torch.uint8)
            return AffineWeight(Affine((64, 64), 4, 48, codes, torch.ones(64, 2)))

    found = checkpoint_of(tiny("llama"))
    with pytest.raises(AlignmentError, match=r"layers\.0\.self_attn\.o_proj.*parallel size 2"):
        load(Grouped(found.config, found.tensors), mesh=mesh(0, 2))
