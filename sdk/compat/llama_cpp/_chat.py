"""Chats: llama-cpp-python's chat formats, tools and dicts."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from sdk import LLM
from sdk.api.errors import RequestError
from sdk.api.outputs import RequestOutput
from sdk.compat.llama_cpp._completions import check_ended
from sdk.quant.safe_repr import safe_repr
from sdk.serving.openai.objects import ChatCompletion, ChatCompletionChunk
from sdk.serving.openai.responses import Responses

Response = dict[str, Any]
_EMPTY: Mapping[str, None] = {"content": None, "function_call": None, "tool_calls": None}
_USAGE = ("prompt_tokens", "completion_tokens", "total_tokens")


class ChatFormat(NamedTuple):
    """A chat template (Jinja) and the strings and tokens that end its answers."""

    template: str
    stop: tuple[str, ...] = ()
    add_generation_prompt: bool = True
    stop_token_ids: tuple[int, ...] = ()


def _turns(begin: str, end: str, answer: str) -> str:
    """A template that wraps each message in the same way."""
    message = "{% for m in messages %}" + begin + "{{ m.content }}" + end + "{% endfor %}"
    return message + answer + "\n"  # Jinja drops one at the end


#: Two formats begin with a system message, even if it is empty.
_EMPTY_SYSTEM = "{% if messages[0].role != 'system' %}(){% endif %}"
_CHATML = ChatFormat(
    _EMPTY_SYSTEM.replace("()", "<|im_start|>system\n<|im_end|>\n")
    + _turns("<|im_start|>{{ m.role }}\n", "<|im_end|>\n", "<|im_start|>assistant\n"),
    ("<|im_end|>",),
)
_VICUNA = (
    "A chat between a curious user and an artificial intelligence assistant. The assistant gives "
    "helpful, detailed, and polite answers to the user's questions. "
)
#: The formats by the names that ``chat_format`` has, with their prompts and stop strings. BOS is
#: added as the model's file says.
FORMATS: Mapping[str, ChatFormat] = {
    "chatml": _CHATML,
    "chatml-function-calling": _CHATML,
    "alpaca": ChatFormat(
        "{% if messages[0].role == 'system' %}{{ messages[0].content }}{% endif %}{{ '\\n\\n' }}"
        "{% for m in messages %}{% if m.role == 'user' %}### Instruction: {{ m.content }}\n\n"
        "{% elif m.role == 'assistant' %}### Response: {{ m.content }}</s>{% endif %}{% endfor %}"
    ),
    "chatglm3": ChatFormat(
        "<|system|>\n{% if messages[0].role == 'system' %}{{ messages[0].content }}{% endif %}"
        "{% for m in messages %}{% if m.role in ('user', 'assistant') %}<|{{ m.role }}|>\n"
        " {{ m.content }}{% endif %}{% endfor %}<|assistant|>",
        ("</s>",),
    ),
    "gemma": ChatFormat(
        "{% for m in messages %}{% if m.role in ('user', 'assistant') %}<start_of_turn>"
        "{{ 'model' if m.role == 'assistant' else 'user' }}\n{{ m.content }}<end_of_turn>\n"
        "{% endif %}{% endfor %}<start_of_turn>model\n\n",
        ("<end_of_turn>\n",),
    ),
    "llama-2": ChatFormat(
        "{% set first = messages[0].role == 'system' %}"
        "{% if first %}[INST] <<SYS>>\n{{ messages[0].content }}\n<</SYS>>{% endif %} "
        "{% for m in messages %}{% if m.role == 'user' %}"
        "{% if first and loop.index0 == 1 %}{{ m.content }} {% else %}<s>[INST]{{ m.content }}  "
        "{% endif %}"
        "{% elif m.role == 'assistant' %}[/INST]{{ m.content }} </s>{% endif %}{% endfor %}[/INST]"
    ),
    "llama-3": ChatFormat(
        _turns(
            "<|start_header_id|>{{ m.role }}<|end_header_id|>\n\n",
            "<|eot_id|>",
            "<|start_header_id|>assistant<|end_header_id|>\n\n",
        ),
        ("<|eot_id|>",),
    ),
    "mistral-instruct": ChatFormat(
        "{% for m in messages %}{% if m.role == 'user' %}[INST] {{ m.content }} [/INST]"
        "{% elif m.role == 'assistant' %}{{ m.content }}</s>{% endif %}{% endfor %}",
        ("</s>",),
    ),
    "qwen": ChatFormat(
        "{% if messages[0].role != 'system' %}<|im_start|>system\n"
        "You are a helpful assistant.<|im_end|>\n{% endif %}"
        + _turns("<|im_start|>{{ m.role }}\n", "<|im_end|>\n", "<|im_start|>assistant\n"),
        ("<|endoftext|>",),
    ),
    "vicuna": ChatFormat(
        _VICUNA + "{% for m in messages %}{% if m.role == 'user' %}USER: {{ m.content }} "
        "{% elif m.role == 'assistant' %}ASSISTANT: {{ m.content }}</s>{% endif %}{% endfor %}"
        "ASSISTANT:"
    ),
    "zephyr": ChatFormat(
        _EMPTY_SYSTEM.replace("()", "<|system|>\n</s>\n")
        + "{% for m in messages %}<|{{ m.role }}|>\n{% if m.role != 'system' %}{{ '\\n' }}"
        "{% endif %}{{ m.content }}</s>\n{% endfor %}<|assistant|>\n\n\n",
        ("</s>",),
    ),
}
#: Formats of llama-cpp-python that are not built in.
_OTHERS = (
    *("baichuan", "baichuan-2", "functionary", "functionary-v1", "functionary-v2", "intel"),
    *("mistrallite", "oasst_llama", "open-orca", "openbuddy", "openchat", "phind", "pygmalion"),
    *("redpajama-incite", "saiga", "snoozy"),
)
#: For files without a chat template.
FALLBACK = "llama-2"
_OWN = "chat_template."


def chat_format(name: str | None) -> ChatFormat | None:
    """The format of a name; None: the model's own template.

    :raises RequestError: the name is unknown.
    """
    if name is None or name == f"{_OWN}default":
        return None
    if isinstance(name, str) and name.startswith(_OWN):  # a named template of the file
        return ChatFormat(name.removeprefix(_OWN))
    if name in _OTHERS:
        raise RequestError(
            f"chat_format={name!r} of llama-cpp-python is not built in; leave chat_format out to "
            "use the file's own template (tools work with it), or pass one as chat_template="
        )
    if name not in FORMATS:
        raise RequestError(
            f"chat_format: expected None (the model's own template) or one of "
            f"{', '.join(FORMATS)}, found {safe_repr(name)}; pass another template as "
            "chat_template="
        )
    return FORMATS[name]


def check_named(name: str | None, read: Callable[[], Mapping[str, str]]) -> None:
    """``read``: the metadata of the file.

    :raises RequestError: ``name`` is a template that the file does not have.
    """
    if name is None or not name.startswith(_OWN) or name == f"{_OWN}default":
        return
    metadata = read()
    if f"tokenizer.{name}" not in metadata:
        known = [key for key in metadata if key.startswith(f"tokenizer.{_OWN}")]
        found = ", ".join(key.removeprefix("tokenizer.") for key in known) or "none"
        raise RequestError(f"chat_format: {name!r} is not in the file; it has {found}")


def tool_arguments(given: Mapping[str, Any]) -> dict[str, Any]:
    """``tools`` and ``tool_choice`` of ``LLM.chat``; ``functions`` are their older form."""
    tools, choice = given["tools"], given["tool_choice"]
    if given["functions"] is not None:
        if not isinstance(given["functions"], Sequence):
            raise RequestError(f"functions: expected a list, found {given['functions']!r:.80}")
        tools = [{"type": "function", "function": one} for one in given["functions"]]
    if (call := given["function_call"]) is not None:
        choice = call
        if isinstance(call, Mapping) and "name" in call:
            choice = {"type": "function", "function": {"name": call["name"]}}
    if not tools:
        if choice not in (None, "none", "auto"):
            raise RequestError("tool_choice: expected tools too, found none")
        return {}
    return {"tools": tools} | ({} if choice is None else {"tool_choice": choice})


def chat_responses(llm: LLM, model: str, top: int | None) -> Responses:
    """``top``: how many of the best log-probabilities were asked for."""
    return Responses("chatcmpl", model, check_ended, llm.get_tokenizer(), top)


def chat_dict(completion: ChatCompletion) -> Response:
    """The completion with llama-cpp-python's keys."""
    found = completion.model_dump()
    found["usage"] = {name: found["usage"][name] for name in _USAGE}
    for choice in found["choices"]:
        del choice["closed"]  # of ours alone
        message = choice["message"]
        kept = {"role": message["role"], "content": message["content"]}
        if message["tool_calls"]:
            kept["tool_calls"] = message["tool_calls"]
            kept["function_call"] = message["tool_calls"][0]["function"]  # the older form
        choice["message"] = kept
    return found


def chunk_dicts(
    made: Responses,
    pieces: Generator[RequestOutput, None, None],
    shown: Callable[[RequestOutput], RequestOutput],
    *,
    forced: bool,
) -> Iterator[Response]:
    """The chunks of a stream with llama-cpp-python's keys: the role, the text, the end.

    ``forced``: ``tool_choice`` names a tool; then every delta has all keys.
    """
    names: dict[int, Response] = {}
    role: Response = {"role": "assistant", **(_EMPTY if forced else {})}
    end: Response = {"role": None, **_EMPTY} if forced else {}
    try:
        for number, piece in enumerate(pieces):
            chunk = made.chunk(shown(piece))
            if number == 0:
                yield _chunk(chunk, role)
            [choice] = chunk.choices
            delta = _delta(choice.delta.content, choice.delta.tool_calls, names)
            if delta:
                logprobs = None if choice.logprobs is None else choice.logprobs.model_dump()
                yield _chunk(chunk, delta, logprobs)
            if choice.finish_reason is not None:
                yield _chunk(chunk, end, None, choice.finish_reason)
    finally:
        pieces.close()


def _delta(
    content: str | None, calls: Sequence[Any] | None, names: dict[int, Response]
) -> Response:
    """``names``: of the calls so far. Every piece of a call has its id and name."""
    if not calls:
        return {"content": content} if content else {}
    plain = []
    for call in calls:
        if call.id is not None:
            names[call.index] = {"id": call.id, "name": call.function.name}
        known = names[call.index]
        function = {"name": known["name"], "arguments": call.function.arguments}
        plain.append(
            {"index": call.index, "id": known["id"], "type": "function", "function": function}
        )
    return {
        "role": None,
        "content": content or None,
        "function_call": plain[0]["function"],
        "tool_calls": plain,
    }


def _chunk(
    chunk: ChatCompletionChunk, delta: Response, logprobs: Any = None, reason: str | None = None
) -> Response:
    choice = {"index": 0, "delta": delta, "logprobs": logprobs, "finish_reason": reason}
    return {
        "id": chunk.id,
        "model": chunk.model,
        "created": chunk.created,
        "object": chunk.object,
        "choices": [choice],
    }
