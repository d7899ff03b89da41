"""llama-cpp-python's submodules, pickling, and the words of errors."""

from __future__ import annotations

import importlib
import json
import pickle
from collections.abc import Iterator
from pathlib import Path
from typing import Any, get_type_hints

import pytest
from PIL import Image

from sdk import LLM, RequestError
from sdk.compat import llama_cpp
from sdk.compat.llama_cpp import Llama, LlamaDiskCache, LlamaHFTokenizer, LlamaRAMCache
from sdk.compat.llama_cpp._chat import _OTHERS
from sdk.compat.llama_cpp.llama_chat_format import (
    ChatFormatterResponse,
    Jinja2ChatFormatter,
    Llava15ChatHandler,
    Llava16ChatHandler,
    MTMDChatHandler,
)
from sdk.compat.llama_cpp.llama_types import (
    CreateChatCompletionResponse,
    CreateChatCompletionStreamResponse,
    CreateCompletionResponse,
    CreateEmbeddingResponse,
)
from sdk.testing import FakeLLM, tiny_model

ASK = [{"role": "user", "content": "How are you?"}]


@pytest.fixture(scope="module")
def gguf(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(tiny_model(tmp_path_factory.mktemp("llama"), "q8_0"))


@pytest.fixture(scope="module")
def tiny(gguf: str) -> Iterator[Llama]:
    with Llama(gguf, n_ctx=128, n_threads=1, seed=3) as llama:
        yield llama


@pytest.mark.parametrize(
    "place",
    [
        *("llama:Llama", "llama:LogitsProcessorList", "llama_grammar:LlamaGrammar"),
        *("llama_tokenizer:LlamaTokenizer", "llama_tokenizer:BaseLlamaTokenizer"),
        *("llama_cache:LlamaRAMCache", "llama_cache:LlamaDiskCache"),
        "llama_speculative:LlamaPromptLookupDecoding",
    ],
)
def test_submodules_have_the_same_classes_as_the_package(place: str) -> None:
    module, _, name = place.partition(":")
    found = getattr(importlib.import_module(f"sdk.compat.llama_cpp.{module}"), name)
    assert found is getattr(llama_cpp, name)


def test_the_package_has_a_version_and_no_c_functions() -> None:
    assert llama_cpp.__version__ == "0.3.36"
    assert llama_cpp.llama_types.Completion is CreateCompletionResponse
    with pytest.raises(AttributeError, match=r"has no llama_decode: llama\.cpp's C functions"):
        _ = llama_cpp.llama_decode
    with pytest.raises(AttributeError, match="has no attribute 'other'"):
        _ = llama_cpp.other


def check(value: Any, kind: Any) -> None:
    """Keys of results are those of the type, nested ones too."""
    hints = get_type_hints(kind)
    assert kind.__required_keys__ <= value.keys() <= hints.keys()
    for name, one in value.items():
        inner = getattr(hints[name], "__args__", (None,))[0]
        if isinstance(one, list) and one and hasattr(inner, "__required_keys__"):
            check(one[0], inner)
        if isinstance(one, dict) and hasattr(hints[name], "__required_keys__"):
            check(one, hints[name])


def test_results_have_the_keys_of_the_types(tiny: Llama) -> None:
    check(tiny("the cat", max_tokens=2), CreateCompletionResponse)
    check(tiny.create_chat_completion(ASK, max_tokens=2), CreateChatCompletionResponse)
    for chunk in tiny.create_chat_completion(ASK, max_tokens=2, stream=True):
        check(chunk, CreateChatCompletionStreamResponse)
    check(tiny.create_embedding("the cat"), CreateEmbeddingResponse)


def test_a_pickled_llama_is_loaded_again(tiny: Llama) -> None:
    with pickle.loads(pickle.dumps(tiny)) as again:
        assert again.n_ctx() == 128
        assert again.llm is not tiny.llm
        tiny.set_seed(3)
        expected = tiny("the cat", max_tokens=4)["choices"]
        assert again("the cat", max_tokens=4)["choices"] == expected


def test_an_llm_says_what_to_pickle_instead(tiny: Llama) -> None:
    with pytest.raises(TypeError, match=r"an LLM cannot be pickled.*pass the model's path"):
        pickle.dumps(tiny.llm)
    assert isinstance(tiny.llm, LLM)


@pytest.mark.parametrize(
    "call",
    [
        lambda llama: llama("the cat " * 200),
        lambda llama: list(llama("the cat " * 200, stream=True)),
        lambda llama: list(llama.generate([5] * 300)),
        lambda llama: llama.create_chat_completion([{"role": "user", "content": "the cat " * 200}]),
        lambda llama: llama.embed("the cat " * 200, truncate=False),
        lambda llama: llama("the cat " * 200, logits_processor=[lambda ids, scores: scores]),
    ],
)
def test_errors_name_the_arguments_of_llama(tiny: Llama, call: Any) -> None:
    with pytest.raises(RequestError, match=r"n_ctx|n_batch") as caught:
        call(tiny)
    assert "max_model_len" not in str(caught.value)


def test_a_context_that_is_too_long_is_named_as_the_caller_wrote_it(gguf: str) -> None:
    with pytest.raises(RequestError, match="n_ctx") as caught:
        Llama(gguf, n_ctx=1 << 40, n_threads=1)
    assert "max_model_len" not in str(caught.value)


@pytest.mark.parametrize("name", _OTHERS)
def test_formats_that_are_not_built_in_say_what_to_use(name: str) -> None:
    with pytest.raises(RequestError, match=f"chat_format='{name}' .* leave chat_format out"):
        Llama("nowhere.gguf", chat_format=name)


TEMPLATE = "{{ bos_token }}{% for m in messages %}[{{ m.content }}]{% endfor %}"
ANSWER = TEMPLATE + "{% if add_generation_prompt %}>{% endif %}"


def test_a_formatter_renders_a_template() -> None:
    formatter = Jinja2ChatFormatter(ANSWER, "</s>", "<s>", stop_token_ids=[7])
    made = formatter(messages=ASK)
    assert isinstance(made, ChatFormatterResponse)
    assert (made.prompt, made.stop, made.added_special) == ("<s>[How are you?]>", ["</s>"], True)
    assert made.stopping_criteria is not None
    assert made.stopping_criteria([1, 7], None) and not made.stopping_criteria([7, 1], None)  # type: ignore[arg-type]
    plain = Jinja2ChatFormatter(ANSWER, "</s>", "<s>", add_generation_prompt=False)
    assert plain(messages=ASK).prompt == "<s>[How are you?]"
    assert plain(messages=ASK).stopping_criteria is None


def test_a_formatter_becomes_a_chat_handler(gguf: str) -> None:
    formatter = Jinja2ChatFormatter("{{ bos_token }}" + ANSWER[15:], "'e\\", "(b'\\n)")
    with Llama(gguf, n_ctx=128, n_threads=1, chat_handler=formatter.to_chat_handler()) as llama:
        found = llama.create_chat_completion(ASK, max_tokens=1)
        assert found["object"] == "chat.completion"
        prompt = llama.detokenize(llama.input_ids.tolist()[:-1], special=True).decode()
        assert prompt.endswith("(b'\\n)[How are you?]>")
        stop = Jinja2ChatFormatter(TEMPLATE, "</s>", "<s>", stop_token_ids=[0, 1, 2, 3])
        asked = {"max_tokens": 2, "stream": True}
        llama.chat_handler = stop.to_chat_handler()
        assert [one["object"] for one in llama.create_chat_completion(ASK, **asked)]


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("register_chat_format", "nothing is registered for a process; pass chat_handler="),
        ("LlamaChatCompletionHandlerRegistry", "nothing is registered for a process"),
        ("MoondreamChatHandler", "has no MoondreamChatHandler: use MTMDChatHandler"),
        ("format_gemma", "use Jinja2ChatFormatter, or Llama"),
    ],
)
def test_missing_names_say_what_to_use(name: str, message: str) -> None:
    module = importlib.import_module("sdk.compat.llama_cpp.llama_chat_format")
    with pytest.raises(ImportError, match=message):
        getattr(module, name)
    with pytest.raises(AttributeError, match="__nothing__"):
        _ = module.__nothing__


def test_a_cache_on_disk_is_refused_and_one_in_memory_accepted(tiny: Llama) -> None:
    with pytest.raises(RequestError, match="LlamaDiskCache is not supported: prefixes are cached"):
        LlamaDiskCache()
    tiny.set_cache(LlamaRAMCache())
    assert tiny.cache is not None


def test_a_tokenizer_of_transformers_splits_and_joins(golden: Any) -> None:
    tokenizer = LlamaHFTokenizer.from_pretrained(str(golden / "arch-llama3" / "hf"))
    ids = tokenizer.tokenize(b"the cat sat", special=False)
    assert tokenizer.detokenize(ids) == b"the cat sat"
    assert (
        tokenizer.detokenize(ids[1:], prev_tokens=ids[:1])
        == b"the cat sat"[len(tokenizer.detokenize(ids[:1])) :]
    )


def test_a_model_reads_texts_with_a_tokenizer_of_transformers(tmp_path: Path) -> None:
    gguf = tiny_model(tmp_path, "f16")
    folder = tiny_model(tmp_path, "float16")
    file = folder / "tokenizer.json"
    data = json.loads(file.read_text(encoding="utf-8"))
    vocab = data["model"]["vocab"]
    vocab["a"], vocab["b"] = vocab["b"], vocab["a"]  # so that it is seen which one is used
    file.write_text(json.dumps(data), encoding="utf-8")
    tokenizer = LlamaHFTokenizer.from_pretrained(str(folder))
    with Llama(str(gguf)) as llama:
        assert llama.tokenize(b"a", add_bos=False) == [vocab["b"]]
    with Llama(str(gguf), tokenizer=tokenizer) as llama:
        assert llama.tokenize(b"a", add_bos=False) == [vocab["a"]]
    tokenizer.hf_tokenizer.name_or_path = "nobody/nothing"
    with pytest.raises(RequestError, match=r"tokenizer: expected one .* found 'nobody/nothing'; s"):
        Llama(str(gguf), tokenizer=tokenizer)


def test_handlers_of_images_name_the_file_of_the_encoder_and_the_format(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, projector = tmp_path / "m.gguf", tmp_path / "mmproj.gguf"
    model.touch()
    projector.touch()
    options: list[dict[str, Any]] = []
    fake = FakeLLM("Red.", images=True)

    def opened(path: str, **given: Any) -> FakeLLM:
        options.append(given)
        return fake

    monkeypatch.setattr("sdk.compat.llama_cpp.llama.LLM", opened)
    monkeypatch.setattr(Llama, "metadata", {})
    with pytest.raises(RequestError, match="clip_model_path: expected a file, found"):
        Llava15ChatHandler(clip_model_path=str(tmp_path / "nowhere.gguf"))
    handler = Llava15ChatHandler(clip_model_path=str(projector), verbose=False)
    pixels = Image.new("RGB", (40, 30), "red")
    image = {"type": "image", "image": pixels}
    content = [{"type": "text", "text": "What is it?"}, image, image]
    with Llama(model_path=str(model), chat_handler=handler, verbose=False) as llama:
        assert options[0]["mmproj"] == str(projector)
        said = [{"role": "user", "content": content}]
        found = llama.create_chat_completion(said)
        assert found["choices"][0]["message"]["content"] == "Red."
        assert _text(fake, said, Llava15ChatHandler).endswith(
            "questions.\nUSER: <image><image>What is it?\nASSISTANT: "
        )
        llama.chat_handler = Llava16ChatHandler(str(projector))
        list(llama.create_chat_completion(said, stream=True))
        assert "USER: <image>\n<image>\nWhat is it?" in _text(fake, said, Llava16ChatHandler)
        llama.chat_handler = MTMDChatHandler(str(projector))
        assert llama.create_chat_completion(said)["usage"]["prompt_tokens"] > 8


def _text(llm: FakeLLM, messages: list[Any], kind: type[MTMDChatHandler]) -> str:
    """The prompt of a format, in which each image is shown as one token."""
    assert kind.chat_form is not None
    template = {"chat_template": kind.chat_form.template}
    [prompt] = llm._job_maker.read_chats("chat", messages, None, template).prompts
    assert prompt.text is not None
    return prompt.text
