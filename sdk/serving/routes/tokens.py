"""``/tokenize`` and ``/detokenize``: vLLM's API."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

from sdk.api.errors import RequestError
from sdk.api.params import SamplingParams
from sdk.quant.safe_repr import safe_repr
from sdk.requests.prompts.images import image_parts
from sdk.requests.prompts.kinds import ChatOptions
from sdk.requests.prompts.reader import as_request_error, is_conversation
from sdk.serving.endpoint import Services
from sdk.serving.exchange import Exchange
from sdk.serving.images import with_images
from sdk.serving.models import Target
from sdk.serving.openai.requests import Body

_TEMPLATE = ("add_generation_prompt", "continue_final_message", "tools")


async def tokenize(exchange: Exchange, services: Services) -> None:
    """The tokens of a text, or of a conversation with the chat template."""
    body = Body(await exchange.read_json(services.max_body_bytes))
    target = services.models.resolve(body.take("model"))
    tokenizer = target.llm.get_tokenizer()
    messages, spelled = body.take("messages"), body.take_flag("return_token_strs")
    if messages is None:
        text, special = body.take("prompt"), body.take_flag("add_special_tokens", True)
        body.end()
        if not isinstance(text, str):
            raise RequestError(f"prompt: expected a string, found {safe_repr(text)}")
        ids = await target.served.briefly(
            text, lambda: tokenizer.encode(text, add_special_tokens=special)
        )
    else:
        if not is_conversation(messages):
            raise RequestError(
                f"messages: expected a list of messages, found {safe_repr(messages)}"
            )
        how = {"add_generation_prompt": True, **body.take_all(_TEMPLATE)}
        if how.get("continue_final_message"):
            how["add_generation_prompt"] = False
        body.take("add_special_tokens")  # the template writes them
        body.end()
        read = await with_images(messages, target.llm, services.fetch_image)
        with as_request_error("messages"):
            ids = await target.served.briefly(read, partial(_rendered, target, read, how))
    strings = tokenizer.convert_ids_to_tokens(ids) if spelled else None
    await exchange.respond_json(
        {
            "count": len(ids),
            "max_model_len": target.llm.max_model_len,
            "tokens": ids,
            "token_strs": strings,
        }
    )


def _rendered(target: Target, messages: Sequence[Any], how: dict[str, Any]) -> Sequence[int]:
    """The tokens of a conversation, also of one that is too long unless it has images."""
    if any(True for message in messages for _ in image_parts(message)) and target.served.sees:
        options = ChatOptions.of("tokenize", how)
        found: Sequence[int] = target.llm._reader.read_chat(
            messages, SamplingParams(), options
        ).token_ids
    else:
        found = target.llm.get_tokenizer().apply_chat_template(messages, **how)
    return found


async def detokenize(exchange: Exchange, services: Services) -> None:
    """The text of tokens."""
    body = Body(await exchange.read_json(services.max_body_bytes))
    target = services.models.resolve(body.take("model"))
    ids = body.take("tokens")
    body.end()
    tokenizer = target.llm.get_tokenizer()
    known = range(len(tokenizer))
    if not isinstance(ids, list) or not all(type(one) is int and one in known for one in ids):
        raise RequestError(
            f"tokens: expected a list of integers in 0..{len(tokenizer) - 1}, found "
            f"{safe_repr(ids)}"
        )
    text = await target.served.briefly(ids, lambda: tokenizer.decode(ids))
    await exchange.respond_json({"prompt": text})
