"""Layers of a GPU's model that stay with the host: how many, and what is refused."""

from __future__ import annotations

import contextlib
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from sdk import UnsupportedError
from sdk.api.options import engine_config
from sdk.api.sizes import format_bytes
from sdk.kernels import gpu
from sdk.kernels.gpu.scratch import COUNTERS, sampler_bytes, work_shape
from sdk.kernels.gpu.tuning import Tuning
from sdk.kernels.packed_shapes import packed_bytes
from sdk.loading import checks as load_checks, load as loading
from sdk.loading.alternatives import alternatives
from sdk.loading.checks import check_options, room_shortage
from sdk.memory import planning, resolve
from sdk.memory.plan import MemoryPlan

MIB = 2**20
WORDS = 49152  # of SmolLM2
LIMITS: dict[str, Any] = {"max_model_len": 256, "max_num_seqs": 2, "device": "cuda"}


@pytest.fixture
def card(monkeypatch: pytest.MonkeyPatch) -> None:
    """As if there were one."""
    monkeypatch.setattr(resolve, "device_of", lambda config: "cuda")
    monkeypatch.setattr(resolve, "available_to", lambda config: 2**30)
    monkeypatch.setattr(planning, "activations_of", lambda config, checkpoint: torch.bfloat16)
    monkeypatch.setattr(gpu, "tuning_of", lambda device: Tuning(programs=528))
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))


def _planned(path: Path, **options: object) -> tuple[MemoryPlan, dict[str, Any]]:
    """The plan, and what a rank is told of the layers."""
    config = engine_config(path, **{"memory": "1GiB", **LIMITS, **options})
    with contextlib.closing(resolve.open_model(config)) as checkpoint:
        made = planning.plan_for(config, checkpoint)
        model = planning.model_config(config, checkpoint)
        return made, loading._offload_options(config, model, made)


@pytest.mark.usefixtures("card")
def test_whole_layers_go_from_the_end_until_the_bytes_asked_for_are_out(smollm2: Path) -> None:
    whole, told = _planned(smollm2)
    assert told == {} and whole.offloaded == 0
    one, told = _planned(smollm2, cpu_offload="1MiB")
    assert one.layers_away == 1 and told == {"host_from": 29}
    layer = one.offloaded
    assert 2 * MIB < layer < 3 * MIB
    some, told = _planned(smollm2, cpu_offload="20MiB")
    assert 20 * MIB <= some.offloaded < 20 * MIB + layer
    assert told == {"host_from": 30 - some.layers_away}
    assert some.weights == whole.weights - some.offloaded
    assert some.workspace == whole.workspace + 2 * layer  # two places on the card
    most, told = _planned(smollm2, cpu_offload="1GiB")
    assert told == {"host_from": 0} and most.weights > 25 * MIB  # embedding and head stay


@pytest.mark.usefixtures("card")
def test_auto_moves_what_the_card_cannot_hold(smollm2: Path) -> None:
    whole, _ = _planned(smollm2)
    least = whole.total - 20 * MIB
    refused, _ = _planned(smollm2, memory=least - whole.kv_cache)
    assert not refused.fits
    moved, _ = _planned(smollm2, memory=least - whole.kv_cache, cpu_offload="auto")
    assert moved.fits and moved.total <= least - whole.kv_cache
    assert 0 < moved.layers_away < 30
    assert "offloaded" in str(moved)


@pytest.mark.usefixtures("card")
def test_a_host_without_room_for_the_layers_is_refused(
    smollm2: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made, _ = _planned(smollm2, cpu_offload="20MiB")
    assert made.config is not None and room_shortage(made.config, made) == ""
    monkeypatch.setattr(load_checks, "available_memory", lambda: MIB)
    found = room_shortage(made.config, made)
    assert re.match(r"cpu_offload: .* more than the 1.0 MiB", found)


@pytest.mark.usefixtures("card")
def test_what_kernels_ask_for_is_within_the_budget_and_as_large_as_the_step(smollm2: Path) -> None:
    few, _ = _planned(smollm2, max_num_batched_tokens=64, enforce_eager=True)
    large: dict[str, Any] = {"max_num_batched_tokens": 1024, "max_num_seqs": 4}
    many, _ = _planned(smollm2, **large, enforce_eager=True)
    # 64 tokens: partial sums alone; 1,024: those of the 256 tokens up to which weights stay packed
    # (528 programs with a tile of 64 x 64, and sums of 16 columns of the widest input), which are
    # more than a decoded matrix, and the library's own
    assert 0 < few.scratch < 9 * MIB
    kept = packed_bytes(4, WORDS) + sampler_bytes(4, WORDS) + 4 * COUNTERS
    parts = 4 * 528 * 64 * 64 + 256 * 1536 // 4
    assert many.scratch == parts + 32 * MIB + kept
    recorded, _ = _planned(smollm2, **large)
    assert recorded.scratch == many.scratch + parts + 32 * MIB  # of the 512 that are recorded
    exact, _ = _planned(smollm2, **large, compute="exact", enforce_eager=True)
    assert exact.scratch < few.scratch + 4 * MIB  # nothing is decoded
    for plan in (few, many):
        rest = plan.weights + plan.workspace + plan.kv_cache + plan.tokenizer
        assert plan.total == rest + plan.scratch <= 2**30
        assert f"scratch    {format_bytes(plan.scratch):>10}  of kernels" in str(plan)
    refused, _ = _planned(smollm2, **large, memory=many.total - many.kv_cache)
    assert f"  scratch    {format_bytes(recorded.scratch):>10}" in refused.problem


@pytest.mark.usefixtures("card")
def test_steps_that_are_not_recorded_are_an_alternative_without_loss(smollm2: Path) -> None:
    options: dict[str, Any] = {"max_num_batched_tokens": 512, "max_num_seqs": 4}
    whole, _ = _planned(smollm2, **options)
    eager, _ = _planned(smollm2, **options, enforce_eager=True)
    assert whole.graphs > 8 * MIB
    least = eager.total - eager.kv_cache + 16 * eager.page_bytes  # a request of 256 tokens
    config = engine_config(smollm2, **{**LIMITS, **options, "memory": least})
    with contextlib.closing(resolve.open_model(config)) as checkpoint:
        asked = planning.plan_for(config, checkpoint)
        assert not asked.fits
        found = alternatives(config, checkpoint, asked)
        assert dict(found[0].options) == {"enforce_eager": True}
        assert found[0].loss == 0 and found[0].keeps_limits
        assert found[0].plan.graphs == 0 and found[0].plan.total <= least
        assert str(found[0]).endswith("loss 0.0000 nats, slower: steps are not recorded")
        # that does not rule out what is fast with smaller limits
        assert any(not one.is_eager and one.loss == 0 for one in found[1:])
        given = replace(config, enforce_eager=True, memory=4 * MIB)
        small = planning.plan_for(given, checkpoint)
        assert not any(one.is_eager for one in alternatives(given, checkpoint, small))


@pytest.mark.usefixtures("card")
def test_long_contexts_have_partial_sums_of_attention(smollm2: Path) -> None:
    options: dict[str, Any] = {"max_num_batched_tokens": 192, "enforce_eager": True}
    options |= {"max_num_seqs": 192, "memory": "20GiB"}
    short, _ = _planned(smollm2, **options)
    long, _ = _planned(smollm2, max_model_len=8192, **options)
    kept = packed_bytes(192, WORDS) + sampler_bytes(192, WORDS) + 4 * COUNTERS
    work = work_shape(4, 192, 9, 3, 64).nbytes
    assert long.scratch == 4 * 192 * 9 * 32 * (64 + 2) + work + kept > short.scratch
    fixed, _ = _planned(smollm2, max_model_len=8192, deterministic=True, **options)
    # shares of K in the same place for every batch: 11 of gate and up, sums of 16 columns
    assert fixed.scratch == 4 * 11 * 192 * 3072 + 192 * 576 // 4 + kept


@pytest.mark.usefixtures("card")
def test_a_model_whose_layers_are_not_ours_is_refused(smollm2: Path) -> None:
    made, _ = _planned(smollm2)
    override = {"hf_overrides": {"model_type": "persimmon"}}
    for options, message in (
        ({"cpu_offload": "1GiB", "device": "cuda"}, "cpu_offload supports only this library's"),
        ({"tensor_parallel_size": 2}, "expected tensor_parallel_size=1, found 2"),
    ):
        config = engine_config(smollm2, **options, **override)
        with (
            contextlib.closing(resolve.open_model(config)) as checkpoint,
            pytest.raises(UnsupportedError, match=message),
        ):
            check_options(config, checkpoint, made)
