"""Images in the engine: tiny vision models beside transformers, and the same bits however their
prompts run."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from sdk.api.config import EngineConfig
from sdk.api.errors import RequestError
from sdk.engine.pages.image_keys import image_ids, key_ids, placed, placed_before
from sdk.engine.plan import StepResult
from sdk.loading.load import Loaded, load
from sdk.memory.images import image_memory, why_no_images
from sdk.memory.resolve import model_config, open_model
from sdk.models.vision.image import ImageInput, PromptImage
from sdk.models.vision.memory import workspace_bytes
from tests.models.tiny_mmproj import save_both
from tests.models.tiny_vision import TEXT, image, vision_model
from tests.models.tiny_vision_prompts import (
    answer,
    check_in_steps,
    check_preempted,
    expected_logits,
    job,
    prompt,
    prompt_logprobs,
    run,
    some_images,
)

FAMILIES = ("gemma3", "gemma4", "gemma4-e", "qwen3_vl", "qwen2_5_vl", "llava", "internvl")
OPTIONS: dict[str, Any] = {
    "skip_tokenizer_init": True,
    "max_model_len": 192,
    "max_num_seqs": 8,
    "kv_cache_dtype": "float32",
    "compute": "exact",
    "num_threads": 1,
}


@pytest.fixture(scope="module", params=FAMILIES)
def family(request: Any, tmp_path_factory: Any) -> tuple[str, Any, Path]:
    """A family, transformers' model and its folder."""
    name = request.param
    oracle = vision_model(name)
    folder = tmp_path_factory.mktemp(name)
    oracle.save_pretrained(folder)
    return name, oracle, folder


@pytest.fixture(scope="module")
def loaded(family: Any) -> Iterator[Loaded]:
    """An engine whose prompts run whole, if nothing else is said."""
    found = load(EngineConfig(model=str(family[2]), **OPTIONS))
    yield found
    found.engine.close()


@pytest.fixture(autouse=True)
def fresh(request: Any) -> Iterator[None]:
    """Each test begins without cached prefixes and rows, and leaves no blocks behind."""
    if "loaded" not in request.fixturenames:
        yield
        return
    engine = request.getfixturevalue("loaded").engine
    engine.reset_prefix_cache()
    engine.scheduler.images.reset()
    yield
    engine.scheduler.images.check_blocks()
    assert not engine.has_unfinished


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
    found = run(engine, job("c", ids, placed), job("d", ids[1:], _moved(placed, -1)))
    assert answer(found["c"]) == wanted
    images._free += kept


def _moved(images: Any, by: int) -> Any:
    return tuple(
        one._replace(spans=tuple((first + by, count) for first, count in one.spans))
        for one in images
    )


def test_requests_that_do_not_fit_their_images(loaded: Loaded) -> None:
    vision, engine = loaded.facts.model_config.vision, loaded.engine
    [one] = some_images(vision, 1)
    ids, placed = prompt(vision, [one])
    first, count = placed[0].spans[0]
    short = placed[0]._replace(spans=((first, count - 1),))
    cases = [
        ((ids, (short,)), "image 1: expected .* placeholders, found"),
        ((ids, _moved(placed, 1)), "image 1: expected the placeholder 90 at tokens"),
        ((ids, _moved(placed, -first - 1)), "expected its placeholders after"),
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
        [one] = _rest(engine)["b"].outputs
        assert one.finish_reason == "error" and "could not be encoded" in str(one.stop_reason)
        assert engine.dead is None
        engine.reset_prefix_cache()
        assert answer(run(engine, job("c", *fine))["c"]) == wanted
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
    done = list(_rest(engine))
    loaded.engine.close()
    assert done == ["image", "text"]


def _rest(engine: Any) -> dict[str, Any]:
    """The outputs of all requests when they have ended, in that order."""
    found = {}
    while engine.has_unfinished:
        found.update({one.request_id: one for one in engine.step() if one.finished})
    return found


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


WINDOWS = {"sliding_window": 24, "layer_types": ["sliding_attention", "full_attention"]}


@pytest.fixture(scope="module")
def windowed(tmp_path_factory: Any) -> tuple[Any, Path]:
    """A Gemma 3 with a window that is a little longer than an image, and its folder."""
    oracle = vision_model("gemma3", text_config={**TEXT, **WINDOWS})
    folder = tmp_path_factory.mktemp("windows")
    oracle.save_pretrained(folder)
    return oracle, folder


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
