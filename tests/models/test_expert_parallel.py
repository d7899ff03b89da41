"""Models whose ranks have whole experts: the logits of one rank, wherever the experts are."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from sdk.kernels.operators.ops import Ops
from sdk.loaders.model_shapes import num_experts
from sdk.models.decoder import Decoder
from sdk.models.experts.moe import ExpertMLP
from sdk.models.experts.placement import Placement
from sdk.models.parallel import Mesh
from sdk.models.source import Source
from sdk.quant.errors import CheckpointError
from tests.models.conftest import DictCheckpoint, Paged, Ranks, checkpoint_of, prompt, tiny
from tests.models.tiny_architectures import V3

MODELS: dict[str, dict[str, Any]] = {
    "mixtral": {"num_local_experts": 5},
    "qwen3_moe": {"num_experts": 6, "num_experts_per_tok": 3, "moe_intermediate_size": 97},
    "gpt_oss": {"num_local_experts": 6, "num_experts_per_tok": 3},
    "qwen2_moe": {
        "num_experts": 6,
        "num_experts_per_tok": 3,
        "moe_intermediate_size": 97,
        "shared_expert_intermediate_size": 48,
    },
    "glm4_moe": {**V3, "first_k_dense_replace": 0},
}
HEADS = {"hidden_size": 96, "num_attention_heads": 6, "num_key_value_heads": 3}
IDS = prompt(37, 8)


def mixtures(model: Decoder) -> list[ExpertMLP]:
    found = [getattr(layer, "mlp", None) for layer in model.layers]
    return [mlp for mlp in found if isinstance(mlp, ExpertMLP)]


def experts_of(model: Decoder) -> list[list[int]]:
    return [list(mlp.share.weights) for mlp in mixtures(model) if mlp.share is not None]


@pytest.fixture(params=MODELS)
def checkpoint(request: pytest.FixtureRequest) -> DictCheckpoint:
    return checkpoint_of(tiny(request.param, **HEADS, **MODELS[request.param]))


def logits_of(model: Any, own: Mesh) -> Tensor:
    c = model.config
    return Paged(model, own.heads(c.num_heads, c.num_kv_heads).kv_count).run("a", IDS, [20])


@pytest.mark.quick_cases(5)
@pytest.mark.parametrize(("size", "redundant"), [(2, 0), (2, 3), (3, 0), (3, 2)])
def test_ranks_with_whole_experts_give_the_tokens_and_logits_of_one(
    checkpoint: DictCheckpoint, size: int, redundant: int, load: Callable[..., Any]
) -> None:
    expected = Paged(load(checkpoint)).run("a", IDS, [20])

    def work(own: Mesh) -> tuple[Tensor, list[list[int]]]:
        own = replace(own, redundant_experts=redundant)
        model = load(DictCheckpoint(checkpoint.config, checkpoint.tensors), mesh=own)
        return logits_of(model, own), experts_of(model)

    found = Ranks(size).run(work)
    for logits, _ in found:
        assert torch.equal(logits, found[0][0])
    # Sums over the ranks after attention round differently; experts add nothing to that.
    assert (found[0][0] - expected).abs().max() <= 1e-4
    assert torch.equal(found[0][0].argmax(dim=1), expected.argmax(dim=1))
    count = MODELS[checkpoint.config["model_type"]]
    experts = num_experts(count) or 0
    for layer in range(3):
        held = [len(own[layer]) for _, own in found]
        assert sum(held) == experts + redundant and max(held) - min(held) <= 1


def test_a_rank_reads_no_experts_of_others(
    checkpoint: DictCheckpoint, load: Callable[..., Any]
) -> None:
    def work(own: Mesh) -> tuple[set[str], list[list[int]]]:
        opened = DictCheckpoint(checkpoint.config, checkpoint.tensors)
        model = load(opened, mesh=replace(own, redundant_experts=0))
        return {name for name in opened.pulled if ".experts." in name}, experts_of(model)

    for pulled, own in Ranks(2).run(work):
        for layer, experts in enumerate(own):
            prefix = f"model.layers.{layer}.mlp.experts."
            read = {int(n.removeprefix(prefix).split(".")[0]) for n in pulled if prefix in n}
            assert read == set(experts)


def moved(model: Decoder, source: Source, placements: Mapping[int, Placement]) -> int:
    count = 0
    for mlp in mixtures(model):
        assert mlp.share is not None
        placement = placements[mlp.share.layer]
        arrivals = mlp.load(source, placement)
        mlp.move(arrivals, placement)
        count += len(arrivals)
    return count


def test_the_bits_do_not_depend_on_where_experts_are_and_who_has_copies(
    checkpoint: DictCheckpoint, load: Callable[..., Any], ops: Ops
) -> None:
    ranks = Ranks(2)

    def work(own: Mesh) -> list[Tensor]:
        own = replace(own, redundant_experts=2)
        model = load(DictCheckpoint(checkpoint.config, checkpoint.tensors), mesh=own)
        source = Source(checkpoint, model.config, own, ops, 256)
        found = [logits_of(model, own)]
        for turn in (1, 2):
            placements = {}
            for mlp in mixtures(model):
                assert mlp.share is not None
                experts = range(mlp.spec.count)
                first = [(e + turn) % mlp.spec.count for e in experts]
                sizes = [len(held) for held in mlp.share.placement]
                head, tail = set(first[: sizes[0]]), set(first[-sizes[1] :])
                placements[mlp.share.layer] = (tuple(sorted(head)), tuple(sorted(tail)))
            ranks.barrier.wait()
            if own.rank == 0:  # simulated ranks share an engine: they load one after the other
                assert moved(model, source, placements)
            ranks.barrier.wait()
            if own.rank == 1:
                assert moved(model, source, placements)
            ranks.barrier.wait()
            found.append(logits_of(model, own))
        return found

    for first, *others in ranks.run(work):
        for other in others:
            assert torch.equal(first, other)


@pytest.mark.parametrize("missing", ["0.gate_proj", "2.up_proj", "3.down_proj"])
def test_a_missing_bias_of_an_expert_is_named(missing: str, load: Callable[..., Any]) -> None:
    found = checkpoint_of(tiny("gpt_oss", num_local_experts=4, num_experts_per_tok=2))
    name = f"model.layers.1.mlp.experts.{missing}.bias"
    left = {key: value for key, value in found.tensors.items() if key != name}
    wanted = "of all parts or of none" if "down" not in missing else "for every expert or none"
    with pytest.raises(
        CheckpointError, match=rf"layers\.1\.mlp\.experts.*expected a bias {wanted}"
    ):
        load(DictCheckpoint(found.config, left))


def test_an_expert_whose_bias_is_missing_does_not_move(load: Callable[..., Any], ops: Ops) -> None:
    found = checkpoint_of(tiny("gpt_oss", num_local_experts=4, num_experts_per_tok=2))
    own = Mesh(0, 2, Ranks(2).mesh(0).group, redundant_experts=0)
    model = load(found, mesh=own)
    first = mixtures(model)[0]
    assert first.share is not None and first.share.weights == [0, 2]
    name = "model.layers.0.mlp.experts.3.down_proj.bias"
    left = {key: value for key, value in found.tensors.items() if key != name}
    source = Source(DictCheckpoint(found.config, left), model.config, own, ops, 256)
    with pytest.raises(CheckpointError, match="expected a bias for every expert or none"):
        first.load(source, ((0, 3), (1, 2)))
    assert [arrival.place for arrival in first.load(source, ((1, 2), (0, 3)))] == [0]
