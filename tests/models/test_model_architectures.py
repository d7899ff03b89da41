"""Every architecture against transformers: logits in float32, to 1e-4, however the work is cut."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from tests.models.conftest import Paged, checkpoint_of, expected_logits, prompt, tiny
from tests.models.tiny_architectures import ARCHITECTURES

LENGTH = 75


@pytest.fixture(params=list(ARCHITECTURES))
def oracle(request: pytest.FixtureRequest) -> Any:
    return tiny(request.param.split("-")[0], **ARCHITECTURES[request.param])


def assert_close(found: torch.Tensor, expected: torch.Tensor) -> None:
    assert 0.5 < expected.std() < 20, "the reference logits must be O(1) for 1e-4 to mean something"
    assert (found - expected).abs().max() <= 1e-4


@pytest.mark.quick_cases(6)
def test_logits_match_transformers_however_the_work_is_cut(
    oracle: Any, load: Callable[..., Any]
) -> None:
    """One prefill; chunks that end inside pages; token by token; ragged batches: bitwise."""
    checkpoint = checkpoint_of(oracle)
    model = load(checkpoint)
    assert checkpoint.unused() == []
    ids = {name: prompt(n, n) for name, n in {"a": LENGTH, "b": 40, "c": 21}.items()}
    whole = {name: Paged(model).run(name, tokens) for name, tokens in ids.items()}
    for name, tokens in ids.items():
        assert_close(whole[name], expected_logits(oracle, tokens))

    for splits in ([5, 37, 38, 64], [16, 32], [70, 71, 72, 73, 74]):
        assert torch.equal(Paged(model).run("a", ids["a"], splits), whole["a"])
    assert torch.equal(Paged(model).run("c", ids["c"], range(1, 21)), whole["c"])

    batch = Paged(model)
    steps = [{"a": 30}, {"a": 1, "b": 33}, {"c": 20, "a": 13, "b": 1}, {"b": 6, "c": 1, "a": 31}]
    found: dict[str, list[torch.Tensor]] = {name: [] for name in ids}
    for step in steps:
        at = {name: batch.done.get(name, 0) for name in step}
        part = batch.step({name: ids[name][at[name] : at[name] + n] for name, n in step.items()})
        for name, logits in part.items():
            found[name].append(logits)
    for name, parts in found.items():
        assert torch.equal(torch.cat(parts), whole[name])
