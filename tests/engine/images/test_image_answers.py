"""Prompts with images: tiny vision models beside transformers, and the same bits however their
prompts run."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from sdk.api.config import EngineConfig
from sdk.api.errors import RequestError
from sdk.loading.load import Loaded, load
from tests.models.tiny_mmproj import save_both
from tests.models.tiny_vision import vision_model
from tests.models.tiny_vision_prompts import (
    OPTIONS,
    answer,
    check_in_steps,
    check_preempted,
    expected_logits,
    job,
    prompt,
    prompt_logprobs,
    rest,
    run,
    some_images,
)


@pytest.mark.parametrize("count", [0, 1, 2])
def test_logits_are_those_of_transformers(family: Any, loaded: Loaded, count: int) -> None:
    name, oracle, _ = family
    vision = loaded.facts.model_config.vision
    assert loaded.runner.strategy.eager_reason is None  # steps are recorded
    images = some_images(vision, count)
    ids, placed = prompt(vision, images, seed=count)
    found = run(loaded.engine, job("a", ids, placed, prompt_logprobs=0))["a"]
    known, wanted = list(ids), []
    for _ in range(4):
        chances = expected_logits(oracle, name, vision, known, images).log_softmax(-1)
        token = int(chances[-1].argmax())
        wanted.append((token, float(chances[-1, token])))
        known.append(token)
    own = chances[torch.arange(len(ids) - 1), torch.tensor(ids[1:])]
    assert torch.allclose(torch.tensor(prompt_logprobs(found)), own, atol=1e-4)
    assert [token for token, _ in answer(found)] == [token for token, _ in wanted]
    for (_, chance), (_, expected) in zip(answer(found), wanted, strict=True):
        assert abs(chance - expected) < 1e-4


def test_chunks_batches_prefixes_and_preemption_change_no_bit(family: Any, loaded: Loaded) -> None:
    vision, engine = loaded.facts.model_config.vision, loaded.engine
    images = some_images(vision, 2)
    ids, placed = prompt(vision, images, seed=3)
    alone = answer(run(engine, job("a", ids, placed))["a"])
    # after a prefix hit, of which the first one is the whole prompt
    encoded = engine.scheduler.images.num_encoded
    assert answer(run(engine, job("b", ids, placed))["b"]) == alone
    longer = [*ids, *[token for token, _ in alone[:1]]]
    assert answer(run(engine, job("c", longer, placed, max_tokens=3))["c"]) == alone[1:]
    assert engine.scheduler.images.num_encoded == encoded
    # in a batch: with the same image, another one, and none
    engine.reset_prefix_cache()
    other, others = prompt(vision, images[1:], seed=4)
    text, _ = prompt(vision, [], seed=5, text=40)
    jobs = [job("d", ids, placed), job("e", other, others), job("f", text), job("g", ids, placed)]
    found = run(engine, *jobs)
    assert answer(found["d"]) == answer(found["g"]) == alone
    engine.reset_prefix_cache()
    assert answer(run(engine, job("e", other, others))["e"]) == answer(found["e"])
    assert engine.scheduler.images.num_encoded == encoded  # all rows were cached
    # in steps of any size: a span that sees both ways is never cut
    check_in_steps(engine, job("h", ids, placed), alone)
    # preempted while the prompt runs, and while the answer does
    check_preempted(engine, job("i", ids, placed), alone, 8)
    assert engine.scheduler.images.num_encoded == encoded


def test_guidance_combines_the_logits_of_transformers(family: Any, loaded: Loaded) -> None:
    """Of the prompt with images and of a negative prompt of text, which both go on with the answer;
    also where the prompt runs in small steps."""
    name, oracle, _ = family
    vision, engine = loaded.facts.model_config.vision, loaded.engine
    images, negative = some_images(vision, 2), [5, 6, 7]
    ids, placed = prompt(vision, images, seed=70)
    guided = replace(
        job("a", ids, placed, guidance_scale=1.7), negative_prompt_token_ids=tuple(negative)
    )
    found = answer(run(engine, guided)["a"])
    known = list[int]()
    for token, chance in found:
        own, other = (
            expected_logits(oracle, name, vision, [*begin, *known], given)[-1].log_softmax(-1)
            for begin, given in ((ids, images), (negative, []))
        )
        chances = (other + 1.7 * (own - other)).log_softmax(-1)
        assert token == int(chances.argmax()) and abs(chance - float(chances[token])) < 2e-4
        known.append(token)
    engine.reset_prefix_cache()
    engine.add(guided)
    last = []
    while engine.has_unfinished:
        last = engine.step(6) or last
    assert answer(last[0]) == found


def test_another_image_is_another_prefix(loaded: Loaded) -> None:
    vision, engine = loaded.facts.model_config.vision, loaded.engine
    first, second = some_images(vision, 2)
    second = second._replace(tiles=(255 - first.tiles[0],), grids=first.grids)
    second = second._replace(num_tokens=first.num_tokens)
    ids, placed = prompt(vision, [first], seed=6, text=20)
    replaced = tuple(one._replace(image=second) for one in placed)
    found = [
        run(engine, job(name, ids, images))[name]
        for name, images in (("a", placed), ("b", replaced), ("c", placed), ("d", replaced))
    ]
    assert answer(found[0]) == answer(found[2]) != answer(found[1]) == answer(found[3])
    # the text before the image is shared, and the image alone is not
    cached = [one.num_cached_tokens for one in found]
    assert cached[0] == 0 and 0 < cached[1] <= placed[0].spans[0][0] < cached[2]
    assert cached[2] == cached[3]


def test_text_alone_is_what_a_model_without_a_tower_computes(family: Any, loaded: Loaded) -> None:
    vision = loaded.facts.model_config.vision
    text, _ = prompt(vision, [], seed=7, text=50)
    found = run(loaded.engine, job("a", text, prompt_logprobs=0))["a"]
    options = {**OPTIONS, "limit_mm_per_prompt": {"image": 0}}
    alone = load(EngineConfig(model=str(family[2]), **options))
    try:
        assert alone.facts.plan.images is None and alone.runner.images is None
        assert alone.warnings == () or "vision." not in str(alone.warnings)
        assert alone.facts.plan.total < loaded.facts.plan.total
        other = run(alone.engine, job("a", text, prompt_logprobs=0))["a"]
        assert answer(other) == answer(found)
        assert prompt_logprobs(other) == prompt_logprobs(found)
        ids, placed = prompt(vision, some_images(vision, 1))
        with pytest.raises(RequestError, match="images: this engine reads none"):
            alone.engine.add(job("b", ids, placed))
    finally:
        alone.engine.close()


def test_images_of_one_digest_and_other_sizes_are_not_mixed_up(loaded: Loaded) -> None:
    """A digest that callers made up: the rows of another image would have the wrong number."""
    vision, engine = loaded.facts.model_config.vision, loaded.engine
    first, second = some_images(vision, 2)
    second = second._replace(digest=first.digest)
    jobs = [prompt(vision, [one], seed=60 + i) for i, one in enumerate((first, second))]
    found = run(engine, job("a", *jobs[0]), job("b", *jobs[1]))
    engine.reset_prefix_cache()
    assert answer(run(engine, job("c", *jobs[0]))["c"]) == answer(found["a"])
    if first.num_tokens != second.num_tokens:
        other = prompt(vision, some_images(vision, 2)[1:], seed=61)
        assert answer(run(engine, job("d", *other))["d"]) == answer(found["b"])


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"enforce_eager": True},
        {"speculative_config": {"method": "ngram", "num_speculative_tokens": 3}},
        pytest.param({"tensor_parallel_size": 2}, marks=pytest.mark.slow),
        pytest.param({"pipeline_parallel_size": 2}, marks=pytest.mark.slow),
        pytest.param({"weight_cache": True}, marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_windows_with_every_way_to_run(windowed: Any, options: dict[str, Any]) -> None:
    oracle, folder = windowed
    loaded = load(EngineConfig(model=str(folder), **OPTIONS, **options))
    try:
        vision, engine = loaded.facts.model_config.vision, loaded.engine
        images = some_images(vision, 2)
        ids, placed = prompt(vision, images, seed=3)
        found = answer(run(engine, job("a", ids, placed))["a"])
        known = list(ids)
        for token, chance in found:
            logits = expected_logits(oracle, "gemma3", vision, known, images)
            assert token == int(logits[-1].argmax())
            assert abs(chance - float(logits[-1].log_softmax(-1)[token])) < 1e-4
            known.append(token)
        engine.reset_prefix_cache()
        engine.add(job("b", ids, placed))
        last = []
        while engine.has_unfinished:
            last = engine.step(5) or last
        assert answer(last[0]) == found
        assert answer(run(engine, job("c", ids, placed))["c"]) == found
    finally:
        loaded.engine.close()


def test_drafts_of_others_leave_room_for_an_image(windowed: Any) -> None:
    """Its 16 tokens run in one step of 24, of which drafts of an endless answer could take 12."""
    options = {**OPTIONS, "max_num_batched_tokens": 24}
    drafts = {"method": "ngram", "num_speculative_tokens": 3}
    loaded = load(EngineConfig(model=str(windowed[1]), **options, speculative_config=drafts))
    vision, engine = loaded.facts.model_config.vision, loaded.engine
    scheduler = engine.scheduler
    ids, placed = prompt(vision, some_images(vision, 1), seed=3)
    add = scheduler._add_drafts

    def greedy(drafts: Any, decodes: Any, pages: Any, room: int) -> int:
        add(drafts, decodes, pages, 0)
        return room  # as if there were as many drafts as there may be

    scheduler._add_drafts = greedy  # type: ignore[method-assign]
    engine.add(job("text", prompt(vision, [], seed=4)[0], max_tokens=60))
    for _ in range(4):
        engine.step()
    engine.add(job("image", ids, placed))
    done = list(rest(engine))
    loaded.engine.close()
    assert done == ["image", "text"]


def test_a_gguf_model_with_its_mmproj_beside_it_or_named(tmp_path: Path) -> None:
    path = save_both(vision_model("gemma3"), "gemma3", tmp_path)
    [beside] = tmp_path.glob("mmproj*.gguf")
    answers = []
    for named in (None, tmp_path / "elsewhere" / "eyes.gguf"):
        if named is not None:
            named.parent.mkdir()
            beside.rename(named)
        loaded = load(EngineConfig(model=str(path), mmproj=named, **OPTIONS))  # type: ignore[arg-type]
        vision = loaded.facts.model_config.vision
        ids, placed = prompt(vision, some_images(vision, 1), seed=2)
        answers.append(answer(run(loaded.engine, job("a", ids, placed))["a"]))
        loaded.engine.close()
    assert answers[0] == answers[1]
    without = load(EngineConfig(model=str(path), **OPTIONS))
    with pytest.raises(RequestError, match="images: this engine reads none"):
        without.engine.add(job("a", ids, placed))
    without.engine.close()
