"""Programs for clients of Ollama's and of Anthropic's API, unmodified, against a server.

``python other_clients.py ADDRESS MODEL [PROGRAM ...]``: prints what each found.
"""

from __future__ import annotations

import asyncio
import json
import sys
import traceback
from collections.abc import Callable
from typing import Any, Literal

from pydantic import BaseModel

ADDRESS, MODEL, *NAMED = sys.argv[1:]
ASK: Any = [{"role": "user", "content": "What is the capital of France? Answer briefly."}]
EXACT: Any = {"temperature": 0, "max_tokens": 24}
CITY: Any = {
    "type": "object",
    "properties": {"city": {"enum": ["Paris", "Rome"]}},
    "required": ["city"],
}
FUNCTION: Any = {"name": "weather", "description": "The weather in a city.", "parameters": CITY}


class City(BaseModel):
    name: Literal["Paris", "Rome"]
    capital: bool


# ---- Ollama --------------------------------------------------------------------------------------


def ollama_client() -> Any:
    import ollama

    client = ollama.Client(host=ADDRESS)
    options = {"temperature": 0, "num_predict": 24, "num_ctx": 4096}
    whole = client.chat(MODEL, ASK, options=options)
    pieces = client.chat(MODEL, ASK, options=options, stream=True)
    text = "".join(piece.message.content or "" for piece in pieces)
    loaded = client.generate(MODEL, "", keep_alive="5m")
    [card] = client.ps().models
    form = client.chat(MODEL, ASK, format=City.model_json_schema(), options={"num_predict": 60})
    city = City.model_validate_json(form.message.content or "")
    vectors = client.embed(MODEL, ["a", "b"]).embeddings
    try:
        client.pull("llama3.2")
    except ollama.ResponseError as error:
        refused = [error.status_code, error.error]
    return {
        "text": whole.message.content,
        "streamed": text,
        "load": loaded.done_reason,
        "context": card.context_length,
        "family": client.show("any").modelinfo["general.architecture"],  # type: ignore[index]
        "city": city.name,
        "vectors": len(vectors),
        "refused": refused,
    }


def _litellm(prefix: str, base: str) -> Any:
    import litellm

    how: Any = {"model": f"{prefix}/{MODEL}", "api_base": base, "api_key": "none", "messages": ASK}
    whole = litellm.completion(**how, **EXACT).choices[0].message.content
    pieces = litellm.completion(**how, **EXACT, stream=True)
    text = "".join(piece.choices[0].delta.content or "" for piece in pieces)
    answer = asyncio.run(litellm.acompletion(**how, **EXACT)).choices[0].message.content
    return [whole, text, answer]


def litellm_ollama() -> Any:
    import litellm

    found = _litellm("ollama", ADDRESS)
    made = litellm.embedding(model=f"ollama/{MODEL}", input=["a", "b"], api_base=ADDRESS)
    return [*found, len(made.data)]


def litellm_ollama_chat() -> Any:
    import litellm

    tool = {"type": "function", "function": FUNCTION}
    called = litellm.completion(
        model=f"ollama_chat/{MODEL}", api_base=ADDRESS, messages=ASK, tools=[tool], max_tokens=60
    )
    return [*_litellm("ollama_chat", ADDRESS), called.choices[0].finish_reason]


def litellm_openai() -> Any:
    return _litellm("openai", f"{ADDRESS}/v1")


def litellm_anthropic() -> Any:
    return _litellm("anthropic", ADDRESS)


# ---- Anthropic -----------------------------------------------------------------------------------


def anthropic_client() -> Any:
    import anthropic

    client = anthropic.Anthropic(base_url=ADDRESS, api_key="none", max_retries=0)
    asked: Any = {"model": MODEL, "messages": ASK, "max_tokens": 24}
    asked["extra_body"] = {"temperature": 0}  # newer clients do not know it
    whole = client.messages.create(**asked)
    with client.messages.stream(**asked) as events:
        text = "".join(events.text_stream)
        last = events.get_final_message()
    counted = client.messages.count_tokens(model=MODEL, messages=ASK).input_tokens
    pieces = client.messages.create(**asked, stream=True)
    kinds = [event.type for event in pieces]
    stopped = client.messages.create(**asked, stop_sequences=["France"])
    try:
        image = {"type": "image", "source": {"type": "url", "url": "https://x.example/y.png"}}
        content: Any = [{"role": "user", "content": [image]}]
        client.messages.create(**{**asked, "messages": content})
    except anthropic.BadRequestError as error:
        refused = error.message
    used = whole.usage
    return {
        "text": whole.content[0].text,  # type: ignore[union-attr]
        "streamed": text,
        "same": last.content[0].text == text,  # type: ignore[union-attr]
        "reason": [whole.stop_reason, last.stop_reason],
        "stopped": [stopped.stop_reason, stopped.stop_sequence],
        "counted": counted == used.input_tokens + (used.cache_read_input_tokens or 0),
        "tokens": [used.output_tokens, last.usage.output_tokens],
        "kinds": [kinds[0], kinds[-2], kinds[-1]],
        "refused": refused,
        "models": [model.id for model in client.models.list()],
    }


def anthropic_tools() -> Any:
    import anthropic

    client = anthropic.Anthropic(base_url=ADDRESS, api_key="none", max_retries=0)
    tool = {**FUNCTION, "input_schema": CITY}
    del tool["parameters"]
    asked: Any = {"model": MODEL, "max_tokens": 60, "tools": [tool]}
    choice: Any = {"type": "tool", "name": "weather"}
    found = client.messages.create(**asked, messages=ASK, tool_choice=choice)
    [call] = [block for block in found.content if block.type == "tool_use"]
    with client.messages.stream(**asked, messages=ASK, tool_choice=choice) as events:
        last = events.get_final_message()
    [streamed] = [block for block in last.content if block.type == "tool_use"]
    result: Any = {"type": "tool_result", "tool_use_id": call.id, "content": "sunny"}
    history: Any = [
        *ASK,
        {"role": "assistant", "content": found.content},
        {"role": "user", "content": [result]},
    ]
    answer = client.messages.create(**asked, messages=history, tool_choice={"type": "none"})
    parsed = client.messages.parse(
        model=MODEL, max_tokens=60, messages=ASK, output_format=City
    ).parsed_output
    assert parsed is not None
    return {
        "reason": found.stop_reason,
        "cities": [call.input["city"], streamed.input["city"]],
        "answer": answer.content[0].type,
        "parsed": parsed.name,
    }


PROGRAMS: tuple[Callable[[], Any], ...] = (
    *(ollama_client, litellm_ollama, litellm_ollama_chat, litellm_openai, litellm_anthropic),
    *(anthropic_client, anthropic_tools),
)


def main() -> None:
    found = {}
    for program in PROGRAMS:
        if NAMED and program.__name__ not in NAMED:
            continue
        try:
            found[program.__name__] = {"found": program()}
        except Exception:
            found[program.__name__] = {"error": traceback.format_exc()}
    print(json.dumps(found))


if __name__ == "__main__":
    main()
