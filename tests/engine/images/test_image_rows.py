"""Rows of encoded images: encoded once, in portions, kept and evicted as memory allows."""

from __future__ import annotations

from typing import Any

import pytest

from sdk.engine.pages.image_keys import image_ids, key_ids, placed, placed_before
from sdk.loading.load import Loaded
from sdk.models.vision.image import ImageInput, PromptImage
from sdk.models.vision.memory import workspace_bytes
from tests.models.tiny_vision import image
from tests.models.tiny_vision_prompts import (
    answer,
    job,
    moved,
    prompt,
    run,
    some_images,
)


def test_an_image_is_encoded_once_for_all_requests(loaded: Loaded) -> None:
    vision, engine = loaded.facts.model_config.vision, loaded.engine
    images = engine.scheduler.images
    [first, second] = some_images(vision, 2)
    before = images.num_encoded
    jobs = []
    for i in range(4):
        ids, placed = prompt(vision, [first, second], seed=10 + i)
        jobs.append(job(f"r{i}", ids, placed, n=2))
    run(engine, *jobs)
    assert images.num_encoded == before + 2


def test_an_image_without_readers_is_given_up(loaded: Loaded) -> None:
    vision, engine = loaded.facts.model_config.vision, loaded.engine
    images, before = engine.scheduler.images, engine.scheduler.images.num_encoded
    images._seconds_per_work = 1e9  # one layer at a time
    ids, placed = prompt(vision, some_images(vision, 1), seed=8)
    engine.add(job("a", ids, placed))
    engine.step()
    assert images._run is not None
    engine.abort(["a"])
    text, _ = prompt(vision, [], seed=9)
    run(engine, job("b", text))
    assert images._run is None and images.num_encoded == before
    images.check_blocks()
    # and encoded from the beginning when another request needs it
    images._seconds_per_work = 1e9
    found = answer(run(engine, job("c", ids, placed))["c"])
    engine.reset_prefix_cache()
    images.reset()
    assert answer(run(engine, job("d", ids, placed))["d"]) == found
    assert images.num_encoded == before + 2


def test_an_interrupted_step_leaves_no_rows_in_doubt(loaded: Loaded) -> None:
    """How much of its portions the ranks did is unknown, so that all images are encoded again."""
    vision, engine = loaded.facts.model_config.vision, loaded.engine
    images, scheduler = engine.scheduler.images, engine.scheduler
    ids, placed = prompt(vision, some_images(vision, 2), seed=40)
    wanted = answer(run(engine, job("a", ids, placed))["a"])
    for steps in range(4):
        engine.reset_prefix_cache()
        images.reset()
        images._seconds_per_work = None  # unknown: portions of one layer
        engine.add(job("b", ids, placed))
        for _ in range(steps):
            engine.step()
        assert scheduler.plan() is not None  # never reaches the ranks
        scheduler.rollback()
        images.check_blocks()
        assert images._run is None and not images._planned
        last = []
        while engine.has_unfinished:
            last = engine.step() or last
        assert answer(last[0]) == wanted


def test_other_requests_decode_between_portions(loaded: Loaded) -> None:
    vision, engine = loaded.facts.model_config.vision, loaded.engine
    images = engine.scheduler.images
    text, _ = prompt(vision, [], seed=20)
    ids, placed = prompt(vision, some_images(vision, 1), seed=21)
    engine.add(job("text", text, max_tokens=30))
    engine.step()
    engine.add(job("image", ids, placed))
    lengths, portions = [], 0
    while engine.has_unfinished:
        images._seconds_per_work = 1e9  # a portion is one layer
        for one in engine.step():
            if one.request_id == "text":
                lengths.append(len(one.outputs[0].token_ids))
        portions += images.encoded_last
    assert portions >= vision.tower.num_layers
    assert lengths == sorted(set(lengths))  # a token with every step
    assert len(lengths) >= 29


def test_rows_are_evicted_where_memory_is_short(family: Any, loaded: Loaded) -> None:
    """With room for one image: each is encoded when its turn comes."""
    vision, engine = loaded.facts.model_config.vision, loaded.engine
    pictures = some_images(vision, 2)
    ids, placed = prompt(vision, pictures, seed=30)
    wanted = answer(run(engine, job("a", ids, placed))["a"])
    images = engine.scheduler.images
    engine.reset_prefix_cache()
    images.reset()
    most = max(-(-one.num_tokens // 16) for one in pictures)
    kept, images._free = images._free[:-most], images._free[-most:]
    before = images.num_encoded
    assert answer(run(engine, job("b", ids, placed))["b"]) == wanted
    assert images.num_encoded == before + 2
    engine.reset_prefix_cache()
    found = run(engine, job("c", ids, placed), job("d", ids[1:], moved(placed, -1)))
    assert answer(found["c"]) == wanted
    images._free += kept


def test_the_plan_counts_the_tower_its_workspace_and_the_rows(loaded: Loaded) -> None:
    plan, vision = loaded.facts.plan, loaded.facts.model_config.vision
    assert plan.images is not None and loaded.runner.images is not None
    rows = loaded.runner.images.rows
    assert plan.images.rows == len(rows) and plan.images.cache == rows.nbytes
    assert plan.fixed - plan.weights - plan.workspace == plan.images.total
    # small images run together: 1,024 patches
    assert plan.images.workspace == workspace_bytes(vision, 1024)
    assert "images" in str(plan)


@pytest.mark.parametrize("rows", [None, 20])
def test_the_scheduler_counts_the_parts_of_a_run_as_the_tower_does(
    loaded: Loaded, monkeypatch: pytest.MonkeyPatch, rows: int | None
) -> None:
    """Of layers as a whole, and of layers in parts of about 20 rows."""
    vision, images = loaded.facts.model_config.vision, loaded.engine.scheduler.images
    if rows is not None:
        operations = 24 * vision.tower.hidden_size**2 * rows
        monkeypatch.setattr("sdk.models.vision.portions.PART_OPERATIONS", operations)
    monkeypatch.setattr("sdk.models.vision.portions.GROUP", 200)
    side = vision.patch * (vision.tile_side if vision.one_size else 8 * vision.merge)
    for counts in ([1], [3, 2], [1] * 5):
        inputs = [image(vision, [(side, side)] * count, i) for i, count in enumerate(counts)]
        run, parts = loaded.runner.images._tower.begin(inputs), 0
        done = False
        while not done:
            done, parts = run.advance(1), parts + 1
        assert images.limits.units(inputs) == parts


def test_rows_of_images_have_ids_of_their_own() -> None:
    ids = image_ids(b"a" * 32, 1000)
    assert len(set(ids)) == 1000 and max(ids) < 0 and min(ids) >= -(1 << 62)
    assert ids[:7] == image_ids(b"a" * 32, 7)
    assert not set(ids) & set(image_ids(b"b" * 32, 1000))
    one = PromptImage(ImageInput((), ((1, 3),), 3, b"a" * 32), ((2, 2), (5, 1)))
    assert key_ids([5, 6, 90, 90, 7, 90, 8], placed([one])) == [5, 6, *ids[:2], 7, ids[2], 8]
    assert placed_before(5, placed([one])) == ((one.image.digest, ((2, 2),)),)
    assert placed_before(2, placed([one])) == ()
    cut = key_ids([5, 6, 90], placed_before(3, placed([one])))
    assert cut == [5, 6, ids[0]]  # the first rows alone
