"""A call that is nearly right gets one line that names the right one."""

from __future__ import annotations

import asyncio
import copy
import inspect
import pickle
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from sdk import LLM, RequestError, SamplingParams
from sdk.api.outputs import EmbeddingOutput
from sdk.testing import FakeLLM

M = [{"role": "user", "content": "x"}]
P: Any = SamplingParams


@pytest.fixture(scope="module")
def fake() -> Iterator[Any]:
    with FakeLLM("yes") as llm:
        yield llm


CALLS: dict[str, tuple[Callable[[Any], object], str]] = {
    "a parameter": (
        lambda llm: llm.generate("hi", max_tokens=5),
        "pass it as generate(..., SamplingParams(max_tokens=5))",
    ),
    "of a chat": (lambda llm: llm.chat(M, top_p=0.5), "chat(..., SamplingParams(top_p=0.5))"),
    "of a stream": (lambda llm: llm.stream("hi", seed=5), "stream(..., SamplingParams(seed=5))"),
    "of answers as they end": (
        lambda llm: llm.as_completed(["hi"], seed=5),
        "as_completed(..., SamplingParams(seed=5))",
    ),
    "a rival's name": (lambda llm: llm.generate("hi", max_new_tokens=5), "use max_tokens, in"),
    "misspelt": (lambda llm: llm.chat(M, temprature=0), "did you mean SamplingParams(temperature="),
    "a misspelt keyword": (lambda llm: llm.generate("a", use_tqmd=False), "mean 'use_tqdm'"),
    "not the first argument": (lambda llm: llm.generate(prompt="hi"), "did you mean 'prompts'"),
    "messages": (lambda llm: llm.generate(messages=M), "first argument of chat(messages)"),
    "tools without a chat": (lambda llm: llm.generate("hi", tools=[]), "which chat() takes"),
    "an option of the model": (lambda llm: llm.generate("hi", n_ctx=5), "LLM(...), use max_model"),
    "our option of the model": (
        lambda llm: llm.generate("hi", memory="1GiB"),
        "an option of the model, LLM(..., memory=...)",
    ),
    "a system prompt": (lambda llm: llm.chat(M, system="x"), "{'role': 'system', 'content': ...}"),
    "batches of embeddings": (lambda llm: llm.embed("hi", batch_size=5), "makes its own batches"),
    "sampling of embeddings": (lambda llm: llm.embed("hi", max_tokens=5), "it generates no text"),
    "sentence-transformers' size": (lambda llm: llm.embed("hi", truncate_dim=4), "dimensions=N"),
    "sentence-transformers' type": (lambda llm: llm.embed("hi", precision="int8"), "output_dtype="),
    "nothing like it": (
        lambda llm: llm.embed("hi", zzz=5),
        "it takes dimensions, lora_request, output_dtype, prompt",
    ),
    "a conversation": (lambda llm: llm.generate(M), "pass conversations to chat()"),
    "conversations": (lambda llm: llm.generate([M, M]), "pass conversations to chat()"),
    "a dict of parameters": (
        lambda llm: llm.generate("hi", {"max_tokens": 5}),
        "write SamplingParams(max_tokens=64, ...), or SamplingParams(**values)",
    ),
    "a list of dicts": (lambda llm: llm.generate(["a"], [{"n": 2}]), "SamplingParams(**values)"),
    "a text to chat": (
        lambda llm: llm.chat("hi"),
        "chat([{'role': 'user', 'content': 'hi'}]), and generate(...) continues a text",
    ),
    "a message to chat": (lambda llm: llm.chat(M[0]), "chat([message])"),
    "like a function": (lambda llm: llm("hi", max_tokens=5), "use generate(prompts), chat(mess"),
    "a rival's method": (lambda llm: llm.create_chat_completion(M), "use chat(messages)"),
    "a misspelt method": (lambda llm: llm.genrate("hi"), "did you mean 'generate'?"),
    "a rival's field": (lambda llm: llm.generate("a")[0].content, "output.outputs[0].text"),
    "a field of the answer": (
        lambda llm: llm.generate("a")[0].finish_reason,
        "use output.outputs[0].finish_reason",
    ),
    "a rival's field of an answer": (
        lambda llm: llm.generate("a")[0].outputs[0].content,
        "use text",
    ),
    "a vector": (lambda llm: llm.embed("a")[0].outputs, "use embedding, a list of floats"),
    "a structure": (lambda llm: P(json={}), "use structured_outputs={'json': schema}"),
    "no keyword": (lambda llm: P(100), "takes keywords only, such as SamplingParams(max_tokens=64"),
    "a model's option in parameters": (lambda llm: P(max_model_len=9), "LLM(..., max_model_len="),
    "a call's keyword in parameters": (lambda llm: P(returns=int), "chat(..., returns=...)"),
    "a parameter for the model": (
        lambda llm: LLM("m", temperature=0.5),  # type: ignore[call-arg]
        "llm.generate(prompts, SamplingParams(temperature=0.5)), or for calls without parameters "
        "LLM(..., override_generation_config={'temperature': 0.5})",
    ),
    "a rival's parameter for the model": (
        lambda llm: LLM("m", max_new_tokens=5),  # type: ignore[call-arg]
        "SamplingParams(...): use max_tokens",
    ),
    "a keyword for the model": (
        lambda llm: LLM("m", tools=[]),  # type: ignore[call-arg]
        "llm.chat(messages, tools=...)",
    ),
}


@pytest.mark.parametrize("name", CALLS)
def test_the_error_names_the_right_call_in_one_line(name: str, fake: Any) -> None:
    call, advice = CALLS[name]
    with pytest.raises((TypeError, RequestError, AttributeError)) as error:
        call(fake)
    assert advice in str(error.value) and "\n" not in str(error.value)


@pytest.mark.parametrize("role", ["usr", "User", " user", "human", "users"])
def test_a_misspelt_role_names_the_right_one(role: str, fake: Any) -> None:
    with pytest.raises(RequestError, match=r"messages\[1\]\.role: .* did you mean 'user'\?"):
        fake.chat([{"role": "system", "content": "x"}, {"role": role, "content": "x"}])


def test_other_roles_are_left_alone(fake: Any) -> None:
    for role in ("narrator", "critic", "tool"):
        assert fake.chat([*M, {"role": role, "content": "x"}])[0].text == "yes"
    named = "{% for m in messages %}{% if m.role == 'usr' %}{{ m.content }}{% endif %}{% endfor %}"
    assert fake.chat([{"role": "usr", "content": "x"}], chat_template=named)[0].text == "yes"


def test_async_calls_say_the_same_when_they_are_awaited(fake: Any) -> None:
    assert inspect.iscoroutinefunction(LLM.aembed) and inspect.iscoroutinefunction(LLM.agenerate)
    for call in (fake.agenerate, fake.achat):
        with pytest.raises(TypeError, match=r"SamplingParams\(max_tokens=5\)"):
            asyncio.run(call(M, max_tokens=5))
    with pytest.raises(TypeError, match="makes its own batches"):
        asyncio.run(fake.aembed("a", batch_size=5))


def test_objects_that_explain_names_can_still_be_copied_and_pickled(fake: Any) -> None:
    output = fake.generate("a")[0]
    vector: EmbeddingOutput = fake.embed("a")[0]
    for one in (output, output.outputs[0], vector):
        assert pickle.loads(pickle.dumps(one)) == copy.deepcopy(one) == one
        assert not hasattr(one, "__array__") and not hasattr(one, "_repr_svg_")
    assert not hasattr(fake, "__array__") and "generate" in dir(fake)
