"""Stages: how layers are divided; one after the other they give the bits of the whole model."""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from sdk.engine.rank.kv_cache import caches_of_layers
from sdk.models.parallel import Mesh, split_layers
from sdk.quant.errors import AlignmentError, UnsupportedError
from sdk.quant.spec import KVSpec
from tests.models.conftest import DictCheckpoint, Paged, checkpoint_of, prompt, tiny
from tests.models.test_model_parallel import CUT


class Wire:
    """A link whose two ends are one object."""

    def __init__(self) -> None:
        self.sent: deque[Tensor] = deque()

    def send(self, x: Tensor) -> None:
        self.sent.append(x.clone())

    def receive(self, out: Tensor) -> None:
        out.copy_(self.sent.popleft())

    def reserve(self, nbytes: int) -> None:
        raise AssertionError


class Body:
    """A stage in :class:`Paged`: what it sends on takes the place of logits before the last one."""

    def __init__(self, model: Any, last: bool) -> None:
        self.model, self.config = model, model.config
        self.logits = model.logits if last else lambda hidden: hidden

    def __call__(self, *args: Any) -> Tensor:
        return self.model(*args)


def stages_of(
    load: Callable[..., Any],
    opened: Callable[[], Any],
    runs: list[range],
    own: Mesh = Mesh(),  # noqa: B008
) -> list[Any]:
    """Stages with the layers ``runs``, of rank ``own`` among those of each stage."""
    wires = [Wire() for _ in runs[1:]]
    found = []
    for stage, (layers, before, after) in enumerate(
        zip(runs, [None, *wires], [*wires, None], strict=True)
    ):
        mesh = replace(own, stage=stage, stages=len(runs), upstream=before, downstream=after)
        body = Body(load(opened(), mesh=mesh, layers=layers), mesh.is_last)
        paged = Paged(body, ranks=own.size)
        paged.kv = [paged.kv[i] for i in caches_of_layers(paged.model.config, layers)]
        found.append(paged)
    return found


def copy_of(checkpoint: DictCheckpoint) -> DictCheckpoint:
    return DictCheckpoint(checkpoint.config, checkpoint.tensors)


ONE_RANK = {case: (name, options) for case, (name, _, options) in CUT.items()}


@pytest.mark.quick_cases(15)
@pytest.mark.parametrize("runs", [[range(2), range(2, 3)], [range(1), range(1, 2), range(2, 3)]])
@pytest.mark.parametrize("case", ONE_RANK)
def test_stages_one_after_the_other_give_the_bits_of_the_whole(
    case: str, runs: list[range], load: Callable[..., Any]
) -> None:
    name, options = ONE_RANK[case]
    checkpoint = checkpoint_of(tiny(name, **options))
    runs = [*runs[:-1], range(runs[-1].start, load(checkpoint).config.num_layers)]
    ids = prompt(37, 8)
    expected = Paged(load(checkpoint)).run("a", ids, [20])
    paged = stages_of(load, lambda: copy_of(checkpoint), runs)
    found = []
    for part in (ids[:20], ids[20:]):
        for stage in paged:
            logits = stage.step({"a": part})["a"]
        found.append(logits)
    assert torch.equal(torch.cat(found), expected)


def test_a_stage_has_only_its_own_weights(load: Callable[..., Any]) -> None:
    checkpoint = checkpoint_of(tiny("llama"))
    whole = load(checkpoint)
    stages = stages_of(load, lambda: copy_of(checkpoint), [range(1), range(1, 3)])
    parts = [paged.model.model for paged in stages]

    def paths(model: Any) -> list[str]:
        return [path for path, _ in model.linears()]

    assert sorted(paths(parts[0]) + paths(parts[1])) == sorted(paths(whole))
    assert all(".layers.0." in path for path in paths(parts[0]))
    assert parts[0].embedding is not None and parts[0].head is parts[0].norm is None
    assert parts[1].embedding is None and parts[1].head is not None
    used = [name for name, _ in whole.linears()]
    assert "lm_head" in used and "lm_head" in paths(parts[1])


def cost(runs: tuple[range, ...], costs: list[float], last: float) -> float:
    sums = [sum(costs[i] for i in run) for run in runs]
    return max([*sums[:-1], sums[-1] + last])


@pytest.mark.parametrize("last", [0.0, 2.5, 40.0])
@pytest.mark.parametrize("stages", [1, 2, 3, 4])
def test_layers_are_divided_so_that_the_slowest_stage_is_as_fast_as_possible(
    stages: int, last: float
) -> None:
    costs = [1.0, 1.0, 4.0, 1.0, 2.0, 1.0, 3.0]
    found = split_layers(costs, stages, last)
    assert [i for run in found for i in run] == list(range(7)) and all(found)
    best = min(
        cost(tuple(range(a, b) for a, b in itertools.pairwise([0, *cuts, 7])), costs, last)
        for cuts in itertools.combinations(range(1, 7), stages - 1)
    )
    assert cost(found, costs, last) == best


def test_equal_layers_are_divided_evenly_and_a_large_head_takes_the_place_of_layers() -> None:
    assert split_layers([1.0] * 6, 2) == (range(3), range(3, 6))
    assert split_layers([1.0] * 7, 2) == (range(4), range(4, 7))
    assert split_layers([1.0] * 8, 2, last=4.0) == (range(6), range(6, 8))
    assert split_layers([1.0] * 3, 2, last=99.0) == (range(2), range(2, 3))


def test_more_stages_than_layers_are_refused() -> None:
    with pytest.raises(AlignmentError, match="cannot split 3 layers over 4 stages"):
        split_layers([1.0] * 3, 4)


def test_a_mesh_checks_its_stage_and_its_links() -> None:
    wire = Wire()
    with pytest.raises(ValueError, match=r"expected a stage in 0\.\.1, found 2"):
        Mesh(stage=2, stages=2)
    for links in ({}, {"upstream": wire}, {"upstream": wire, "downstream": wire}):
        with pytest.raises(ValueError, match="stage 0 of 2 needs other links"):
            Mesh(stage=0, stages=2, **links)
    assert not Mesh(stage=0, stages=2, downstream=wire).samples
    assert Mesh(stage=1, stages=2, upstream=wire).samples


def test_models_of_transformers_have_no_stages(load: Callable[..., Any]) -> None:
    mesh = Mesh(stage=0, stages=2, downstream=Wire())
    with pytest.raises(UnsupportedError, match=r"pipeline_parallel_size=1, found 2"):
        load(tiny("persimmon"), mesh=mesh)


def test_the_cache_of_a_stage_skips_its_own_layers() -> None:
    whole = KVSpec(6, 2, 64, 16, "int4:skip=0+3+5")
    parts = [whole.of_layers(run) for run in (range(1), range(1, 4), range(4, 6))]
    assert [part.dtype for part in parts] == ["int4:skip=0", "int4:skip=2", "int4:skip=1"]
    assert sum(part.page_bytes for part in parts) == whole.page_bytes
    tiered = KVSpec(6, 2, 64, 128, "float16>int8").of_layers(range(2, 6))
    assert (tiered.num_layers, tiered.dtype) == (4, "float16>int8")
