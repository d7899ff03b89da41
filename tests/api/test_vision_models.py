"""Tiny random vision models from files to answers, beside transformers."""

from __future__ import annotations

import asyncio
import base64
import io
import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from PIL import Image

from sdk import LLM, BeamSearchParams, RequestError, SamplingParams, Snapshot
from sdk.requests.prompts.kinds import ChatOptions
from sdk.serving import create_app
from tests.models.tiny_vision import MODELS, vision_model
from tests.serving.serving import running
from tests.vision_prompts import (
    GEMMA,
    GEMMA4,
    LLAVA,
    PALIGEMMA,
    QWEN,
    Family,
    paligemma_inputs,
    picture,
    reference_ids,
    reference_inputs,
    token_of,
    with_images,
    write_tokenizer,
)

#: Sides of the models of tests/models/tiny_vision.py.
GEMMA_56 = GEMMA._replace(
    config={"mm_tokens_per_image": 16}, size={"size": {"height": 56, "width": 56}}
)
QWEN_4 = QWEN._replace(
    size={
        "patch_size": 4,
        "size": {"shortest_edge": 64, "longest_edge": 8 * 8 * 24},
    }
)
LLAVA_56 = LLAVA._replace(
    config={**LLAVA.config, "vision_config": {"image_size": 56, "patch_size": 7}},
    size={"size": {"shortest_edge": 56}, "crop_size": {"height": 56, "width": 56}},
)
SEVERAL = [
    {"role": "user", "content": [{"type": "image"}, {"type": "text", "text": "Compare with"}]},
    {"role": "assistant", "content": "What?"},
    {"role": "user", "content": [{"type": "text", "text": "this"}, {"type": "image"}]},
]


def write_model(family: Family, folder: Path) -> None:
    """A folder with weights, tokenizer and the settings of preprocessing."""
    write_tokenizer(family, folder)
    token = token_of(family, folder)
    given = MODELS[family.model_type]
    key = next(name for name in given if name.startswith("image_token"))
    text = {**given["text_config"], "vocab_size": 320, "max_position_embeddings": 512}
    if "sliding_window" in text:
        text["sliding_window"] = 96  # more than an image has, and less than a prompt
    ends = {name: token_of(family, folder, family.specials[0]) for name in _ENDS}
    model = vision_model(family.model_type, text_config={**text, **ends}, **{key: token})
    model.save_pretrained(folder)
    settings = {"image_processor_type": family.kind, **family.size}
    (folder / "preprocessor_config.json").write_text(json.dumps(settings))


_ENDS = ("bos_token_id", "eos_token_id", "pad_token_id")


@pytest.fixture(
    scope="module",
    params=[GEMMA_56, GEMMA4, QWEN_4, LLAVA_56],
    ids=lambda family: family.model_type,
)
def seeing(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> tuple[Family, Path]:
    folder = tmp_path_factory.mktemp("vision")
    write_model(request.param, folder)
    return request.param, folder


GREEDY = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True, logprobs=1)


@pytest.fixture(scope="module")
def llm(seeing: tuple[Family, Path]) -> Iterator[LLM]:
    exact = {"dtype": "float32", "kv_cache_dtype": "float32", "compute": "exact"}
    with LLM(str(seeing[1]), max_model_len=512, num_threads=1, **exact) as made:
        yield made


def expected(
    family: Family, folder: Path, messages: list[dict[str, Any]], pictures: list[Any]
) -> list[tuple[int, float]]:
    """The greedy answer of transformers with its log-probabilities."""
    return generated(folder, reference_inputs(family, messages, pictures))


def generated(folder: Path, given: dict[str, Any]) -> list[tuple[int, float]]:
    """The same for the arguments of its model."""
    model = transformers.AutoModelForImageTextToText.from_pretrained(folder).eval()
    with torch.no_grad():
        found = model.generate(
            **given,
            max_new_tokens=GREEDY.max_tokens,
            min_new_tokens=GREEDY.max_tokens,
            do_sample=False,
            return_dict_in_generate=True,
            output_logits=True,
        )
    rows = torch.cat(list(found.logits)).float().log_softmax(-1)
    ids = found.sequences[0, given["input_ids"].shape[1] :].tolist()
    return [(token, float(row[token])) for token, row in zip(ids, rows, strict=True)]


def answer(output: Any) -> list[tuple[int, float]]:
    [one] = output.outputs
    pairs = zip(one.token_ids, one.logprobs, strict=True)
    return [(token, chances[token].logprob) for token, chances in pairs]


@pytest.mark.parametrize("count", [0, 1, 2])
def test_conversations_are_answered_as_by_transformers(
    seeing: tuple[Family, Path], llm: LLM, count: int
) -> None:
    """Images of odd sizes in several turns; also without any."""
    family, folder = seeing
    pictures = [picture(40, 61, 1), picture(97, 30, 2)][:count]
    messages = SEVERAL if count == 2 else SEVERAL[:1] if count else [SEVERAL[1] | {"role": "user"}]
    [output] = llm.chat(with_images(messages, pictures), GREEDY)
    given = reference_ids(family, messages, pictures)
    assert output.prompt_token_ids is not None
    assert list(output.prompt_token_ids) == given
    ids, chances = zip(*answer(output), strict=True)
    other, numbers = zip(*expected(family, folder, messages, pictures), strict=True)
    assert ids == other
    assert max(abs(one - two) for one, two in zip(chances, numbers, strict=True)) < 2e-4


def test_every_way_to_ask_gives_the_same_answer(llm: LLM) -> None:
    """Streams, event loops, batches, text prompts and requests that are stepped by hand."""
    messages = with_images(SEVERAL, [picture(40, 61, 1), picture(97, 30, 2)])
    [first] = llm.chat(messages, GREEDY)
    both = llm.chat([messages, [SEVERAL[1] | {"role": "user"}]], GREEDY)
    assert answer(both[0]) == answer(first)
    pieces = [p.outputs[0].token_ids for p in llm.stream(messages, GREEDY)]
    assert [token for piece in pieces for token in piece] == list(first.outputs[0].token_ids)
    [output] = asyncio.run(llm.achat(messages, GREEDY))
    assert answer(output) == answer(first)

    async def streamed() -> list[int]:
        return [t async for p in llm.astream(messages, GREEDY) for t in p.outputs[0].token_ids]

    assert asyncio.run(streamed()) == list(first.outputs[0].token_ids)
    [(_, output)] = list(llm.as_completed([messages], GREEDY))
    assert answer(output) == answer(first)
    [name] = llm.enqueue(messages, GREEDY)
    [output] = llm.wait_for_completion()
    assert output.request_id == name and answer(output) == answer(first)
    reader = llm._reader.images
    assert reader is not None
    tokenizer = llm._reader.need_tokenizer("")
    text = tokenizer.apply_chat_template(SEVERAL, image=reader._processor.placeholder)
    data = {"image": [picture(40, 61, 1), picture(97, 30, 2)]}
    prompt = {"prompt": text, "multi_modal_data": data}
    [output] = llm.generate(prompt, GREEDY)
    assert answer(output) == answer(first)
    assert first.prompt_token_ids is not None
    assert llm.estimate(messages, GREEDY).num_prompt_tokens == len(first.prompt_token_ids)


def test_a_fork_reads_images_with_the_same_weights(llm: LLM) -> None:
    messages = with_images(SEVERAL, [picture(40, 61, 1), picture(97, 30, 2)])
    with llm.fork() as other:
        assert answer(other.chat(messages, GREEDY)[0]) == answer(llm.chat(messages, GREEDY)[0])


@dataclass
class Colors:
    red: bool
    count: int


def test_answers_are_typed_and_tools_are_called(llm: LLM) -> None:
    question = with_images(SEVERAL[:1], [picture(40, 61, 1)])
    params = SamplingParams(temperature=0, max_tokens=120, seed=1)
    [output] = llm.chat(question, params, returns=Colors)
    assert output.outputs[0].finish_reason in ("stop", "length")
    if output.outputs[0].finish_reason == "stop":
        assert isinstance(output.parsed, Colors)

    def zoom(factor: int) -> str:
        """Look closer."""
        return str(factor)

    [output] = llm.chat(question, params, tools=[zoom], tool_choice="required")
    assert output.outputs[0].text or output.message.tool_calls


def test_questions_about_the_same_image_share_its_prefix(llm: LLM) -> None:
    llm.reset_prefix_cache()
    image = {"type": "image", "image": picture(56, 56, 5)}

    def ask(words: str, part: dict[str, Any] = image) -> int:
        said = [part, {"type": "text", "text": words}]
        [output] = llm.chat([{"role": "user", "content": said}], GREEDY)
        return output.num_cached_tokens or 0

    assert ask("What is it?") == 0
    assert ask("Which color has it?") >= 16
    assert ask("What is it?", {"type": "image", "image": picture(56, 56, 6)}) < 16
    assert ask("What is it?", {"type": "image", "image": picture(56, 56, 5)}) >= 16


def test_one_request_that_is_refused_changes_nothing_for_others(llm: LLM) -> None:
    fine = with_images(SEVERAL[:1], [picture(40, 61, 1)])
    [before] = llm.chat(fine, GREEDY)
    for wrong in (b"no image", "nowhere.png"):
        with pytest.raises(RequestError, match=r"messages\[0\]\.content\[0\]"):
            llm.chat([fine, with_images(SEVERAL[:1], [wrong])], GREEDY)
    many = with_images([SEVERAL[0], SEVERAL[1]] * 40, [picture(56, 56, 1)] * 40)
    with pytest.raises(RequestError, match="but the context holds 512"):
        llm.chat(many, GREEDY)
    [after] = llm.chat(fine, GREEDY)
    assert answer(after) == answer(before)


def test_a_pinned_image_stays_and_another_is_not_taken_for_it(llm: LLM) -> None:
    asked = with_images(SEVERAL[:1], [picture(40, 61, 21)])
    [wanted] = llm.chat(asked, GREEDY)
    llm.reset_prefix_cache()
    kept = llm.pin(asked)
    assert kept >= 16 and llm.get_metrics()["num_pages_pinned"] > 0
    [after] = llm.chat(asked, GREEDY)
    assert answer(after) == answer(wanted) and (after.num_cached_tokens or 0) >= kept
    [other] = llm.chat(with_images(SEVERAL[:1], [picture(40, 61, 22)]), GREEDY)
    assert (other.num_cached_tokens or 0) < 16
    assert not llm.unpin(with_images(SEVERAL[:1], [picture(40, 61, 22)]))
    assert llm.unpin(asked) and llm.get_metrics()["num_pages_pinned"] == 0


def test_a_snapshot_brings_back_the_prefix_of_an_image_without_its_encoding(
    llm: LLM, seeing: tuple[Family, Path], tmp_path: Path
) -> None:
    """In another engine, from a file; another image is not taken for it."""
    asked = with_images(SEVERAL, [picture(40, 61, 41), picture(90, 30, 42)])
    [wanted] = llm.chat(asked, GREEDY)
    snapshot = llm.snapshot(asked)
    assert 1 <= len(snapshot.images) <= 2 and snapshot.num_tokens >= 16
    snapshot.save(tmp_path / "seen.kv")
    read = Snapshot.load(tmp_path / "seen.kv")
    assert read.images == snapshot.images and read.token_ids == snapshot.token_ids
    exact = {"dtype": "float32", "kv_cache_dtype": "float32", "compute": "exact"}
    with LLM(str(seeing[1]), max_model_len=512, num_threads=1, **exact) as other:
        assert other.restore(tmp_path / "seen.kv") == snapshot.num_tokens
        [after] = other.chat(asked, GREEDY)
        assert answer(after) == answer(wanted)
        assert (after.num_cached_tokens or 0) >= 16
        images = other._driver._engine.scheduler.images
        assert images is not None
        ends = [one.spans[-1][0] + one.spans[-1][1] for one in snapshot.images]
        whole = sum(end < snapshot.num_tokens for end in ends)
        assert whole >= 1 and images.num_encoded == 2 - whole
        changed = with_images(SEVERAL, [picture(40, 61, 43), picture(90, 30, 42)])
        [different] = other.chat(changed, GREEDY)
        assert (different.num_cached_tokens or 0) < 16


def test_an_unfinished_request_with_an_image_can_be_saved(llm: LLM) -> None:
    asked = with_images(SEVERAL[:1], [picture(40, 61, 51)])
    llm.reset_prefix_cache()
    [request_id] = llm.enqueue(asked, GREEDY.clone(max_tokens=40))
    llm.step()
    request = llm._driver._engine.scheduler.queues.unfinished[request_id]
    while request.num_computed < request.num_prompt_tokens:
        llm.step()
    saved = llm.snapshot(request_id=request_id)
    llm.abort(request_id)
    assert saved.images and saved.num_tokens >= 16
    llm.reset_prefix_cache()
    assert llm.restore(saved) == saved.num_tokens
    [again] = llm.chat(asked, GREEDY)
    assert (again.num_cached_tokens or 0) >= 16


def test_an_estimate_counts_the_work_of_the_tower(llm: LLM) -> None:
    """Of an image that is not cached, once; the seconds of the tower are set here."""
    known = with_images(SEVERAL[:1], [picture(40, 61, 31)])
    llm.chat([known, [SEVERAL[1] | {"role": "user"}]], GREEDY)
    images = llm._driver._engine.scheduler.images
    assert images is not None
    images._seconds_per_work = 1000.0
    cached = llm.estimate(known, GREEDY)
    assert cached.num_cached_tokens >= 16 and cached.first_token < 100
    for count in (1, 2):
        pictures = [picture(40, 61, 32)] * count
        other = llm.estimate(with_images(SEVERAL[: 2 * count - 1], pictures), GREEDY)
        [one] = llm._reader.read_chat(
            with_images(SEVERAL[:1], pictures[:1]), GREEDY, ChatOptions()
        ).images
        layers = images.limits.vision.tower.num_layers
        seconds = 1000 * layers * images.limits.work(one.image)
        assert seconds <= other.first_token <= seconds + 100
        assert other.finish_range is not None and other.finish_range[0] > seconds / 100
    images._seconds_per_work = None
    assert llm.estimate(with_images(SEVERAL[:1], [picture(40, 61, 33)]), GREEDY).finish is None


def test_several_answers_and_beams_about_an_image(llm: LLM) -> None:
    """Each as if it had been asked for alone."""
    asked = with_images(SEVERAL[:1], [picture(40, 61, 1)])
    drawn = GREEDY.clone(temperature=1.0, seed=5, n=3)
    [three] = llm.chat(asked, drawn)
    assert len({tuple(one.token_ids) for one in three.outputs}) > 1
    llm.reset_prefix_cache()
    [again] = llm.chat(asked, drawn)
    assert [one.token_ids for one in again.outputs] == [one.token_ids for one in three.outputs]
    [greedy] = llm.chat(asked, GREEDY)
    reader = llm._reader.images
    assert reader is not None and greedy.prompt_token_ids is not None
    text = llm._reader.need_tokenizer("").apply_chat_template(
        SEVERAL[:1], image=reader._processor.placeholder
    )
    given = {"prompt": text, "multi_modal_data": {"image": picture(40, 61, 1)}}
    [beams] = llm.beam_search(
        [given], BeamSearchParams(beam_width=1, max_tokens=6, ignore_eos=True)
    )
    [beam] = beams.sequences
    assert beam.tokens[len(greedy.prompt_token_ids) :] == list(greedy.outputs[0].token_ids)


def test_an_embedding_of_a_prompt_with_an_image_is_the_hidden_state_of_transformers(
    seeing: tuple[Family, Path], llm: LLM
) -> None:
    family, folder = seeing
    pixels = picture(40, 61, 1)
    given = reference_inputs(family, SEVERAL[:1], [pixels])
    model = transformers.AutoModelForImageTextToText.from_pretrained(folder).eval()
    with torch.no_grad():
        states = model.model(**given).last_hidden_state[0, -1]
    reader = llm._reader.images
    assert reader is not None
    text = llm._reader.need_tokenizer("").apply_chat_template(
        SEVERAL[:1], image=reader._processor.placeholder
    )
    [found] = llm.embed({"prompt": text, "multi_modal_data": {"image": pixels}})
    expected_ = torch.nn.functional.normalize(states, dim=0)
    assert (torch.tensor(found.embedding) - expected_).abs().max() < 1e-5
    [other] = llm.embed({"prompt": text, "multi_modal_data": {"image": picture(40, 61, 2)}})
    assert (torch.tensor(other.embedding) - expected_).abs().max() > 1e-3


def test_the_server_answers_about_an_image(llm: LLM) -> None:
    file = io.BytesIO()
    Image.fromarray(picture(40, 61, 1)).save(file, "PNG")
    url = f"data:image/png;base64,{base64.b64encode(file.getvalue()).decode()}"
    part = {"type": "image_url", "image_url": {"url": url}}
    said = {"role": "user", "content": [part, {"type": "text", "text": "Compare with"}]}
    [expected_] = llm.chat(with_images(SEVERAL[:1], [picture(40, 61, 1)]), GREEDY)
    body = {"messages": [said], "temperature": 0, "max_tokens": 6, "ignore_eos": True}
    with running(create_app({"tiny": llm})) as client:
        found = client.post("/v1/chat/completions", body)
        assert found.status == 200, found.body
        assert found.json["choices"][0]["message"]["content"] == expected_.outputs[0].text
        assert expected_.prompt_token_ids is not None
        assert found.json["usage"]["prompt_tokens"] == len(expected_.prompt_token_ids)
        counted = client.post("/tokenize", {"messages": [said]}).json
        assert counted["tokens"] == list(expected_.prompt_token_ids)


def test_paligemma_answers_texts_as_in_transformers(tmp_path: Path) -> None:
    """It has no chat template. The whole prompt sees itself, so beams cannot continue it."""
    family = PALIGEMMA._replace(
        config={"vision_config": {"image_size": 56, "patch_size": 7}},
        size={"size": {"height": 56, "width": 56}, "image_seq_length": 64},
    )
    write_model(family, tmp_path)
    own, text = picture(40, 61, 1), "<image>caption en"
    given = paligemma_inputs(text, own, family.size["size"], 64)
    exact = {"dtype": "float32", "kv_cache_dtype": "float32", "compute": "exact"}
    with LLM(str(tmp_path), max_model_len=256, num_threads=1, **exact) as llm:
        prompt = {"prompt": text, "multi_modal_data": {"image": own}}
        [output] = llm.generate(prompt, GREEDY)
        assert list(output.prompt_token_ids or ()) == given["input_ids"][0].tolist()
        with pytest.raises(RequestError, match="beam_search: expected prompts without images"):
            llm.beam_search(prompt, BeamSearchParams(beam_width=2, max_tokens=2))
    ids, chances = zip(*answer(output), strict=True)
    other, numbers = zip(*generated(tmp_path, given), strict=True)
    assert ids == other
    assert max(abs(one - two) for one, two in zip(chances, numbers, strict=True)) < 2e-4


def test_prompts_may_have_no_images(seeing: tuple[Family, Path]) -> None:
    _, folder = seeing
    limits = {"image": 0}
    with LLM(str(folder), max_model_len=64, num_threads=1, limit_mm_per_prompt=limits) as llm:
        with pytest.raises(RequestError, match="images, audio and files are not supported"):
            llm.chat(with_images(SEVERAL, [picture(9, 9)] * 2))
        [output] = llm.chat([SEVERAL[1] | {"role": "user"}], GREEDY)
        assert len(output.outputs[0].token_ids) == 6
