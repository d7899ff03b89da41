"""Prompts with images whose tokens all see each other (PaliGemma), beside transformers."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from sdk.api.config import EngineConfig
from sdk.api.errors import RequestError
from sdk.engine.pages.image_keys import whole_ids
from sdk.loading.load import Loaded, load
from tests.models.tiny_vision import MODELS, TEXT, image, normalized, vision_model
from tests.models.tiny_vision_prompts import (
    OPTIONS,
    answer,
    check_in_steps,
    check_preempted,
    job,
    prompt,
    prompt_logprobs,
    run,
)

VERSIONS = {
    "1": {**TEXT, "model_type": "gemma"},
    "2": MODELS["paligemma"]["text_config"],
}


@pytest.fixture(scope="module", params=VERSIONS)
def family(request: Any, tmp_path_factory: Any) -> tuple[Any, Path]:
    """transformers' model and its folder."""
    oracle = vision_model("paligemma", text_config=VERSIONS[request.param])
    folder = tmp_path_factory.mktemp("paligemma")
    oracle.save_pretrained(folder)
    return oracle, folder


@pytest.fixture(scope="module")
def loaded(family: Any) -> Iterator[Loaded]:
    found = load(EngineConfig(model=str(family[1]), **OPTIONS))
    yield found
    found.engine.close()


def one_image(vision: Any, seed: int = 0) -> Any:
    return image(vision, [(56, 56)], seed)


def expected_logits(oracle: Any, vision: Any, ids: list[int], count: int, own: Any) -> Tensor:
    """transformers' logits of every token; the first ``count`` are a prompt with that image."""
    kinds = torch.ones(1, len(ids), dtype=torch.int64)
    given = {"token_type_ids": kinds}
    if own is not None:
        kinds[:, :count] = 0
        given["pixel_values"] = normalized(own.tiles[0], vision)[None]
    with torch.no_grad():
        found: Tensor = oracle(input_ids=torch.tensor([ids]), **given).logits[0]
    return found


@pytest.mark.parametrize("seen", [True, False])
def test_logits_are_those_of_transformers(family: Any, loaded: Loaded, seen: bool) -> None:
    oracle, _ = family
    vision = loaded.facts.model_config.vision
    assert loaded.runner.strategy.eager_reason is None  # steps are recorded
    own = one_image(vision) if seen else None
    ids, placed = prompt(vision, [own] if seen else [], seed=1, text=12)
    found = run(loaded.engine, job("a", ids, placed, prompt_logprobs=0))["a"]
    known, wanted = list(ids), []
    for _ in range(4):
        chances = expected_logits(oracle, vision, known, len(ids), own).log_softmax(-1)
        token = int(chances[-1].argmax())
        wanted.append((token, float(chances[-1, token])))
        known.append(token)
    own_chances = chances[torch.arange(len(ids) - 1), torch.tensor(ids[1:])]
    assert torch.allclose(torch.tensor(prompt_logprobs(found)), own_chances, atol=1e-4)
    assert [token for token, _ in answer(found)] == [token for token, _ in wanted]
    for (_, chance), (_, expected) in zip(answer(found), wanted, strict=True):
        assert abs(chance - expected) < 1e-4


def test_batches_steps_of_any_size_and_preemption_change_no_bit(loaded: Loaded) -> None:
    vision, engine = loaded.facts.model_config.vision, loaded.engine
    engine.reset_prefix_cache()
    ids, placed = prompt(vision, [one_image(vision)], seed=3)
    other, others = prompt(vision, [one_image(vision, 1)], seed=4)
    alone = answer(run(engine, job("a", ids, placed))["a"])
    again = run(engine, job("b", ids, placed))["b"]
    assert answer(again) == alone and again.num_cached_tokens >= 48
    engine.reset_prefix_cache()
    text, _ = prompt(vision, [], seed=5, text=40)
    found = run(engine, job("c", other, others), job("d", text), job("e", ids, placed))
    assert answer(found["e"]) == alone
    engine.reset_prefix_cache()
    assert answer(run(engine, job("c", other, others))["c"]) == answer(found["c"])
    engine.reset_prefix_cache()
    assert answer(run(engine, job("d", text))["d"]) == answer(found["d"])
    check_in_steps(engine, job("f", ids, placed), alone)
    check_preempted(engine, job("g", ids, placed), alone, 5)
    engine.scheduler.images.check_blocks()


def test_a_prompt_that_begins_alike_is_no_prefix(family: Any, loaded: Loaded) -> None:
    """What its first tokens are depends on the last one."""
    vision, engine = loaded.facts.model_config.vision, loaded.engine
    own = one_image(vision)
    ids, placed = prompt(vision, [own], seed=6, text=20)
    changed = [*ids[:-1], ids[-1] + 1]
    engine.reset_prefix_cache()
    alone = answer(run(engine, job("a", changed, placed))["a"])
    for first in (ids, [*changed, 5, 6], changed[:-2]):
        engine.reset_prefix_cache()
        run(engine, job("b", first, placed))
        found = run(engine, job("c", changed, placed))["c"]
        assert found.num_cached_tokens == 0 and answer(found) == alone
    # nor is what an answer has added to it
    longer = [*changed, alone[0][0]]
    found = run(engine, job("d", longer, placed))["d"]
    assert found.num_cached_tokens == 0
    logits = expected_logits(family[0], vision, longer, len(longer), own)
    assert answer(found)[0][0] == int(logits[-1].argmax())


def test_the_first_id_of_a_whole_prompt_stands_for_all() -> None:
    ids = [5, 6, 7]
    found = whole_ids(ids)
    assert found[1:] == ids[1:] and found[0] < 0 and found == whole_ids(ids)
    assert len({whole_ids(other)[0] for other in (ids, [5, 6, 8], [5, 6, 7, 7], [5, 6])}) == 4


def test_what_does_not_fit_is_refused(loaded: Loaded, family: Any) -> None:
    vision, engine = loaded.facts.model_config.vision, loaded.engine
    ids, placed = prompt(vision, [one_image(vision), one_image(vision, 1)])
    with pytest.raises(RequestError, match="images: expected one in a prompt of this model, found"):
        engine.add(job("a", ids, placed))
    options = {**OPTIONS, "max_num_batched_tokens": 90}
    small = load(EngineConfig(model=str(family[1]), **options))
    ids, placed = prompt(vision, [one_image(vision)], text=7)  # 80 tokens
    assert len(answer(run(small.engine, job("b", ids, placed))["b"])) == 4
    ids, placed = prompt(vision, [one_image(vision)], text=9)
    with pytest.raises(
        RequestError, match="prompt: expected at most 82 tokens beside images, which see each"
    ):
        small.engine.add(job("c", ids, placed))
    assert not small.engine.has_unfinished
    small.engine.close()
