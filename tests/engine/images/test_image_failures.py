"""Images that a request may not have, and images that cannot be encoded: neither harms others."""

from __future__ import annotations

from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from sdk.api.config import EngineConfig
from sdk.api.errors import RequestError
from sdk.engine.plan import StepResult
from sdk.loading.load import Loaded, load
from sdk.memory.images import image_memory, why_no_images
from sdk.memory.resolve import model_config, open_model
from sdk.models.vision.image import ImageInput
from tests.models.tiny_vision import TEXT, WINDOWS, vision_model
from tests.models.tiny_vision_prompts import (
    OPTIONS,
    answer,
    job,
    moved,
    prompt,
    rest,
    run,
    some_images,
)


def test_requests_that_do_not_fit_their_images(loaded: Loaded) -> None:
    vision, engine = loaded.facts.model_config.vision, loaded.engine
    [one] = some_images(vision, 1)
    ids, placed = prompt(vision, [one])
    first, count = placed[0].spans[0]
    short = placed[0]._replace(spans=((first, count - 1),))
    cases = [
        ((ids, (short,)), "image 1: expected .* placeholders, found"),
        ((ids, moved(placed, 1)), "image 1: expected the placeholder 90 at tokens"),
        ((ids, moved(placed, -first - 1)), "expected its placeholders after"),
        ((ids[: first + count], placed), "before the last of the prompt's"),
        (([*ids, 90], placed), "images: expected .* placeholders"),
        ((ids, placed + placed), "image 2: expected its placeholders after those of the image"),
    ]
    for (tokens, images), why in cases:
        with pytest.raises(RequestError, match=why):
            engine.add(job("a", tokens, images))
    guided = replace(job("a", ids, placed, guidance_scale=2.0), negative_prompt_token_ids=(5, 90))
    with pytest.raises(RequestError, match=r"the negative prompt .* found the placeholder 90"):
        engine.add(guided)
    [tile] = one.tiles
    huge = one._replace(tiles=(tile.repeat(200, axis=0).repeat(200, axis=1),))
    [(rows, columns)] = one.grids
    huge = huge._replace(grids=((200 * rows, 200 * columns),), num_tokens=40000 * rows * columns)
    wrong = [
        (huge, "expected at most .* patches in a tile|a tile of .* patches, expected|placeholders"),
        (one._replace(tiles=()), "expected tiles and a digest of bytes, found 0 tiles"),
        (one._replace(digest="abc"), "expected tiles and a digest of bytes, found 1 tiles and 'ab"),
        (one._replace(grids=one.grids * 2), "1 tiles, expected as many grids, not 2"),
        (one._replace(grids=((rows, columns + 1),)), "a tile of .* pixels and .* tokens, expected"),
        (one._replace(num_tokens=one.num_tokens + 1), rf"tokens, expected {one.num_tokens}"),
        (one._replace(tiles=(tile.astype("float32"),)), "a tile of float32 and shape"),
        (one._replace(tiles=(tile[..., :1],)), "a tile of uint8 and shape"),
        (one._replace(tiles=(tile[:0],)), "a tile of uint8 and shape"),
        (one._replace(tiles=(tile[0],)), "a tile of uint8 and shape"),
    ]
    for bad, why in wrong:
        with pytest.raises(RequestError, match=f"image 1: .*({why})"):
            engine.add(job("a", ids, (placed[0]._replace(image=bad),)))
    assert not engine.has_unfinished


def test_a_span_wider_than_the_window_is_refused(tmp_path: Path) -> None:
    text = {**TEXT, **WINDOWS, "sliding_window": 8}
    vision_model("gemma3", text_config=text).save_pretrained(tmp_path)
    loaded = load(EngineConfig(model=str(tmp_path), **OPTIONS))
    vision = loaded.facts.model_config.vision
    ids, placed = prompt(vision, some_images(vision, 1))
    with pytest.raises(
        RequestError, match=r"image 1: expected at most 8 tokens that see each other"
    ):
        loaded.engine.add(job("a", ids, placed))
    loaded.engine.close()


def test_steps_have_room_for_an_image_unless_the_caller_says_how_large_they_are(
    tmp_path: Path,
) -> None:
    """Images of Gemma 3 have 256 tokens, as many as a step on a CPU has for other models."""
    vision_model("gemma3").save_pretrained(tmp_path)
    options = {**OPTIONS, "max_num_seqs": 250}
    for asked, answered in ((None, True), (260, False)):
        loaded = load(EngineConfig(model=str(tmp_path), max_num_batched_tokens=asked, **options))
        vision = loaded.facts.model_config.vision
        ids, placed = prompt(vision, some_images(vision, 1))
        if answered:
            assert len(answer(run(loaded.engine, job("a", ids, placed))["a"])) == 4
        else:
            with pytest.raises(RequestError, match="expected at most 10 tokens that see each"):
                loaded.engine.add(job("a", ids, placed))
        loaded.engine.close()


@pytest.mark.parametrize("option", ["enable_chunked_prefill", "pipeline_parallel_size"])
def test_what_excludes_images(family: Any, option: str) -> None:
    """Text alone is read, unless images were asked for. Stages exclude only images that enter
    several layers."""
    name, _, folder = family
    options: dict[str, Any] = {"enable_chunked_prefill": False, "max_num_batched_tokens": 192}
    why = "enable_chunked_prefill"
    if option == "pipeline_parallel_size":
        options, why = {option: 2}, "pipeline_parallel_size=1"
    config = EngineConfig(model=str(folder), **OPTIONS, **options)
    with closing(open_model(config)) as checkpoint:
        model = model_config(config, checkpoint)
        if option == "pipeline_parallel_size" and name != "qwen3_vl":
            assert why_no_images(config, model) is None
            return
        assert why in (why_no_images(config, model) or "")
        assert image_memory(config, checkpoint, model) is None
        asked = replace(config, limit_mm_per_prompt={"image": 1})
        with pytest.raises(RequestError, match=rf"limit_mm_per_prompt: expected .*{why}"):
            image_memory(asked, checkpoint, model)


@pytest.fixture
def breaks(loaded: Loaded, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Images that the tower cannot encode, by their tiles."""
    broken: list[ImageInput] = []
    rank = loaded.runner.images
    assert rank is not None
    begin = rank._tower.begin

    def failing(images: Any) -> Any:
        run = begin(images)
        if any(one.tiles is image.tiles for one in broken for image in images):

            def advance(layers: int) -> bool:
                raise MemoryError("no room for a tile")

            monkeypatch.setattr(run, "advance", advance)
        return run

    monkeypatch.setattr(rank._tower, "begin", failing)
    return broken


def test_an_image_that_cannot_be_encoded_ends_its_requests_alone(
    loaded: Loaded, breaks: Any
) -> None:
    """Also where images were to be encoded together, and where requests share the image."""
    vision, engine = loaded.facts.model_config.vision, loaded.engine
    good, bad = some_images(vision, 2)
    fine, bad_ids = prompt(vision, [good], seed=50), prompt(vision, [bad], seed=51)
    text, _ = prompt(vision, [], seed=52)
    wanted = [answer(run(engine, job("a", *fine))["a"]), answer(run(engine, job("b", text))["b"])]
    healthy = answer(run(engine, job("c", *bad_ids))["c"])
    engine.reset_prefix_cache()
    engine.scheduler.images.reset()
    breaks.append(bad)
    found = run(
        engine, job("fine", *fine), job("bad", *bad_ids), job("text", text), job("same", *bad_ids)
    )
    assert [answer(found["fine"]), answer(found["text"])] == wanted
    for name in ("bad", "same"):
        [one] = found[name].outputs
        assert one.finish_reason == "error" and not one.token_ids
        assert "the image could not be encoded: MemoryError: no room for a tile" in str(
            one.stop_reason
        )
    assert engine.dead is None
    engine.scheduler.images.check_blocks()
    # an image that fails later ends a prompt that has run in part
    both, placed = prompt(vision, [good, bad], seed=53)
    [one] = run(engine, job("both", both, placed))["both"].outputs
    assert one.finish_reason == "error"
    # and nothing of the failure is left where the tower works again
    breaks.clear()
    assert answer(run(engine, job("d", *bad_ids))["d"]) == healthy


@pytest.mark.slow
@pytest.mark.parametrize("option", ["tensor_parallel_size", "pipeline_parallel_size"])
def test_a_failure_on_another_rank_ends_the_request_too(tmp_path: Path, option: str) -> None:
    """The tile of an image changes after it was checked, in every rank's process."""
    vision_model("gemma3").save_pretrained(tmp_path)
    loaded = load(EngineConfig(model=str(tmp_path), **OPTIONS, **{option: 2}))
    try:
        vision, engine = loaded.facts.model_config.vision, loaded.engine
        good, bad = some_images(vision, 2)
        fine, ids = prompt(vision, [good], seed=1), prompt(vision, [bad], seed=2)
        wanted = answer(run(engine, job("a", *fine))["a"])
        engine.add(job("b", *ids))
        bad.tiles[0].resize((56, 49, 3), refcheck=False)
        [one] = rest(engine)["b"].outputs
        assert one.finish_reason == "error" and "could not be encoded" in str(one.stop_reason)
        assert engine.dead is None
        engine.reset_prefix_cache()
        assert answer(run(engine, job("c", *fine))["c"]) == wanted
    finally:
        loaded.engine.close()


def test_a_portion_that_fails_late_gives_its_blocks_back_once(loaded: Loaded, breaks: Any) -> None:
    """The run was given up, or all rows forgotten, while the portion was in flight."""
    vision, engine = loaded.facts.model_config.vision, loaded.engine
    scheduler, images = engine.scheduler, engine.scheduler.images
    [bad] = some_images(vision, 1)
    ids, placed = prompt(vision, [bad], seed=54)
    breaks.append(bad)
    for forget in (images.give_up, images.reset):
        images._seconds_per_work = 1e9  # one layer at a time
        engine.add(job("a", ids, placed))
        plan = scheduler.plan()
        assert plan is not None and plan.encoding is not None and images._run is not None
        loaded.runner.launch(plan)
        forget()
        scheduler.commit(StepResult(plan.step_id, unencoded={bad.key: "late"}))
        images.check_blocks()
        engine.abort(["a"])
        run(engine, job("b", prompt(vision, [], seed=55)[0]))
