"""Images in prompts: the token ids of transformers' processors, and what is refused."""

from __future__ import annotations

import base64
import io
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from sdk import RequestError, SamplingParams
from sdk.api.config import EngineConfig
from sdk.requests.prompts.kinds import ChatOptions
from sdk.requests.prompts.reader import Prompt, PromptReader
from tests.vision_prompts import (
    FAMILIES,
    GEMMA,
    LLAVA,
    PALIGEMMA,
    QWEN,
    Family,
    paligemma_ids,
    picture,
    plain_template,
    prompt_reader,
    reference_ids,
)

_PARAMS = SamplingParams()
families = pytest.mark.parametrize("family", FAMILIES.values(), ids=list(FAMILIES))


def png(pixels: Any) -> bytes:
    file = io.BytesIO()
    Image.fromarray(pixels).save(file, "PNG")
    return file.getvalue()


def data_url(pixels: Any) -> str:
    return f"data:image/png;base64,{base64.b64encode(png(pixels)).decode()}"


def image(source: Any) -> dict[str, Any]:
    return {"type": "image", "image": source}


def text(words: str) -> dict[str, Any]:
    return {"type": "text", "text": words}


def user(*parts: dict[str, Any]) -> dict[str, Any]:
    return {"role": "user", "content": list(parts)}


def chat(reader: PromptReader, *messages: dict[str, Any], **how: Any) -> Prompt:
    params = how.pop("params", _PARAMS)
    return reader.read_chat(list(messages), params, ChatOptions.of("chat", how))


def spans_of(prompt: Prompt) -> list[int]:
    return [
        place
        for one in prompt.images
        for first, count in one.spans
        for place in range(first, first + count)
    ]


# ---- equal to transformers -----------------------------------------------------------------------


@families
def test_token_ids_are_those_of_the_processor_of_transformers(
    family: Family, tmp_path: Path
) -> None:
    """Several images of odd sizes, in several turns, before, between and after texts."""
    pictures = [picture(40, 61, 1), picture(97, 30, 2), picture(33, 33, 3)]
    plain = [
        user({"type": "image"}, {"type": "image"}, text("Compare\n\nthese users")),
        {"role": "assistant", "content": "Both are noise."},
        user(text("And\n\n"), {"type": "image"}, text("\n?")),
    ]
    expected = reference_ids(family, plain, pictures)
    reader = prompt_reader(family, tmp_path)
    given = [
        user(image(pictures[0]), image(pictures[1]), text("Compare\n\nthese users")),
        plain[1],
        user(text("And\n\n"), image(pictures[2]), text("\n?")),
    ]
    prompt = chat(reader, *given)
    bos = reader.need_tokenizer("").bos_token_id
    assert [one for one in prompt.token_ids if one != bos] == [
        one for one in expected if one != bos
    ]
    assert len(prompt.images) == 3
    assert reader.images is not None
    places = [i for i, one in enumerate(prompt.token_ids) if one == reader.images.token_id]
    assert spans_of(prompt) == places and places
    for one in prompt.images:
        assert sum(count for _, count in one.spans) == one.image.num_tokens
    assert prompt.text is not None and prompt.text.count(family.image_token) == 3


@families
def test_a_text_with_placeholders_is_read_like_the_conversation(
    family: Family, tmp_path: Path
) -> None:
    reader = prompt_reader(family, tmp_path)
    assert reader.images is not None
    pictures = [picture(40, 61, 1), picture(97, 30, 2)]
    messages = [user(image(pictures[0]), text("a"), image(pictures[1]), text("b"))]
    expected = chat(reader, *messages)
    rendered = reader.need_tokenizer("").apply_chat_template(
        [user({"type": "image"}, text("a"), {"type": "image"}, text("b"))],
        image=reader.images._processor.placeholder,
    )
    prompt = reader.read({"prompt": rendered, "multi_modal_data": {"image": pictures}}, _PARAMS)
    assert prompt.token_ids == expected.token_ids
    assert [one.spans for one in prompt.images] == [one.spans for one in expected.images]
    assert prompt.text == rendered

    ids = reader.need_tokenizer("").encode(rendered)
    same = reader.read(
        {"prompt_token_ids": ids, "multi_modal_data": {"image": pictures}, "cache_salt": "s"},
        _PARAMS,
    )
    assert spans_of(same) and same.cache_salt == "s"
    if family is not GEMMA:  # its line breaks around an image merge with those of the text
        assert same.token_ids == expected.token_ids


def test_a_text_is_framed_as_the_processor_of_the_model_does(tmp_path: Path) -> None:
    """PaliGemma's sequences begin after the image and end with a line break."""
    reader, pixels = prompt_reader(PALIGEMMA, tmp_path), picture(40, 61)
    for text_ in ("<image>caption en", "<image>"):
        given = {"prompt": text_, "multi_modal_data": {"image": pixels}}
        prompt = reader.read(given, _PARAMS)
        assert list(prompt.token_ids) == paligemma_ids(text_, pixels)
        assert prompt.images[0].spans == ((0, 4),)


@families
def test_a_template_of_strings_gets_the_text_of_the_family(family: Family, tmp_path: Path) -> None:
    reader = prompt_reader(family, tmp_path, plain_template())
    prompt = chat(reader, user(image(picture(40, 61)), text("What is this?")))
    assert len(prompt.images) == 1 and prompt.text is not None
    if family is QWEN:
        begin = "[user]<|vision_start|><|image_pad|><|vision_end|>\nWhat"
        assert prompt.text.startswith(begin)
    if family is LLAVA:
        assert prompt.text.endswith("[user]<image>\nWhat is this?\n")


# ---- forms of an image ---------------------------------------------------------------------------


def test_every_form_of_an_image_is_the_same_image(tmp_path: Path) -> None:
    reader = prompt_reader(QWEN, tmp_path / "model", folder=str(tmp_path))
    pixels = picture(40, 61)
    file = tmp_path / "my photo.png"
    file.write_bytes(png(pixels))
    url = data_url(pixels)
    forms = [
        image(png(pixels)),
        image(file),
        image(str(file)),
        image(url),
        image(pixels),
        image(torch.from_numpy(pixels)),
        image(Image.fromarray(pixels)),
        {"type": "image_url", "image_url": {"url": url}},
        {"type": "image_url", "image_url": {"url": url, "detail": "high"}},
        {"type": "image_url", "image_url": url},
        {"type": "image_url", "image_url": {"url": "my photo.png"}},
        {"type": "image_url", "image_url": {"url": str(file)}},
        {"type": "image_url", "image_url": {"url": f"file://{tmp_path}/my%20photo.png"}},
    ]
    prompts = [chat(reader, user(form, text("?"))) for form in forms]
    assert len({prompt.images[0].image.digest for prompt in prompts}) == 1
    assert len({prompt.token_ids for prompt in prompts}) == 1
    one = reader.read({"prompt": "<|image_pad|>", "multi_modal_data": {"image": pixels}}, _PARAMS)
    assert one.images[0].image.digest == prompts[0].images[0].image.digest
    other = chat(reader, user(image(picture(40, 61, 9)), text("?")))
    assert other.images[0].image.digest != prompts[0].images[0].image.digest


def test_a_fetcher_gets_the_url_and_its_errors_name_the_place(tmp_path: Path) -> None:
    asked = []

    def fetch(url: str) -> bytes:
        asked.append(url)
        if "missing" in url:
            raise KeyError("no such picture")
        return png(picture(40, 61))

    reader = prompt_reader(QWEN, tmp_path, fetch=fetch)
    prompt = chat(reader, user({"type": "image_url", "image_url": {"url": "https://x.example/a"}}))
    assert len(prompt.images) == 1 and asked == ["https://x.example/a"]
    with pytest.raises(
        RequestError,
        match=r"messages\[0\]\.content\[0\]: image_fetcher failed for 'https://x.example/missing': "
        "KeyError",
    ):
        chat(reader, user(image("https://x.example/missing")))
    with pytest.raises(RequestError, match="image_fetcher: expected bytes, found 3"):
        chat(prompt_reader(QWEN, tmp_path, fetch=lambda url: 3), user(image("http://x.example/a")))


@pytest.mark.parametrize("url", ["http://127.0.0.1/a.png", "HTTPS://img.example.org/a.png"])
def test_no_url_is_fetched_without_a_fetcher(url: str, tmp_path: Path) -> None:
    reader = prompt_reader(QWEN, tmp_path)
    for part in ({"type": "image_url", "image_url": {"url": url}}, image(url)):
        with pytest.raises(RequestError, match="is not fetched; send the image itself"):
            chat(reader, user(part))


@pytest.mark.parametrize(
    "url",
    ["a.png", "/etc/passwd", "file:///etc/passwd", "ftp://x.example/a.png", "../secret.png"],
)
def test_urls_name_files_only_in_the_allowed_folder(url: str, tmp_path: Path) -> None:
    part = {"type": "image_url", "image_url": {"url": url}}
    with pytest.raises(RequestError, match=r"expected a data URL .*allowed_local_media_path"):
        chat(prompt_reader(QWEN, tmp_path / "model"), user(part))
    (tmp_path / "secret.png").write_bytes(png(picture(9, 9)))
    allowed = tmp_path / "allowed"
    allowed.mkdir()
    (allowed / "link.png").symlink_to(tmp_path / "secret.png")
    reader = prompt_reader(QWEN, tmp_path / "model", folder=str(allowed))
    why = "cannot be read" if url == "a.png" else "is not a file in the folder of allowed_local"
    with pytest.raises(RequestError, match=why):
        chat(reader, user(part))
    for outside in ("link.png", f"file://host{tmp_path}/secret.png", "a\0b", "file:///%2e%2e/x"):
        with pytest.raises(RequestError, match="is not a file in the folder"):
            chat(reader, user({"type": "image_url", "image_url": {"url": outside}}))


# ---- placeholders in what users write ------------------------------------------------------------


@families
def test_placeholders_that_a_user_types_stay_text(family: Family, tmp_path: Path) -> None:
    reader = prompt_reader(family, tmp_path)
    assert reader.images is not None
    placeholder = reader.images._processor.placeholder
    for words in (
        f"{placeholder} look",
        f"{family.image_token * 2}",
        f"{placeholder[:-1]}",
        f"{placeholder[1:]} {placeholder}",
    ):
        with_image = chat(reader, user(text(words), image(picture(40, 61)), text(words)))
        assert len(with_image.images) == 1
        token = reader.images.token_id
        assert with_image.token_ids.count(token) == with_image.images[0].image.num_tokens
        rest = [one for one in with_image.token_ids if one != token]
        decoded = reader.need_tokenizer("").decode(rest, False)
        assert decoded.replace("\n\n<start_of_image><end", "").count(words) == 2
        assert token not in chat(reader, user(text(words))).token_ids


def test_a_placeholder_that_is_no_control_token_is_guarded_too(tmp_path: Path) -> None:
    """LLaVA's files may lack the token; what stands for an image is then a text like any other."""
    family = LLAVA._replace(
        specials=("<s>", "</s>", "<im>"), image_token="<im>", roles={"eos_token": "</s>"}
    )
    reader = prompt_reader(family, tmp_path)
    prompt = chat(reader, user(text("what is <image>?"), image(picture(40, 61))))
    assert len(prompt.images) == 1
    assert "what is <image>?" in reader.need_tokenizer("").decode(prompt.token_ids, False)
    assert prompt.token_ids.count(reader.images.token_id) == prompt.images[0].image.num_tokens  # type: ignore[union-attr]


# ---- refused before anything runs ----------------------------------------------------------------


@pytest.mark.parametrize(
    ("prompt", "why"),
    [
        ("<|image_pad|> hello", "found 1; give the images, or leave the tokens out"),
        ({"prompt": "<|image_pad|>"}, "found 1; give the images"),
        ({"prompt": "hello", "multi_modal_data": {"image": picture(9, 9)}}, "found 0 for 1 images"),
        (
            {"prompt": "<|image_pad|>" * 2, "multi_modal_data": {"image": [picture(9, 9)]}},
            r"expected one <\|image_pad\|> for each image, found 2 for 1 images",
        ),
        ({"prompt": "<|image_pad|>", "multi_modal_data": {}}, "found 1 for 0 images"),
        ({"prompt": "<|image_pad|>", "multi_modal_data": {"image": None}}, "found 1 for 0 images"),
        ({"prompt": "x", "multi_modal_data": {"audio": b""}}, "audio and video are not supported"),
        ({"prompt": "x", "multi_modal_data": [b""]}, "expected {'image': one image or a list"),
        (
            {"prompt": "<|image_pad|>", "multi_modal_data": {"image": b"GIF89a nonsense"}},
            "multi_modal_data.image",
        ),
        (
            {"prompt": "x", "multi_modal_data": {"image": 3}},
            "multi_modal_data.image is of type int",
        ),
        ({"prompt_token_ids": [1], "multi_modal_data": {"image": picture(9, 9)}}, "found 0 for 1"),
        ({"prompt": 3, "multi_modal_data": {"image": picture(9, 9)}}, "prompt: expected a string"),
        ({"prompt_token_ids": ["a"], "multi_modal_data": {"image": picture(9, 9)}}, "integers"),
    ],
)
def test_prompts_and_images_that_do_not_fit_each_other(
    prompt: Any, why: str, tmp_path: Path
) -> None:
    with pytest.raises(RequestError, match=why):
        prompt_reader(QWEN, tmp_path).read(prompt, _PARAMS)


@pytest.mark.parametrize(
    ("part", "why"),
    [
        ({"type": "image"}, r"content\[1\]: expected {'type': 'image_url'"),
        ({"type": "image_url"}, r"content\[1\]: expected {'type': 'image_url'"),
        ({"type": "image_url", "image_url": {"url": ""}}, "expected {'type': 'image_url'"),
        ({"type": "image_url", "image_url": {"url": "data:", "x": 1}}, "expected {'type'"),
        ({"type": "image_url", "image_url": 3}, "expected {'type': 'image_url'"),
        ({"type": "image", "image": b"x", "more": 1}, "expected {'type': 'image_url'"),
        ({"type": "image", "image": b""}, r"messages\[0\]\.content\[1\] is empty"),
        ({"type": "image", "image": "nowhere.png"}, r"messages\[0\]\.content\[1\] is the file"),
        ({"type": "image_url", "image_url": {"url": "data:image/png;base64,%%"}}, "base64"),
        ({"type": "image_url", "image_url": {"url": "data:nothing"}}, "without a comma"),
        ({"type": "image", "image": picture(1, 999)}, r"messages\[0\]\.content\[1\]: "),
        ({"type": "video", "video": b""}, r"found type 'video' \(audio, video and files are not"),
        ({"type": "input_audio"}, "found type 'input_audio'"),
        ({"kind": "text"}, "found {'kind': 'text'} without a type"),
    ],
)
def test_parts_that_are_no_image(part: dict[str, Any], why: str, tmp_path: Path) -> None:
    with pytest.raises(RequestError, match=why):
        chat(prompt_reader(QWEN, tmp_path), user(text("a"), part, image(picture(40, 40))))


@pytest.mark.parametrize("place", ["sdk.images.decode.decode", "processor"])
def test_what_fails_unexpectedly_is_the_error_of_its_request(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, place: str
) -> None:
    reader = prompt_reader(QWEN, tmp_path)

    def failing(*args: Any, **how: Any) -> Any:
        raise MemoryError("no room")

    if place == "processor":
        monkeypatch.setattr(reader.images._processor, "_tiles", failing)  # type: ignore[union-attr]
    else:
        monkeypatch.setattr(place, failing)
    why = r"messages\[0\]\.content\[0\]: the image cannot be read: MemoryError: no room"
    with pytest.raises(RequestError, match=why):
        chat(reader, user(image(picture(40, 61)), text("?")))


def test_a_model_of_text_refuses_images_as_before(tmp_path: Path) -> None:
    reader = prompt_reader(QWEN, tmp_path)
    reader.images = None
    with pytest.raises(RequestError, match=r"found type 'image' \(images, audio and files are not"):
        chat(reader, user(image(picture(9, 9))))
    with pytest.raises(RequestError, match="multi_modal_data: expected none: this model"):
        reader.read({"prompt": "x", "multi_modal_data": {"image": picture(9, 9)}}, _PARAMS)


def test_too_many_images(tmp_path: Path) -> None:
    reader = prompt_reader(QWEN, tmp_path, most=2)
    many = [image(b"never read")] * 3
    why = r"images: expected at most 2 in a prompt, found 3; .*limit_mm_per_prompt={'image': 3}"
    with pytest.raises(RequestError, match=why):
        chat(reader, user(*many[:1]), user(*many[1:]))
    with pytest.raises(RequestError, match=why):
        reader.read({"prompt": "x", "multi_modal_data": {"image": [b""] * 3}}, _PARAMS)


def test_images_that_do_not_fit_the_context_are_named_with_their_tokens(tmp_path: Path) -> None:
    reader = prompt_reader(QWEN, tmp_path, length=30)
    small, large = picture(56, 56), picture(112, 140)  # 4 and 20 tokens
    whole = chat(reader, user(image(small), text("?")))
    assert whole.images[0].image.num_tokens == 4
    for parts in ([image(large), image(small), image(small)], [image(large), image(small)]):
        with pytest.raises(RequestError, match=r"images have 2\d of them \(20, 4.*holds 30 and 1"):
            chat(reader, user(*parts, text("what about these?")))
    with pytest.raises(RequestError, match=r"at least 32 tokens, its 8 images have 32 of them"):
        chat(reader, user(*[image(small)] * 8))
    with pytest.raises(RequestError, match=r"its image has 20 of them, but the context holds 30"):
        given = {"prompt": "<|image_pad|>" + "x" * 10, "multi_modal_data": {"image": large}}
        reader.read(given, _PARAMS)


# ---- truncation ----------------------------------------------------------------------------------


def test_truncation_drops_turns_with_their_images(tmp_path: Path) -> None:
    reader = prompt_reader(QWEN, tmp_path, length=80)
    old, new = picture(112, 140, 1), picture(112, 112, 2)  # 20 and 16 tokens
    messages = [
        {"role": "system", "content": "S"},
        user(image(old), text("a")),
        {"role": "assistant", "content": "b"},
        user(text("c"), image(new)),
    ]
    params = SamplingParams(truncate_prompt_tokens=50)
    prompt = chat(reader, *messages, params=params)
    assert [one.image.num_tokens for one in prompt.images] == [16]
    assert prompt.token_ids == chat(reader, messages[0], messages[3]).token_ids
    tools = [{"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}]
    long = prompt_reader(QWEN, tmp_path, length=4096)
    described = chat(long, *messages, tools=tools)  # a message of the system more
    fewer = len(described.token_ids) - 10
    cut = chat(long, *messages, tools=tools, params=SamplingParams(truncate_prompt_tokens=fewer))
    assert [one.image.num_tokens for one in cut.images] == [16]
    with pytest.raises(RequestError, match="have at least 46 tokens, its image has 16 of them"):
        chat(reader, *messages, params=SamplingParams(truncate_prompt_tokens=20))


def test_truncation_of_a_text_never_cuts_an_image(tmp_path: Path) -> None:
    reader = prompt_reader(QWEN, tmp_path)
    given = {"prompt": "<|image_pad|>" + "x" * 50, "multi_modal_data": {"image": picture(56, 56)}}
    fits = reader.read(given, SamplingParams(truncate_prompt_tokens=54))
    assert len(fits.token_ids) == 54
    for keep in (53, 51, 20):
        with pytest.raises(RequestError, match=r"would cut a prompt with images from 54 to"):
            reader.read(given, SamplingParams(truncate_prompt_tokens=keep))
        with pytest.raises(RequestError, match="would cut a prompt with images"):
            reader.read(given, SamplingParams(truncate_prompt_tokens=keep), room=0)
    empty = {"prompt": "x" * 50, "multi_modal_data": {}}
    assert len(reader.read(empty, SamplingParams(truncate_prompt_tokens=9)).token_ids) == 9


# ---- tools, continued answers, healing -----------------------------------------------------------


def test_images_in_results_of_tools_and_beside_calls(tmp_path: Path) -> None:
    call = {"id": "1", "type": "function", "function": {"name": "shot", "arguments": "{}"}}
    messages = [
        user(text("Look"), image(picture(40, 61, 1))),
        {"role": "assistant", "content": [text("Yes")], "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "1", "name": "shot", "content": [image(picture(97, 30))]},
    ]
    tools = [{"type": "function", "function": {"name": "shot", "parameters": {"type": "object"}}}]
    prompt = chat(prompt_reader(QWEN, tmp_path), *messages, tools=tools)
    assert len(prompt.images) == 2 and prompt.text is not None
    assert "Result of shot: <|vision_start|><|image_pad|>" in prompt.text


def test_a_continued_message_ends_with_text(tmp_path: Path) -> None:
    reader = prompt_reader(QWEN, tmp_path)
    first = user(image(picture(40, 61)))
    how = {"continue_final_message": True, "add_generation_prompt": False}
    prompt = chat(reader, first, {"role": "assistant", "content": "It is"}, **how)
    assert prompt.text is not None and prompt.text.endswith("It is") and len(prompt.images) == 1
    with pytest.raises(RequestError, match="the last message has no text to continue"):
        chat(reader, first, **how)


def test_healing_takes_no_image_tokens(tmp_path: Path) -> None:
    reader = prompt_reader(QWEN, tmp_path)
    given = {"prompt": "a<|image_pad|>", "multi_modal_data": {"image": picture(56, 56)}}
    params = SamplingParams(token_healing=True)
    assert len(reader.read(given, params).token_ids) == 5
    assert np.array_equal(spans_of(reader.read(given, params)), [1, 2, 3, 4])


def test_prompts_with_images_are_never_short(tmp_path: Path) -> None:
    """So they are read in a thread, and an event loop goes on meanwhile."""
    reader = prompt_reader(QWEN, tmp_path)
    assert reader.is_short([user(text("hello"))], None)
    assert not reader.is_short([user(image("a.png"))], None)
    assert not reader.is_short([[user({"type": "image_url", "image_url": {"url": "x"}})]], None)
    assert not reader.is_short({"prompt": "x", "multi_modal_data": {"image": "a.png"}}, None)


# ---- options -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "why"),
    [
        ({"limit_mm_per_prompt": 3}, "limit_mm_per_prompt: expected {'image': N}"),
        ({"limit_mm_per_prompt": {"pictures": 3}}, "limit_mm_per_prompt: expected {'image': N}"),
        ({"limit_mm_per_prompt": {"image": -1}}, r"expected image to be an integer in 0\.\.999"),
        ({"limit_mm_per_prompt": {"image": True}}, "expected image to be an integer"),
        ({"limit_mm_per_prompt": {"video": 1}}, r"expected video to be an integer in 0\.\.0"),
        ({"image_fetcher": "https://x.example"}, "image_fetcher: expected a function"),
        ({"allowed_local_media_path": "/no/such/folder"}, "allowed_local_media_path: expected a f"),
        ({"allowed_local_media_path": 3}, "allowed_local_media_path: expected a folder"),
    ],
)
def test_options_of_images_are_checked(options: dict[str, Any], why: str) -> None:
    with pytest.raises(RequestError, match=why):
        EngineConfig(model="m", **options)


def test_options_of_images(tmp_path: Path) -> None:
    assert EngineConfig(model="m").most_images == 999
    limits = {"image": 2, "video": 0}
    config = EngineConfig(
        model="m", limit_mm_per_prompt=limits, allowed_local_media_path=tmp_path / "."
    )
    assert config.most_images == 2
    assert config.allowed_local_media_path == str(tmp_path.resolve())
