"""From what users write to a request: conversations, tools, truncation, and what is refused."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer as Backend, decoders, models, pre_tokenizers

from sdk import LLM, EngineClosedError, RequestError, SamplingParams
from sdk.loaders.tokenizer.base import TokenizerFacts
from sdk.loaders.tokenizer.hf import JsonTokenizer
from sdk.requests.prompts.reader import PromptReader
from tests.api.engines import LONG, SHORT, ids, settle, tokens

USER = {"role": "user", "content": "Hi"}
CALL = {"type": "function", "function": {"name": "now", "arguments": {}}}
TOOLS = [{"type": "function", "function": {"name": "now", "parameters": {}}}]
READS_TOOLS = (
    "{% if tools %}{{ tools|tojson }}\n{% endif %}{% for m in messages %}"
    "{{ m.role }}: {{ m.content or m.tool_calls|tojson }}\n{% endfor %}"
)


def bytes_tokenizer() -> JsonTokenizer:
    """One without a chat template."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    backend = Backend(models.BPE({text: number for number, text in enumerate(alphabet)}, []))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    return JsonTokenizer(backend, TokenizerFacts(), "tokenizer.json")


def spoken(reader: PromptReader, messages: Any, params: SamplingParams = SHORT) -> str:
    text = reader.read_one("chat", messages, params, {}).text
    assert text is not None
    return text.removeprefix("<s>").strip()


@pytest.mark.parametrize("content", ["none", "missing", "image", "image_url", "number"])
def test_a_message_without_text_is_a_request_error_that_names_its_index(
    tiny: LLM, content: str
) -> None:
    bad: dict[str, Any] = {
        "none": {"role": "user", "content": None},
        "missing": {"role": "user"},
        "image": {"role": "user", "content": [{"type": "image", "image": "x"}]},
        "image_url": {
            "role": "user",
            "content": [
                {"type": "text", "text": "What is this?"},
                {"type": "image_url", "image_url": {"url": "data:"}},
            ],
        },
        "number": {"role": "user", "content": 5},
    }[content]
    with pytest.raises(RequestError, match=r"messages\[1\]") as caught:
        tiny.chat([USER, bad], SHORT)
    if content.startswith("image"):
        assert f"found type '{content}'" in str(caught.value)
    with pytest.raises(RequestError, match=r"messages\[1\]"):
        tiny.stream([USER, bad], SHORT)


def test_text_parts_are_read_as_their_text(tiny: LLM) -> None:
    parts = [{"role": "user", "content": [{"type": "text", "text": t} for t in ("Hi", "you")]}]
    plain = [{"role": "user", "content": "Hi\nyou"}]
    assert tokens(tiny.chat(parts, SHORT)[0]) == tokens(tiny.chat(plain, SHORT)[0])


class Wrapped:
    """A tokenizer of which ``replaced`` methods are others."""

    def __init__(self, tokenizer: Any, **replaced: Any) -> None:
        self.__dict__.update(replaced)
        self._tokenizer = tokenizer

    def __getattr__(self, name: str) -> Any:
        return getattr(self._tokenizer, name)


def test_a_model_without_a_chat_template_refuses_a_conversation_as_a_request() -> None:
    tokenizer = bytes_tokenizer()
    reader = PromptReader(tokenizer, vocab_size=448, max_model_len=128)
    with pytest.raises(RequestError, match="no chat template"):
        reader.read_one("chat", [USER], SHORT, {})
    assert reader.read_one("stream", "Hi", SHORT, {}).token_ids


@pytest.mark.parametrize("method", ["decode", "encode", "encode_chat"])
def test_a_panic_of_the_tokenizer_is_the_error_of_that_request(method: str) -> None:
    def panic(*_: Any, **__: Any) -> Any:
        return decoders.Strip("a", 1, 1).decode(["a"])

    with pytest.raises(BaseException, match="slice index") as caught:
        panic()
    assert not isinstance(caught.value, Exception), "the library panics no more: find another"
    wrapped: Any = Wrapped(bytes_tokenizer(), **{method: panic})
    reader = PromptReader(wrapped, vocab_size=448, max_model_len=128, chat_template=READS_TOOLS)
    with pytest.raises(RequestError, match="PanicException"):
        reader.read_one("chat", "Hi" if method == "encode" else [USER], SHORT, {})


def test_an_engines_chat_template_is_a_string(tiny_path: Path) -> None:
    with pytest.raises(RequestError, match="chat_template: expected a string, found 5"):
        LLM(tiny_path, chat_template=5)  # type: ignore[arg-type]


def test_tool_calls_stand_in_the_place_of_content(tiny: LLM) -> None:
    for message in (
        {"role": "assistant", "content": None, "tool_calls": [CALL]},
        {"role": "assistant", "tool_calls": [CALL]},
    ):
        [output] = tiny.chat([USER, message], SHORT, chat_template=READS_TOOLS)
        assert '"name": "now"' in str(output.prompt)


def test_tools_that_the_template_drops_are_refused(tiny: LLM) -> None:
    template = (
        "{% if tools and messages|length > 9 %}{{ tools }}{% endif %}{{ messages[0].content }}"
    )
    with pytest.raises(RequestError, match="tools: the chat template of this model does not use"):
        tiny.chat([USER], SHORT, tools=TOOLS, chat_template=template)
    assert tiny.chat([USER], SHORT, tools=[], chat_template=template)
    [output] = tiny.chat([USER], SHORT, tools=TOOLS, chat_template=READS_TOOLS)
    assert '"parameters"' in str(output.prompt)


def test_tools_are_described_if_the_template_has_no_place_for_them(tiny_path: Path) -> None:
    template = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"
    with LLM(tiny_path, max_model_len=512) as llm:
        told = [{"role": "system", "content": "Be kind."}, USER]
        for messages, begins in ([USER], "system: You can call"), (told, "system: Be kind.\n\nYou"):
            [output] = llm.chat(messages, SHORT, tools=TOOLS, chat_template=template)
            prompt = str(output.prompt).replace("<s>", "").strip()
            assert prompt.startswith(begins)
            assert TOOLS[0]["function"]["name"] in prompt
        called = {"role": "assistant", "content": "Wait.", "tool_calls": [CALL]}
        result = {"role": "tool", "name": "now", "content": "noon"}
        [output] = llm.chat([USER, called, result], SHORT, tools=TOOLS, chat_template=template)
        assert '<tool_call>{"name": "now"' in str(output.prompt)
        assert "user: Result of now: noon" in str(output.prompt)


@pytest.mark.parametrize("method", ["chat", "stream", "pin"])
def test_an_unknown_keyword_of_a_conversation_names_the_method_and_the_known_ones(
    tiny: LLM, method: str
) -> None:
    with pytest.raises(TypeError) as caught:
        getattr(tiny, method)([USER], add_generation_promt=True)
    for word in (f"{method}()", "'add_generation_promt'", "'add_generation_prompt'", "tools"):
        assert word in str(caught.value)
    assert "PromptReader" not in str(caught.value)


@pytest.mark.parametrize(
    ("option", "value"),
    [
        ("chat_template", 5),
        ("chat_template", b"{{ messages }}"),
        ("tools", "now"),
        ("tools", ["now"]),
        (
            "tools",
            [{"deep": [[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[1]]]]]]]]]]]]]]]]]]]]]]]]]]]]]]]]]]]}],
        ),
        ("add_generation_prompt", "yes"),
        ("continue_final_message", 1),
        ("chat_template_kwargs", {1: 2}),
    ],
)
def test_a_bad_option_of_a_conversation_is_a_request_error_that_names_it(
    tiny: LLM, option: str, value: Any
) -> None:
    with pytest.raises(RequestError, match=option):
        tiny.chat([USER], SHORT, **{option: value})


def test_the_last_message_is_the_beginning_of_the_answer(tiny: LLM) -> None:
    messages = [USER, {"role": "assistant", "content": "Sure, it"}]
    template = "{% for m in messages %}[{{ m.content }}]\n{% endfor %}"
    given = {"chat_template": template, "continue_final_message": True}
    [output] = tiny.chat(messages, SHORT, **given)
    assert str(output.prompt).endswith("]\n[Sure, it")
    [same] = tiny.generate({"prompt_token_ids": output.prompt_token_ids}, SHORT)
    assert output.outputs[0].token_ids == same.outputs[0].token_ids
    [piece, *_] = tiny.stream(messages, SHORT, **given)
    assert piece.prompt_token_ids == output.prompt_token_ids
    tiny.enqueue([messages], SHORT, **given)
    assert tiny.wait_for_completion()[0].prompt_token_ids == output.prompt_token_ids
    tokenizer = tiny.get_tokenizer()
    assert tokenizer.apply_chat_template(messages, **given) == output.prompt_token_ids


def test_a_message_is_continued_or_a_turn_is_opened_not_both(tiny: LLM) -> None:
    both = {"add_generation_prompt": True, "continue_final_message": True}
    for call in (tiny.chat, tiny.stream, tiny.get_tokenizer().apply_chat_template):
        with pytest.raises(RequestError, match="cannot both be True"):
            call([USER], **both)
    with pytest.raises(TypeError, match="continue_final_message appl"):
        tiny.stream("text", continue_final_message=True)


# ---- truncation ----------------------------------------------------------------------------------


def turn(number: int, answered: bool = True) -> list[dict[str, str]]:
    said = [{"role": "user", "content": f"q{number}"}]
    return said + [{"role": "assistant", "content": f"a{number}"}] * answered


def test_minus_one_leaves_room_for_the_answer(tiny: LLM) -> None:
    ids = [5 + i % 100 for i in range(300)]
    for max_tokens, kept in ((1, 127), (8, 120), (100, 28), (127, 1), (None, 96), (128, 96)):
        params = SHORT.clone(max_tokens=max_tokens, truncate_prompt_tokens=-1)
        read = tiny._reader.read(ids, params)
        assert read.token_ids == tuple(ids[-kept:])


def test_a_short_prompt_is_not_cut(tiny: LLM) -> None:
    params = SHORT.clone(max_tokens=100, truncate_prompt_tokens=-1)
    assert tiny._reader.read([5, 6, 7], params).token_ids == (5, 6, 7)


@pytest.mark.parametrize("cut", [-1, 100])
def test_a_long_conversation_loses_its_oldest_turns_and_no_part_of_one(tiny: LLM, cut: int) -> None:
    system = {"role": "system", "content": "Be brief."}
    params = SHORT.clone(max_tokens=28, truncate_prompt_tokens=cut)
    messages = [system, *(m for number in range(30) for m in turn(number)), *turn(30, False)]
    reader = tiny._reader
    read = reader.read_one("chat", messages, params, {})
    assert len(read.token_ids) <= 100
    lines = spoken(reader, messages, params).splitlines()
    assert lines[0] == "system: Be brief."
    assert lines[-1] == "user: q30"
    first = int(lines[1].removeprefix("user: q"))
    expected = [f"{m['role']}: {m['content']}" for n in range(first, 31) for m in turn(n, n < 30)]
    assert lines[1:] == expected
    # one turn more would not have fitted
    more = [system, *(m for n in range(first - 1, 31) for m in turn(n, n < 30))]
    assert len(reader.read_one("chat", more, SHORT, {}).token_ids) > 100
    [output] = tiny.chat(messages, params)
    assert list(output.prompt_token_ids) == list(read.token_ids)
    assert len(output.outputs[0].token_ids) == 28


def test_a_turn_with_tool_calls_stays_whole(tiny: LLM) -> None:
    last = [
        {"role": "user", "content": "What time is it?"},
        {"role": "assistant", "tool_calls": [CALL], "content": "calls"},
        {"role": "tool", "content": "noon"},
    ]
    messages = [*(m for number in range(20) for m in turn(number)), *last]
    params = SHORT.clone(max_tokens=8, truncate_prompt_tokens=-1)
    options = {"chat_template": READS_TOOLS}
    text = str(tiny._reader.read_one("chat", messages, params, options).text)
    assert text.strip().endswith("user: What time is it?\nassistant: calls\ntool: noon")
    assert "q0\n" not in text


def test_where_the_last_turn_does_not_fit_the_error_says_so(tiny: LLM) -> None:
    messages = [*turn(1), {"role": "user", "content": "many words " * 30}]
    params = SHORT.clone(max_tokens=8, truncate_prompt_tokens=-1)
    with pytest.raises(RequestError, match=r"the last turn and the system messages.*120"):
        tiny.chat(messages, params)


def test_without_truncation_a_long_conversation_is_refused(tiny: LLM) -> None:
    with pytest.raises(RequestError, match="truncate_prompt_tokens=-1"):
        tiny.chat([m for number in range(30) for m in turn(number)], SHORT)


# ---- streams for event loops ---------------------------------------------------------------------


@pytest.mark.parametrize(
    ("prompt", "options", "error"),
    [
        ([], {}, RequestError),
        ([999], {}, RequestError),
        ({"prompt": 5}, {}, RequestError),
        ("word " * 100_000, {}, RequestError),
        ([{"role": "user", "content": None}], {}, RequestError),
        ([USER], {"tools": TOOLS}, RequestError),
        ([USER], {"toolz": TOOLS}, TypeError),
        ("word " * 100_000, {"tools": TOOLS}, TypeError),
    ],
)
def test_astream_refuses_a_bad_request_at_the_call(
    tiny: LLM, prompt: Any, options: dict[str, Any], error: type[Exception]
) -> None:
    with pytest.raises(error):
        tiny.astream(prompt, SHORT, **options)
    with pytest.raises(RequestError, match="sampling_params"):
        tiny.astream("Hi", {"temperature": 0})  # type: ignore[arg-type]


def test_astream_yields_what_stream_yields(tiny: LLM) -> None:
    expected = [tokens(piece) for piece in tiny.stream("Hello", SHORT)]

    async def read(awaited: bool) -> list[list[int]]:
        stream = tiny.astream("Hello", SHORT)
        if awaited:
            assert await stream is stream
        return [tokens(piece) async for piece in stream]

    assert asyncio.run(read(False)) == asyncio.run(read(True)) == expected


def test_a_stream_that_is_dropped_unread_leaves_no_request_behind(tiny: LLM) -> None:
    async def drop() -> None:
        tiny.astream("Hello", SHORT)
        await tiny.astream("Hello", SHORT)
        stream = tiny.astream("Hello", SHORT)
        await stream.aclose()

    asyncio.run(drop())
    assert not tiny._driver._sinks and not tiny.has_unfinished_requests


def test_a_stream_left_early_aborts_its_request(tiny: LLM) -> None:
    async def leave() -> None:
        async for piece in tiny.astream(ids(1), LONG):
            assert not piece.finished
            break

    asyncio.run(leave())
    settle(tiny)


def test_a_long_prompt_of_a_stream_is_checked_when_it_is_awaited(tiny: LLM) -> None:
    words = {"prompt": "word " * 20_000}
    cut = SHORT.clone(truncate_prompt_tokens=9)

    async def ask() -> None:
        stream = tiny.astream(words, SHORT)
        with pytest.raises(RequestError, match="the context holds 128"):
            await stream
        with pytest.raises(RequestError, match="the context holds 128"):
            async for _ in tiny.astream(words, SHORT):
                pass
        pieces = [piece async for piece in tiny.astream(words, cut)]
        [output] = await tiny.agenerate(words, cut)
        assert [token for piece in pieces for token in tokens(piece)] == tokens(output)
        assert len(output.prompt_token_ids) == 9

    asyncio.run(ask())
    assert not tiny.has_unfinished_requests


def test_a_closed_llm_refuses_a_stream_at_the_call(tiny_path: Path) -> None:
    with LLM(tiny_path, max_model_len=128) as llm:
        pass
    with pytest.raises(EngineClosedError):
        llm.astream("Hello", SHORT)


# ---- enqueue -------------------------------------------------------------------------------------


def test_enqueue_takes_conversations_beside_prompts(tiny: LLM) -> None:
    chat = [USER]
    expected = tokens(tiny.chat(chat, SHORT)[0])
    assert tiny.enqueue(chat, SHORT) and tiny.enqueue(["Hello", chat], SHORT)
    first, text, second = tiny.wait_for_completion()
    assert tokens(first) == tokens(second) == expected
    assert tokens(text) == tokens(tiny.generate("Hello", SHORT)[0])
    [name] = tiny.enqueue(chat, SHORT, tools=TOOLS, chat_template=READS_TOOLS)
    [output] = tiny.wait_for_completion()
    assert output.request_id == name and '"parameters"' in str(output.prompt)
    with pytest.raises(TypeError, match="apply only to a conversation"):
        tiny.enqueue("Hello", SHORT, tools=TOOLS)


def test_enqueue_takes_ids_of_the_caller(tiny: LLM) -> None:
    assert tiny.enqueue("Hello", SHORT, request_id="mine") == ["mine"]
    assert tiny.enqueue(["a", "b"], SHORT, request_id=["0", "1"]) == ["0", "1"]
    tiny.abort("0")
    outputs = tiny.wait_for_completion()
    assert [output.request_id for output in outputs] == ["mine", "0", "1"]
    assert outputs[1].outputs[0].finish_reason == "abort"
    assert tiny.enqueue("Hello", SHORT, request_id="mine") == ["mine"]
    assert [output.request_id for output in tiny.wait_for_completion()] == ["mine"]


@pytest.mark.parametrize("request_id", ["", "#3", 5, "x" * 300, ["a", "b"], ["a", "a"], [], [5]])
def test_a_bad_request_id_is_refused(tiny: LLM, request_id: Any) -> None:
    prompts = ["a", "b"] if request_id == ["a", "a"] else "a"
    with pytest.raises(RequestError, match="request_id"):
        tiny.enqueue(prompts, SHORT, request_id=request_id)
    assert not tiny.has_unfinished_requests


def test_an_id_in_use_is_refused_and_the_first_request_is_unharmed(tiny: LLM) -> None:
    tiny.enqueue("Hello", SHORT, request_id="twice")
    with pytest.raises(RequestError, match=r"request_id.*twice"):
        tiny.enqueue("Bye", SHORT, request_id="twice")
    while tiny._driver.has_work:
        tiny._driver.step()
    with pytest.raises(RequestError, match=r"'twice' was not collected"):
        tiny.enqueue(["a", "b"], SHORT, request_id=["other", "twice"])
    [output] = tiny.wait_for_completion()
    assert tokens(output) == tokens(tiny.generate("Hello", SHORT)[0])
    assert not tiny.has_unfinished_requests
