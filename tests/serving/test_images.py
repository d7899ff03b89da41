"""Images over HTTP: in every API, and nothing that only this machine can reach."""

from __future__ import annotations

import base64
import io
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from sdk import RequestError
from sdk.serving.guard.body_limits import BodyLimits
from tests.serving.serving import Client, Serve

#: A fake model's image has 4 tokens.
TOKENS = 4
CHAT = "/v1/chat/completions"


def png(color: str = "red") -> bytes:
    file = io.BytesIO()
    Image.new("RGB", (40, 30), color).save(file, "PNG")
    return file.getvalue()


PLAIN = base64.b64encode(png()).decode()
URL = f"data:image/png;base64,{PLAIN}"
TEXT = {"type": "text", "text": "What is it?"}


def part(url: str = URL) -> dict[str, Any]:
    return {"type": "image_url", "image_url": {"url": url}}


def ask(*parts: dict[str, Any]) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": list(parts)}]}


def of_responses(*parts: Any) -> dict[str, Any]:
    return {"input": [{"role": "user", "content": list(parts)}]}


def block(kind: str = "base64", **source: str) -> dict[str, Any]:
    return {"type": "image", "source": {"type": kind, **source}}


#: How each API asks about one image, where its usage is, and which key counts the prompt.
APIS: dict[str, tuple[str, dict[str, Any], Callable[[Any], int]]] = {
    "chat": (CHAT, ask(part(), TEXT), lambda found: found["usage"]["prompt_tokens"]),
    "responses": (
        "/v1/responses",
        of_responses(
            {"type": "input_image", "image_url": URL, "detail": "auto"},
            {"type": "input_text", "text": "What is it?"},
        ),
        lambda found: found["usage"]["input_tokens"],
    ),
    "anthropic": (
        "/v1/messages",
        {"max_tokens": 9, **ask(block(media_type="image/png", data=PLAIN), TEXT)},
        lambda found: found["usage"]["input_tokens"],
    ),
    "ollama chat": (
        "/api/chat",
        {
            "stream": False,
            "messages": [{"role": "user", "content": "What is it?", "images": [PLAIN]}],
        },
        lambda found: found["prompt_eval_count"],
    ),
    "ollama generate": (
        "/api/generate",
        {"stream": False, "prompt": "What is it?", "images": [PLAIN]},
        lambda found: found["prompt_eval_count"],
    ),
}
apis = pytest.mark.parametrize("api", APIS.values(), ids=list(APIS))


@apis
def test_an_image_reaches_the_model_and_its_tokens_are_counted(
    serve: Serve, api: tuple[str, dict[str, Any], Callable[[Any], int]]
) -> None:
    path, body, count = api
    client, llm = serve("It is red.", images=True)
    found = client.post(path, {"model": "tiny", **body})
    assert found.status == 200, found.body
    [asked] = llm.requests
    messages: Any = asked.prompt
    assert [one["type"] for one in messages[-1]["content"]] == ["image_url", "text"]
    text = {**messages[-1], "content": [messages[-1]["content"][1]]}
    [without] = (llm._reader.need_tokenizer("").encode_chat([text]),)
    # the line break after the image belongs to the first word
    assert count(found.json) == len(without) + TOKENS


@apis
def test_a_model_of_text_refuses_an_image_as_before(
    serve: Serve, api: tuple[str, dict[str, Any], Callable[[Any], int]]
) -> None:
    path, body, _ = api
    client, llm = serve()
    found = client.post(path, {"model": "tiny", **body})
    assert found.status == 400 and not llm.requests
    message = found.body.decode()
    assert "images" in message or "text parts" in message


@pytest.mark.parametrize(
    ("path", "body"),
    [
        (CHAT, lambda url: ask(part(url))),
        (CHAT, lambda url: ask({"type": "image_url", "image_url": url})),
        ("/tokenize", lambda url: ask(part(url))),
        ("/v1/messages/count_tokens", lambda url: {"max_tokens": 1, **ask(block("url", url=url))}),
        ("/v1/messages", lambda url: {"max_tokens": 1, **ask(block("url", url=url))}),
        ("/v1/responses", lambda url: of_responses({"type": "input_image", "image_url": url})),
    ],
)
@pytest.mark.parametrize(
    "url", ["http://127.0.0.1:9/a.png", "/etc/hostname", "file:///etc/hostname"]
)
def test_neither_files_nor_hosts_are_read(
    serve: Serve, path: str, body: Any, url: str, tmp_path: Path
) -> None:
    """Not even those that the owner of the LLM allows for its own code."""

    def fetch(asked: str) -> bytes:
        pytest.fail(f"fetched {asked}")

    client, llm = serve(images=True, image_fetcher=fetch, allowed_local_media_path="/")
    found = client.post(path, {"model": "tiny", **body(url)})
    assert found.status == 400 and not llm.requests
    why = "is not fetched: this server allows no hosts" if url[:4] == "http" else "expected {'type'"
    assert why in json.loads(found.body)["error"]["message"]


@pytest.mark.parametrize(
    "given",
    [
        {"type": "image", "image": "/etc/hostname"},
        {"type": "image", "image": URL},
        {"type": "image"},
        {"type": "image_url"},
        {"type": "image_url", "image_url": {"url": 3}},
    ],
)
def test_other_parts_are_refused(serve: Serve, given: dict[str, Any]) -> None:
    client, llm = serve(images=True)
    found = client.post(CHAT, {"model": "tiny", **ask(given)})
    assert found.status == 400 and not llm.requests
    assert "messages[0].content[0]: expected {'type': 'image_url'" in found.error["message"]


def test_allowed_hosts_are_asked_once_for_each_url(serve: Serve) -> None:
    asked = []

    def fetch(url: str) -> bytes:
        asked.append(url)
        if "gone" in url:
            raise RequestError(f"image {url}: its host answered 404")
        return png()

    client, llm = serve("Red.", images=True, app={"image_fetcher": fetch})
    url = "https://img.example.org/a.png"
    assert client.post(CHAT, {"model": "tiny", **ask(part(url), part(url), part())}).status == 200
    assert asked == [url]
    given: Any = llm.requests[0].prompt
    assert [one["type"] for one in given[0]["content"]] == ["image", "image", "image_url"]
    gone = client.post(CHAT, {"model": "tiny", **ask(part("https://img.example.org/gone"))})
    assert gone.status == 400
    assert gone.error["message"].startswith("messages[0].content[0]: image https://img.example.org")


def test_too_many_images_are_refused_before_any_is_fetched(serve: Serve) -> None:
    def fetch(url: str) -> bytes:
        pytest.fail(f"fetched {url}")

    limits = {"limit_mm_per_prompt": {"image": 2}, "app": {"image_fetcher": fetch}}
    client, _ = serve(images=True, **limits)
    found = client.post(CHAT, {"model": "tiny", **ask(*[part("http://x.example/a")] * 3)})
    assert found.status == 400 and "expected at most 2 in a prompt" in found.error["message"]


def test_limits_of_bodies_count_images_apart_from_texts(serve: Serve) -> None:
    client, _ = serve(images=True, app={"limits": BodyLimits(prompt_chars=50, images=2)})
    assert client.post(CHAT, {"model": "tiny", **ask(part(), part(), TEXT)}).status == 200
    ollama = {"role": "user", "content": "a", "images": [PLAIN] * 2}
    assert client.post("/api/chat", {"model": "tiny", "messages": [ollama]}).status == 200
    found = client.post(CHAT, {"model": "tiny", **ask(part(), part(), part())})
    assert found.status == 400
    assert found.error["message"] == "images: expected at most 2 images in one request, found 3"
    three = {**ollama, "images": [PLAIN] * 3}
    assert client.post("/api/chat", {"model": "tiny", "messages": [three]}).status == 400
    # what looks like an image and has a text is not one
    for message in (
        {"type": "image_url", "role": "user", "content": "x" * 60},
        {"role": "user", "content": [{"type": "image", "text": "x" * 60}]},
        {"role": "user", "content": [part(), {"type": "text", "text": "x" * 60}]},
    ):
        long = client.post(CHAT, {"model": "tiny", "messages": [message]})
        assert long.error["code"] == "string_above_max_length"


def test_a_broken_image_is_an_error_of_the_request_alone(serve: Serve) -> None:
    client, _ = serve("Fine.", images=True)
    for url in ("data:image/png;base64,AAAA", "data:image/png;base64,%", "data:x"):
        found = client.post(CHAT, {"model": "tiny", **ask(part(url))})
        assert found.status == 400
        assert found.error["message"].startswith("messages[0].content[0]")
    assert client.post(CHAT, {"model": "tiny", **ask(part(), TEXT)}).status == 200


def test_tokenize_and_count_tokens_count_images(serve: Serve) -> None:
    client, llm = serve(images=True)
    with_image = client.post("/tokenize", {"model": "tiny", **ask(part(), TEXT)}).json
    assert llm._reader.images is not None
    assert with_image["tokens"].count(llm._reader.images.token_id) == TOKENS
    assert with_image["count"] == len(with_image["tokens"])
    body = {"max_tokens": 1, **ask(block(media_type="image/png", data=PLAIN), TEXT)}
    counted = client.post("/v1/messages/count_tokens", {"model": "tiny", **body}).json
    assert counted == {"input_tokens": with_image["count"]}
    text = client.post("/tokenize", {"model": "tiny", **ask(TEXT)}).json
    assert text["count"] == with_image["count"] - TOKENS


def test_a_response_goes_on_from_one_with_an_image(serve: Serve) -> None:
    client, llm = serve(["Red.", "Yes."], images=True)
    image = {"type": "input_image", "image_url": URL}
    first = client.post("/v1/responses", {"model": "tiny", **of_responses(image)}).json
    more = {"model": "tiny", "input": "Sure?", "previous_response_id": first["id"]}
    assert client.post("/v1/responses", more).status == 200
    earlier: Any = llm.requests[1].prompt
    assert earlier[0]["content"] == [part()] and earlier[2]["content"] == "Sure?"


@pytest.mark.parametrize(
    ("image", "why"),
    [
        ({"type": "input_image", "file_id": "f"}, "expected an input_image with image_url"),
        ({"type": "input_image", "image_url": {"url": URL}}, "expected an input_image with"),
        ({"type": "input_file"}, "expected content of text parts and images"),
    ],
)
def test_other_items_of_responses(serve: Serve, image: dict[str, Any], why: str) -> None:
    client, _ = serve(images=True)
    found = client.post("/v1/responses", {"model": "tiny", **of_responses(image)})
    assert found.status == 400 and why in found.error["message"]


@pytest.mark.parametrize(
    "image",
    [
        block("file", file_id="f"),
        {"type": "image"},
        block("url"),
        block(data=""),
        block(),
    ],
)
def test_other_images_of_anthropic(serve: Serve, image: dict[str, Any]) -> None:
    client, _ = serve(images=True)
    found = client.post("/v1/messages", {"model": "tiny", "max_tokens": 1, **ask(image)})
    assert found.status == 400 and "image: expected a" in found.json["error"]["message"]


def test_results_of_tools_in_anthropics_form_have_images(serve: Serve) -> None:
    client, llm = serve(images=True)
    use = {"type": "tool_use", "id": "t", "name": "shot", "input": {}}
    image = block(media_type="image/png", data=PLAIN)
    answer = {"type": "tool_result", "tool_use_id": "t", "content": [TEXT, image], "is_error": True}
    messages = [
        {"role": "user", "content": "Look"},
        {"role": "assistant", "content": [use]},
        {"role": "user", "content": [answer]},
    ]
    found = client.post("/v1/messages", {"model": "tiny", "max_tokens": 9, "messages": messages})
    assert found.status == 200, found.body
    given: Any = llm.requests[0].prompt
    assert given[2]["role"] == "tool"
    assert given[2]["content"] == [{"type": "text", "text": "Error: What is it?"}, part()]


@pytest.mark.parametrize(
    ("path", "body", "why"),
    [
        ("/api/chat", {"messages": [], "images": [PLAIN]}, "put them into a message"),
        ("/api/generate", {"prompt": "a", "raw": True, "images": [PLAIN]}, "without raw"),
        ("/api/generate", {"prompt": "a", "images": "x"}, "expected a list of images in base64"),
        ("/api/generate", {"prompt": "a", "images": [3]}, "images[0]: expected an image in base64"),
        ("/api/generate", {"prompt": "a", "images": ["/etc/hostname"]}, "base64"),
    ],
)
def test_other_images_of_ollama(serve: Serve, path: str, body: dict[str, Any], why: str) -> None:
    client, llm = serve(images=True)
    found = client.post(path, {"model": "tiny", **body})
    assert found.status == 400 and why in found.json["error"] and not llm.requests


def test_clients_learn_which_models_read_images(serve: Serve) -> None:
    def told(client: Client) -> tuple[list[str], bool]:
        [card] = client.get("/v1/models").json["data"]
        shown = client.post("/api/show", {"model": "tiny"}).json
        return card["input_modalities"], "vision" in shown["capabilities"]

    assert told(serve(images=True)[0]) == (["text", "image"], True)
    assert told(serve()[0]) == (["text"], False)
    assert told(serve(images=True, limit_mm_per_prompt={"image": 0})[0]) == (["text"], False)


def test_completions_take_no_images(serve: Serve) -> None:
    client, llm = serve(images=True)
    given = {"prompt": "<image>", "multi_modal_data": {"image": PLAIN}}
    for prompt in (given, [given]):
        assert client.post("/v1/completions", {"model": "tiny", "prompt": prompt}).status == 400
    found = client.post("/v1/completions", {"model": "tiny", "prompt": "<image> hello"})
    assert found.status == 400 and "give the images" in found.error["message"]
    assert not llm.requests


def test_a_body_may_be_larger_where_a_model_reads_images(serve: Serve) -> None:
    """Base64 of photos; the bytes here are spaces."""
    body = b" " * (17 * 2**20) + json.dumps(ask(part(), TEXT)).encode()
    head = {"Content-Type": "application/json"}
    client, _ = serve("A", images=True)
    assert client.post(CHAT, body, headers=head).status == 200
    blind, _ = serve("A")
    assert blind.post(CHAT, body, headers=head).status == 413
    small, _ = serve("A", images=True, app={"max_body_bytes": 2**24})
    assert small.post(CHAT, body, headers=head).status == 413
