"""Numbers of schemas arrive as they were written, or are refused by name."""

from __future__ import annotations

from typing import Any

import pytest

from sdk.serving.json_numbers import Numbers, Rounded
from tests.serving.serving import Client, Response, Serve

ASK = '"messages": [{"role": "user", "content": "hi"}]'


def post(client: Client, path: str, text: str) -> Response:
    return client.post(path, text.encode(), headers={"Content-Type": "application/json"})


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("9007199254740993", 2**53 + 1),
        ("-9223372036854775808", -(2**63)),
        ("123456789012345678901234567890", 123456789012345678901234567890),
        ("0.1", 0.1),
        ("0.30000000000000004", 0.1 + 0.2),
        ("1E5", 1e5),
        ("100000000000000000000.0", 1e20),
        ("1e22", 1e22),
    ],
)
def test_numbers_of_a_schema_are_exact(serve: Serve, text: str, value: Any) -> None:
    client, llm = serve("1")
    form = (
        f'{{"type": "json_schema", "json_schema": {{"name": "a", "schema": {{"const": {text}}}}}}}'
    )
    found = post(client, "/v1/chat/completions", f'{{{ASK}, "response_format": {form}}}')
    assert found.status == 200, found.body
    structure = llm.requests[0].sampling_params.structure
    assert structure is not None and structure.json["const"] == value
    assert type(structure.json["const"]) is type(value)


@pytest.mark.parametrize(
    ("path", "name", "value"),
    [
        ("/v1/chat/completions", "guided_json", '{"exclusiveMaximum": NUMBER}'),
        ("/v1/responses", "text", '{"format": {"schema": {"enum": [NUMBER]}}}'),
        ("/api/chat", "format", '{"properties": {"a": {"maximum": NUMBER}}}'),
        ("/v1/messages", "tools", '[{"name": "a", "input_schema": {"minimum": NUMBER}}]'),
    ],
)
def test_other_numbers_of_schemas_are_refused(
    serve: Serve, path: str, name: str, value: str
) -> None:
    client, llm = serve("1")
    asked = '"input": "hi"' if path == "/v1/responses" else ASK
    number = "9007199254740993.0"
    found = post(client, path, f'{{{asked}, "{name}": {value.replace("NUMBER", number)}}}')
    assert found.status == 400 and llm.requests == []
    assert f"{name}: expected numbers that a double holds, found {number}" in found.body.decode()


@pytest.mark.parametrize(
    "text",
    ["0.30000000000000001", "1e400", "-1.0000000000000000001", "1e-400", "1e99999999999999999999"],
)
def test_a_number_that_is_rounded_is_known(text: str) -> None:
    number = Numbers().read(text)
    assert isinstance(number, Rounded) and number.text == text and number == float(text)


def test_elsewhere_numbers_are_rounded(serve: Serve) -> None:
    client, llm = serve("1")
    found = post(client, "/v1/chat/completions", f'{{{ASK}, "top_p": 0.30000000000000001}}')
    assert found.status == 200 and llm.requests[0].sampling_params.top_p == 0.3
