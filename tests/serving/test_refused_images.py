"""Images that a server answers about and images that it refuses, with a real engine: each refusal
is one line with status 400, and the engine answers afterwards."""

from __future__ import annotations

import base64
import io
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
from PIL import Image

from sdk import LLM
from sdk.serving import create_app
from sdk.testing import tiny_model
from tests.api.test_vision_models import QWEN_4, write_model
from tests.serving.serving import Client, Response, running
from tests.vision_prompts import picture

TEXT = {"type": "text", "text": "hi"}
RGB = Image.fromarray(picture(40, 61, 1))
TURNED = Image.Exif()
TURNED[0x0112] = 6


def saved(image: Image.Image, kind: str = "PNG", **how: Any) -> bytes:
    file = io.BytesIO()
    image.save(file, kind, **how)
    return file.getvalue()


READ = {
    "RGB": saved(RGB),
    "animated GIF": saved(RGB, "GIF", save_all=True, append_images=[RGB.rotate(90)]),
    "CMYK": saved(RGB.convert("CMYK"), "JPEG"),
    "16 bits": saved(Image.fromarray(np.full((40, 61), 30000, np.uint16))),
    "palette": saved(RGB.convert("P")),
    "EXIF": saved(RGB, "JPEG", exif=TURNED),
    "one pixel": saved(Image.new("RGB", (1, 1))),
}
REFUSED = {
    "damaged": (b"\x89PNG\r\n\x1a\n" + b"x" * 50, "is a damaged PNG file (it breaks off)"),
    "truncated PNG": (saved(RGB)[:-300], "is a damaged PNG file (it breaks off)"),
    "truncated JPEG": (saved(RGB, "JPEG")[:-200], "is damaged or not supported (image file is t"),
    "text": (b"hello world", "is not an image file that can be recognized"),
    "sound": (b"RIFF\0\0\0\0WAVEfmt ", "is WAV audio, expected PNG"),
    "bomb": (saved(Image.new("1", (9000, 9000))), "has 9000 x 9000 = 81,000,000 pixels, expected"),
    "thin": (saved(Image.new("RGB", (1, 4000))), "more than 200 times longer than wide"),
}


@pytest.fixture(scope="module")
def client(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Client]:
    """Qwen3-VL, "v", and a model of text, "t"."""
    folder = tmp_path_factory.mktemp("models")
    write_model(QWEN_4._replace(model_type="qwen3_vl"), folder / "v")
    with (
        LLM(str(folder / "v"), max_model_len=512, num_threads=1) as seeing,
        LLM(str(tiny_model(folder)), num_threads=1) as reading,
        running(create_app({"v": seeing, "t": reading})) as made,
    ):
        yield made


def plain(data: bytes) -> str:
    return base64.b64encode(data).decode()


def url(data: bytes) -> str:
    return f"data:image/png;base64,{plain(data)}"


def asked(content: list[Any], **more: Any) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": content}], **more}


def of_chat(data: bytes) -> dict[str, Any]:
    return asked([{"type": "image_url", "image_url": {"url": url(data)}}, TEXT], max_tokens=2)


def of_responses(data: bytes) -> dict[str, Any]:
    image = {"type": "input_image", "image_url": url(data)}
    return {"input": [{"role": "user", "content": [image]}], "max_output_tokens": 2}


def of_anthropic(data: bytes) -> dict[str, Any]:
    source = {"type": "base64", "media_type": "image/png", "data": plain(data)}
    return asked([{"type": "image", "source": source}, TEXT], max_tokens=2)


def of_ollama(data: bytes) -> dict[str, Any]:
    message = {"role": "user", "content": "hi", "images": [plain(data)]}
    return {"messages": [message], "stream": False, "options": {"num_predict": 2}}


def of_generate(data: bytes) -> dict[str, Any]:
    more = {"stream": False, "options": {"num_predict": 2}}
    return {"prompt": "hi", "images": [plain(data)], **more}


Api = tuple[str, Callable[[bytes], dict[str, Any]]]
APIS: dict[str, Api] = {
    "chat": ("/v1/chat/completions", of_chat),
    "responses": ("/v1/responses", of_responses),
    "anthropic": ("/v1/messages", of_anthropic),
    "ollama chat": ("/api/chat", of_ollama),
    "ollama generate": ("/api/generate", of_generate),
}
apis = pytest.mark.parametrize("api", APIS.values(), ids=list(APIS))


def why(found: Response) -> str:
    """The reason of a refusal, which is one line, whatever the API."""
    assert found.status == 400, found.body
    error = found.json["error"]
    message: str = error if isinstance(error, str) else error["message"]
    assert len(message.splitlines()) == 1 and len(message) < 400
    return message


def test_files_are_answered_or_refused_in_one_line(client: Client) -> None:
    for path, body in APIS.values():
        for name, data in READ.items():
            found = client.post(path, {"model": "v", **body(data)})
            assert found.status == 200, (path, name, found.body)
        for name, (data, reason) in REFUSED.items():
            assert reason in why(client.post(path, {"model": "v", **body(data)})), (path, name)
        assert client.post(path, {"model": "v", **body(READ["RGB"])}).status == 200


@apis
def test_a_model_of_text_refuses_an_image_and_answers_texts(client: Client, api: Api) -> None:
    path, body = api
    for data in (READ["RGB"], REFUSED["damaged"][0]):
        message = why(client.post(path, {"model": "t", **body(data)}))
        assert ("images" in message and "not supported" in message) or "reads no images" in message
    assert client.post(APIS["chat"][0], {"model": "t", **asked([TEXT], max_tokens=2)}).status == 200


OTHERS: list[Any] = [
    {"type": "input_audio", "input_audio": {"data": "AAAA", "format": "wav"}},
    {"type": "file", "file": {"file_id": "x"}},
    {"type": "video_url", "video_url": {"url": "x"}},
    {"type": "input_image", "image_url": "x"},
    {"type": "unknown"},
    {"type": 3},
    {"type": ["text"]},
    {"text": "x"},
    3,
]


@pytest.mark.parametrize("part", OTHERS, ids=str)
@pytest.mark.parametrize("path", ["/v1/chat/completions", "/tokenize"])
def test_other_parts_say_what_the_model_reads(client: Client, path: str, part: Any) -> None:
    more = {"max_tokens": 2} if "chat" in path else {}
    for content in ([part, TEXT], [of_chat(READ["RGB"])["messages"][0]["content"][0], part]):
        message = why(client.post(path, {"model": "v", **asked(content, **more)}))
        place = f"messages[0].content[{content.index(part)}]: expected {{'type': 'text', 'text': "
        assert message.startswith(place) and "or an image as {'type': 'image_url'" in message
        assert "(audio, video and files are not supported)" in message and "images," not in message
    message = why(client.post(path, {"model": "t", **asked([part, TEXT], **more)}))
    assert 'expected {"type": "text", "text": ...}, found' in message


def test_other_parts_of_other_apis(client: Client) -> None:
    given = {"input": [{"role": "user", "content": [OTHERS[0]]}]}
    assert "of text parts and images" in why(client.post("/v1/responses", {"model": "v", **given}))
    assert "reads no images" in why(client.post("/v1/responses", {"model": "t", **given}))
    given = asked([{"type": "audio"}], max_tokens=2)
    for model, known in (("v", "image, text or tool_result"), ("t", "text or tool_result")):
        message = why(client.post("/v1/messages", {"model": model, **given}))
        assert f"expected a block of {known}, found" in message


def test_placeholders_and_images_differ_in_number(client: Client) -> None:
    """Spelled in a message it is a text; spelled in a prompt it is one too many."""
    spelled = {"type": "text", "text": "<|image_pad|>"}
    image = of_chat(READ["RGB"])["messages"][0]["content"][0]
    for content in ([spelled], [image, spelled]):
        found = client.post(APIS["chat"][0], {"model": "v", **asked(content, max_tokens=2)})
        assert found.status == 200, found.body
    more = {"prompt": "<|image_pad|> x", "max_tokens": 2}
    assert "0 images, found 1" in why(client.post("/v1/completions", {"model": "v", **more}))
    raw = {"prompt": "<|image_pad|> x", "raw": True, "stream": False}
    assert "0 images, found 1" in why(client.post("/api/generate", {"model": "v", **raw}))
    assert client.post("/v1/completions", {"model": "t", **more}).status == 200
