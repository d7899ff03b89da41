"""Tiny random vision models: what is read of their files to read images."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from sdk import LLM, RequestError, SamplingParams
from sdk.loading.load import ModelFacts
from sdk.requests.prompt_kinds import ChatOptions
from sdk.requests.served import image_reader_of
from tests.models.tiny_vision import MODELS, vision_model
from tests.vision_prompts import (
    GEMMA,
    QWEN,
    Family,
    picture,
    reference_ids,
    token_of,
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
SEVERAL = [
    {"role": "user", "content": [{"type": "image"}, {"type": "text", "text": "Compare with"}]},
    {"role": "assistant", "content": "What?"},
    {"role": "user", "content": [{"type": "text", "text": "this"}, {"type": "image"}]},
]


def with_images(messages: list[dict[str, Any]], images: list[Any]) -> list[dict[str, Any]]:
    """The messages with an image in each plain part."""
    left = iter(images)

    def filled(part: dict[str, Any]) -> dict[str, Any]:
        return {**part, "image": next(left)} if part["type"] == "image" else part

    return [
        one
        if isinstance(one["content"], str)
        else {**one, "content": [filled(part) for part in one["content"]]}
        for one in messages
    ]


def write_model(family: Family, folder: Path) -> None:
    """A folder with weights, tokenizer and the settings of preprocessing."""
    write_tokenizer(family, folder)
    token = token_of(family, folder)
    given = MODELS[family.model_type]
    key = next(name for name in given if name.startswith("image_token"))
    text = {**given["text_config"], "vocab_size": 320, "max_position_embeddings": 512}
    ends = {name: token_of(family, folder, family.specials[0]) for name in _ENDS}
    model = vision_model(family.model_type, text_config={**text, **ends}, **{key: token})
    model.save_pretrained(folder)
    settings = {"image_processor_type": family.kind, **family.size}
    (folder / "preprocessor_config.json").write_text(json.dumps(settings))


_ENDS = ("bos_token_id", "eos_token_id", "pad_token_id")


@pytest.fixture(scope="module", params=[GEMMA_56, QWEN_4], ids=["gemma3", "qwen2_5_vl"])
def seeing(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> tuple[Family, Path]:
    folder = tmp_path_factory.mktemp("vision")
    write_model(request.param, folder)
    return request.param, folder


def facts_of(llm: LLM) -> ModelFacts:
    return llm._served.facts  # type: ignore[attr-defined, no-any-return]


def test_images_are_read_as_the_files_of_the_model_say(seeing: tuple[Family, Path]) -> None:
    family, folder = seeing
    pictures = [picture(40, 61, 1), picture(97, 30, 2)]
    with LLM(str(folder), max_model_len=256, num_threads=1) as llm:
        reader = image_reader_of(facts_of(llm))
        assert reader is not None
        llm._reader.images = reader
        messages = with_images(SEVERAL, pictures)
        prompt = llm._reader.read_chat(messages, SamplingParams(), ChatOptions())
        bos = llm.get_tokenizer().bos_token_id
        expected = reference_ids(family, SEVERAL, pictures)
        assert [i for i in prompt.token_ids if i != bos] == [i for i in expected if i != bos]
        [job] = llm._job_maker.make([prompt], [SamplingParams()])
        assert job.spec.images == prompt.images and len(prompt.images) == 2


def test_prompts_may_have_no_images(seeing: tuple[Family, Path]) -> None:
    _, folder = seeing
    limits = {"image": 0}
    with LLM(str(folder), max_model_len=64, num_threads=1, limit_mm_per_prompt=limits) as llm:
        assert image_reader_of(facts_of(llm)) is None
        with pytest.raises(RequestError, match="images, audio and files are not supported"):
            llm.chat(with_images(SEVERAL, [picture(9, 9)] * 2))
