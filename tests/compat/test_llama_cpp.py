"""llama-cpp-python's interface: arguments, sampling, grammars, chats, state and errors."""

from __future__ import annotations

import inspect
import json
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from sdk import LLM, EngineClosedError, RequestError, SamplingParams
from sdk.api.errors import SdkError
from sdk.compat import llama_cpp
from sdk.compat.llama_cpp import (
    CompletionError,
    Llama,
    LlamaDraftModel,
    LlamaGrammar,
    LlamaPromptLookupDecoding,
    LlamaRAMCache,
    LlamaTokenizer,
    LogitsProcessorList,
    MinTokensLogitsProcessor,
    StoppingCriteriaList,
)
from sdk.compat.llama_cpp._chat import FORMATS, ChatFormat, chat_format, check_named
from sdk.compat.llama_cpp._options import (
    OLD,
    REFUSED,
    WITHOUT_EFFECT,
    check_unscaled,
    llm_options,
)
from sdk.compat.llama_cpp._sampling import Callbacks
from sdk.testing import tiny_model
from tests.loaders.hub_server import serving

ORIGINALS = Path(__file__).parent / "originals"
CAPITAL = "The capital of France is"
ASK = [{"role": "user", "content": "How are you?"}]
TOOL = {"name": "now", "parameters": {"type": "object", "properties": {}}}


@pytest.fixture(scope="module")
def gguf(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(tiny_model(tmp_path_factory.mktemp("llama"), "q8_0"))


@pytest.fixture(scope="module")
def tiny(gguf: str) -> Iterator[Llama]:
    with Llama(gguf, n_ctx=512, n_threads=1) as llama:
        yield llama


@pytest.fixture(scope="module")
def real(smollm2: Path) -> Iterator[Llama]:
    with Llama(str(smollm2), n_ctx=256, logits_all=True) as llama:
        yield llama


def text_of(completion: dict[str, Any]) -> str:
    return str(completion["choices"][0]["text"])


# ---- loading -------------------------------------------------------------------------------------


def test_arguments_become_options(gguf: str) -> None:
    with Llama(
        gguf,
        n_ctx=64,
        n_batch=32,
        n_threads=1,
        type_k=llama_cpp.GGML_TYPE_Q8_0,
        rope_freq_base=5000.0,
        draft_model=LlamaPromptLookupDecoding(max_ngram_size=3, num_pred_tokens=100),
        max_num_seqs=4,
    ) as llama:
        config = llama.llm.config
        assert (config.max_model_len, config.max_num_batched_tokens) == (64, 32)
        assert (config.num_threads, config.max_num_seqs) == (1, 4)
        assert config.kv_cache_dtype == "k8v16"
        assert config.hf_overrides == {"rope_theta": 5000.0}
        drafts: Any = config.speculative_config
        assert (drafts.method, drafts.num_speculative_tokens) == ("ngram", 64)
        assert (drafts.prompt_lookup_min, drafts.prompt_lookup_max) == (1, 3)
        assert llama.n_ctx() == 64 and llama.n_batch == 32
    with Llama(gguf, n_ctx=0, n_threads_batch=1) as llama:
        assert llama.n_ctx() == LLM.plan(gguf).max_model_len
        assert llama.llm.config.num_threads == 1
        assert llama.llm.config.max_num_seqs == 1


def test_the_page_lists_every_chat_format() -> None:
    page = Path(__file__).parents[2] / "docs" / "compat" / "compat.md"
    section = page.read_text(encoding="utf-8").partition("## llama-cpp-python")[2]
    assert all(f"`{name}`" in section for name in FORMATS)


@pytest.mark.parametrize("found", [False, True])
def test_layers_go_to_a_gpu_if_there_is_one(monkeypatch: pytest.MonkeyPatch, found: bool) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: found)
    default = {p.name: p.default for p in inspect.signature(Llama).parameters.values()}
    assert llm_options(default)["device"] == "cpu"
    assert llm_options({**default, "n_gpu_layers": -1})["device"] == ("cuda" if found else "cpu")
    assert llm_options({**default, "embedding": True})["max_num_seqs"] == 8


def test_arguments_that_change_answers_are_rejected_by_name(gguf: str) -> None:
    for name, (off, instead) in REFUSED.items():
        other = not off if isinstance(off, bool) else {"a": 1} if off is None else off + 2
        with pytest.raises(RequestError, match=f"^{name}=.* is not supported: ") as raised:
            Llama(gguf, **{name: other})
        assert instead in str(raised.value)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"n_ctx": -1}, "n_ctx: expected an integer of at least 0, found -1"),
        ({"n_batch": True}, "n_batch: expected an integer of at least 1, found True"),
        ({"type_v": 6}, "type_v: expected one of the types 0, 1, 30, 8, 2 .* found 6"),
        ({"pooling_type": 4}, "pooling_type: expected -1 to 3, found 4; for a reranker"),
        ({"draft_model": LlamaDraftModel()}, "draft_model: expected LlamaPromptLookupDecoding"),
        ({"tokenizer": "name"}, "tokenizer: expected a LlamaHFTokenizer, found 'name'; without"),
        ({"chat_format": "none"}, "chat_format: expected None .* found 'none'"),
    ],
)
def test_bad_arguments_are_errors(gguf: str, arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(RequestError, match=message):
        Llama(gguf, **arguments)


def test_arguments_that_langchain_passes_are_accepted(gguf: str) -> None:
    old = dict.fromkeys(OLD, True)
    with Llama(gguf, n_ctx=64, rope_freq_scale=1.0, seed=-1, **old) as llama:
        assert llama("the cat", max_tokens=2)["choices"]


def test_a_file_s_own_scaling_is_not_turned_off() -> None:
    for key in ("llama.rope.scaling.factor", "qwen2.rope.scale_linear"):
        check_unscaled(0.0, lambda key=key: {key: "4.0"})  # type: ignore[misc]
        check_unscaled(1.0, lambda key=key: {key: "1.0", "a": "b"})  # type: ignore[misc]
        with pytest.raises(RequestError, match=f"rope_freq_scale=1.0 .*{key} is 4.0.; leave"):
            check_unscaled(1.0, lambda key=key: {key: "4.0"})  # type: ignore[misc]


def test_unknown_arguments_and_missing_files_are_errors(gguf: str) -> None:
    with pytest.raises(TypeError, match="unknown option 'n_cts'"):
        Llama(gguf, n_cts=3)
    with pytest.raises(RequestError, match=r"model_path: expected a file, found 'nowhere.gguf'"):
        Llama("nowhere.gguf")


def test_every_argument_is_used_or_listed() -> None:
    """An argument that is neither used nor refused must be known to have no effect."""
    given = set(inspect.signature(Llama.__init__).parameters)
    used = {
        *("model_path", "n_gpu_layers", "seed", "n_ctx", "n_batch", "n_threads", "pooling_type"),
        *("rope_freq_base", "last_n_tokens_size", "chat_format", "chat_handler", "draft_model"),
        *("type_k", "type_v", "spm_infill", "lora_path", "lora_scale", "tokenizer"),
    }
    assert given - {"self", "kwargs"} == used | set(REFUSED) | set(WITHOUT_EFFECT)


def test_a_file_of_the_hub_is_found_by_pattern(
    gguf: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
    with serving() as hub:
        template = f"{hub.url}/{{repo_id}}/resolve/{{revision}}/{{filename}}"
        monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", hub.url)
        monkeypatch.setattr("huggingface_hub.constants.HUGGINGFACE_CO_URL_TEMPLATE", template)
        hub.add("me/it", **{"it-q8_0.gguf": Path(gguf).read_bytes(), "it-q4_0.gguf": b"GGUF"})
        with Llama.from_pretrained(
            "me/it", "*q8_0.gguf", cache_dir=tmp_path, n_ctx=32, n_threads=1
        ) as llama:
            assert Path(llama.model_path).is_relative_to(tmp_path)
            assert llama.n_ctx() == 32
        assert hub.got() == ["it-q8_0.gguf"]


# ---- sampling ------------------------------------------------------------------------------------


def params_of(tiny: Llama, **arguments: Any) -> SamplingParams:
    """The parameters with which a completion runs."""
    found: list[SamplingParams] = []
    generate = tiny.llm.generate

    def noting(prompts: Any, params: Any, **more: Any) -> Any:
        found.append(params)
        return generate(prompts, params, **more)

    tiny.llm.generate = noting  # type: ignore[method-assign]
    try:
        tiny("the cat", **{"max_tokens": 1, **arguments})
    finally:
        del tiny.llm.generate
    return found[0]


def test_the_defaults_are_llama_cpp_s(tiny: Llama) -> None:
    params = params_of(tiny)
    assert (params.temperature, params.top_k, params.top_p) == (0.8, 40, 0.95)
    assert params.min_p == pytest.approx(0.05 ** (1 / 0.8))
    assert (params.typical_p, params.repetition_penalty) == (1.0, 1.0)
    assert params.logits_processors == ()
    whole = params_of(tiny, max_tokens=None)
    assert whole.max_tokens is None
    assert params_of(tiny, max_tokens=-1).max_tokens is None


def test_min_p_counts_before_the_temperature(tiny: Llama) -> None:
    """A token with 0.3 of the best one's probability stays at any temperature if min_p is 0.2."""
    ratio, limit = 0.3, 0.2
    for temperature in (0.5, 1.0, 2.0):
        params = params_of(tiny, temperature=temperature, min_p=limit)
        assert ratio ** (1 / temperature) > params.min_p
        assert 0.1 ** (1 / temperature) < params.min_p


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ({"temperature": 0.0}, {"temperature": 0.0, "top_k": 0, "top_p": 1.0}),
        ({"temperature": -1.0}, {"temperature": 1.0, "top_k": 0, "min_p": 0.0}),
        ({"top_p": 0.0}, {"temperature": 0.0}),
        ({"top_p": 1.5, "typical_p": 2, "top_k": -5}, {"top_p": 1.0, "typical_p": 1.0, "top_k": 0}),
        ({"mirostat_mode": 2, "mirostat_tau": 3.0}, {"mirostat_mode": 2, "temperature": 1.0}),
        ({"mirostat_mode": 2, "temperature": 0.0}, {"mirostat_mode": 0, "temperature": 0.0}),
        ({"logit_bias": {"5": float("-inf"), 6: 1e9}}, {"logit_bias": {5: -100.0, 6: 100.0}}),
        ({"stop": "x"}, {"stop": ("x",)}),
        ({"seed": 7, "tfs_z": 0.3}, {"seed": 7}),
    ],
)
def test_sampling_arguments(
    tiny: Llama, arguments: dict[str, Any], expected: dict[str, Any]
) -> None:
    params = params_of(tiny, **arguments)
    assert {name: getattr(params, name) for name in expected} == expected


def test_sampling_errors(tiny: Llama) -> None:
    with pytest.raises(RequestError, match="mirostat_mode: expected 0 or 2, found 1"):
        tiny("a", mirostat_mode=1)
    with pytest.raises(RequestError, match="grammar: expected a LlamaGrammar, found 'root'"):
        tiny("a", grammar="root")
    with pytest.raises(ValueError, match=r"prompt: .* the context holds 512"):
        tiny("a " * 600)
    with pytest.raises(RequestError, match="suffix: the model's vocabulary has no"):
        tiny("a", suffix="b")
    with pytest.raises(RequestError, match="idx=3 is not supported"):
        tiny.sample(idx=3)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"prompt": None}, "prompt: expected a list of token ids, found None"),
        ({"prompt": []}, r"prompt: it is empty \(no tokens\)"),
        ({"max_tokens": "x"}, "max_tokens: expected an integer, found 'x'"),
        ({"temperature": "x"}, "temperature: expected a number, found 'x'"),
        ({"temperature": float("nan")}, "temperature: expected a number, found nan"),
        ({"top_p": None}, "top_p: expected a number, found None"),
        ({"min_p": -1.0}, "min_p must be"),
        ({"top_k": None}, "top_k: expected an integer, found None"),
        ({"logprobs": "x"}, "logprobs: expected an integer, found 'x'"),
        ({"stop": [3]}, "stop must be a list of non-empty strings"),
        ({"repeat_penalty": 0.0}, "repeat_penalty: expected a number above 0, found 0.0"),
        ({"presence_penalty": None}, "presence_penalty: expected a number, found None"),
        ({"logit_bias": [3]}, r"logit_bias: expected a dict, found \[3\]"),
        ({"logit_bias": {"x": 1}}, "logit_bias: expected token ids and numbers: invalid"),
        ({"logit_bias": {1: float("nan")}}, "logit_bias must be a number"),
    ],
)
def test_wrong_values_are_named(tiny: Llama, arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(RequestError, match=message):
        tiny(**{"prompt": "a", **arguments})


def test_wrong_values_of_other_methods_are_named(tiny: Llama) -> None:
    with pytest.raises(RequestError, match="input: expected a text or a list of them, found 3"):
        tiny.embed(3)  # type: ignore[arg-type]
    with pytest.raises(RequestError, match="state: expected a LlamaState, found 3"):
        tiny.load_state(3)  # type: ignore[arg-type]
    with pytest.raises(RequestError, match="tokens: expected a list of token ids, found 'a'"):
        tiny.eval("a")  # type: ignore[arg-type]
    with pytest.raises(RequestError, match="functions: expected a list, found 3"):
        tiny.create_chat_completion(ASK, functions=3)  # type: ignore[arg-type]
    assert tiny.create_embedding([])["data"] == []


def test_seeds_repeat_answers(gguf: str) -> None:
    def answers(seed: int) -> list[str]:
        with Llama(gguf, n_ctx=64, seed=seed, n_threads=1) as llama:
            return [text_of(llama("the cat", max_tokens=8, temperature=5.0)) for _ in range(3)]

    first = answers(1)
    assert answers(1) == first and answers(2) != first
    assert len(set(first)) > 1


def test_penalties_are_those_of_llama_cpp(tiny: Llama) -> None:
    """They count the last tokens of the answer and not the prompt."""
    seen: list[Any] = []

    def note(ids: Any, scores: Any) -> Any:
        seen.append((ids.tolist(), scores.copy()))
        return scores

    prompt = tiny.tokenize(b"the cat sat")
    plain = {"max_tokens": 4, "temperature": 0.0, "logits_processor": LogitsProcessorList([note])}
    tiny(prompt, **plain)
    [(ids, scores), *_] = seen
    assert ids == prompt and scores.dtype == np.float32
    callbacks = Callbacks(
        {"repeat_penalty": 2.0, "frequency_penalty": 0.5, "presence_penalty": 0.25}, prompt, 3
    )
    row = torch.tensor([1.0, 1.0, 1.0, 1.0, 1.0, 4.0, -4.0, 1.0, 1.0, 1.0])
    found = callbacks([9, 5, 6, 5], row)
    assert found[5] == 4.0 / 2 - 2 * 0.5 - 0.25
    assert found[6] == -4.0 * 2 - 0.5 - 0.25
    assert found[9] == 1.0  # too long ago


def test_a_repeat_penalty_changes_the_answer(real: Llama) -> None:
    """The texts are those that llama-cpp-python 0.3.36 gives."""
    text = "The the the the"
    answer = real(text, repeat_penalty=1.3, frequency_penalty=0.2, max_tokens=12, temperature=0.0)
    assert text_of(answer) == ' "A" in the original sentence is 10.'
    paris = real.tokenize(b" Paris", add_bos=False)[0]
    plain = real(CAPITAL, max_tokens=4, temperature=0.0)
    assert text_of(plain) == " Paris.\n\n"
    biased = real(CAPITAL, max_tokens=4, temperature=0.0, logit_bias={paris: -100})
    assert text_of(biased) == " the capital of the"


def test_callbacks_end_and_change_answers(real: Llama) -> None:
    stop = StoppingCriteriaList([lambda ids, scores: len(ids) >= 8])
    for stream in (False, True):
        found = real(CAPITAL, max_tokens=9, temperature=0.0, stopping_criteria=stop, stream=stream)
        if stream:
            chunks = list(found)
            assert "".join(map(text_of, chunks)) == " Paris.\n"
            assert chunks[-1]["choices"][0]["finish_reason"] == "stop"
        else:
            assert text_of(found) == " Paris.\n"
            assert found["choices"][0]["finish_reason"] == "stop"
            assert found["usage"]["completion_tokens"] == 3
    least = MinTokensLogitsProcessor(12, real.token_eos())
    chat = real.create_chat_completion(
        [{"role": "user", "content": "Say yes."}],
        temperature=0.0,
        max_tokens=14,
        logits_processor=LogitsProcessorList([least]),
    )
    assert chat["usage"]["completion_tokens"] >= 12


def test_a_callback_that_raises_fails_only_its_request(tiny: Llama) -> None:
    def broken(ids: Any, scores: Any) -> Any:
        raise KeyError("lost")

    with pytest.raises(CompletionError, match=r"ended with 'error'.*KeyError.*lost") as raised:
        tiny("the cat", logits_processor=LogitsProcessorList([broken]))
    assert isinstance(raised.value, SdkError) and isinstance(raised.value, RuntimeError)
    assert tiny("the cat", max_tokens=2)["usage"]["completion_tokens"] <= 2


# ---- results -------------------------------------------------------------------------------------


def test_log_probabilities(real: Llama) -> None:
    found = real(CAPITAL, max_tokens=3, temperature=0.0, logprobs=2, echo=True)
    [choice] = found["choices"]
    scored = choice["logprobs"]
    assert "".join(scored["tokens"]) == choice["text"] == CAPITAL + " Paris.\n"
    begins = [choice["text"][offset:] for offset in scored["text_offset"]]
    assert all(rest.startswith(t) for rest, t in zip(begins, scored["tokens"], strict=True))
    assert scored["token_logprobs"][0] is None and scored["top_logprobs"][0] is None

    plain = real(CAPITAL, max_tokens=3, temperature=0.0, logprobs=2)["choices"][0]["logprobs"]
    assert plain["token_logprobs"] == scored["token_logprobs"][-3:]
    assert plain["text_offset"][0] == len(CAPITAL)
    for token, value, best in zip(
        plain["tokens"], plain["token_logprobs"], plain["top_logprobs"], strict=True
    ):
        assert best[token] == value and len(best) == 2
    [*chunks, last] = real(CAPITAL, max_tokens=3, temperature=0.0, logprobs=2, stream=True)
    rows = [chunk["choices"][0]["logprobs"] for chunk in chunks]
    assert [row["text_offset"][0] for row in rows] == plain["text_offset"]
    assert [row["token_logprobs"][0] for row in rows] == plain["token_logprobs"]
    assert last["choices"][0] == {
        "text": "",
        "index": 0,
        "logprobs": None,
        "finish_reason": "length",
    }


def test_the_end_token_is_not_counted(real: Llama) -> None:
    ask = [{"role": "user", "content": "What is 2+2? Answer with a number only."}]
    found = real.create_chat_completion(ask, temperature=0.0, max_tokens=40)
    text = found["choices"][0]["message"]["content"]
    assert text == "2 + 2 = 4" and found["choices"][0]["finish_reason"] == "stop"
    assert found["usage"]["completion_tokens"] == len(real.tokenize(text.encode(), add_bos=False))


def test_prompts_of_tokens_and_empty_prompts(tiny: Llama) -> None:
    ids = tiny.tokenize(b"the cat")
    by_text = tiny("the cat", max_tokens=4, temperature=0.0)
    assert text_of(tiny(ids, max_tokens=4, temperature=0.0)) == text_of(by_text)
    echoed = tiny(ids, max_tokens=1, temperature=0.0, echo=True)
    assert "the cat" in text_of(echoed)
    assert tiny.token_bos() == -1
    with pytest.raises(RequestError, match="prompt: it is empty"):
        tiny("")


def test_an_empty_prompt_is_the_beginning_of_a_text(real: Llama) -> None:
    assert real("", max_tokens=2)["usage"]["prompt_tokens"] == 1
    assert real.input_ids[0] == real.token_bos()


def test_closing_a_stream_aborts_its_request(tiny: Llama) -> None:
    stream = tiny("the cat", max_tokens=None, stream=True, logit_bias={tiny.token_eos(): -100})
    next(stream)
    stream.close()
    tiny("a", max_tokens=1)
    assert tiny.llm.get_metrics()["num_running"] == 0


def test_threads_take_turns(tiny: Llama) -> None:
    alone = text_of(tiny("the cat", max_tokens=6, temperature=0.0))
    found: list[str] = []

    def ask() -> None:
        found.append(text_of(tiny("the cat", max_tokens=6, temperature=0.0)))

    threads = [threading.Thread(target=ask) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == [alone] * 3


# ---- chats and grammars --------------------------------------------------------------------------


def test_grammars(tiny: Llama, tmp_path: Path) -> None:
    rules = 'root ::= "yes" | "no"'
    (tmp_path / "g.gbnf").write_text(rules)
    for grammar in (LlamaGrammar.from_string(rules), LlamaGrammar.from_file(tmp_path / "g.gbnf")):
        answer = tiny("ok? ", grammar=grammar, max_tokens=9)
        assert text_of(answer) in ("yes", "no")
        assert answer["choices"][0]["finish_reason"] == "stop"
    with pytest.raises(RequestError, match=r"grammar: expected rules in GBNF .* found 'start: x'"):
        tiny("a", grammar=LlamaGrammar.from_string("start: x"))
    with pytest.raises(RequestError, match=r"grammar: it cannot be read as GBNF: .*root"):
        tiny("a", grammar=LlamaGrammar.from_string('other ::= "x"'))
    with pytest.raises(RequestError, match="json: it is not valid JSON"):
        LlamaGrammar.from_json_schema("{")


@pytest.mark.parametrize("name", FORMATS)
def test_chat_formats_are_those_of_llama_cpp(name: str, real: Llama) -> None:
    """The prompts were rendered by llama-cpp-python 0.3.36: with a system message and without."""
    text = (ORIGINALS / "llama_cpp_formats.json").read_text(encoding="utf-8")
    known = json.loads(text)["chatml" if name.startswith("chatml") else name]
    conversation = [
        {"role": "system", "content": "SYS"},
        {"role": "user", "content": "U1"},
        {"role": "assistant", "content": "A1"},
        {"role": "user", "content": "U2"},
    ]
    tokenizer = real.llm.get_tokenizer()
    for messages, prompt in zip([conversation, conversation[1:]], known["prompts"], strict=True):
        template = FORMATS[name].template
        found = tokenizer.apply_chat_template(messages, tokenize=False, chat_template=template)
        assert found == prompt
    assert list(FORMATS[name].stop) == ([] if known["stop"] is None else [known["stop"]])


def test_a_chat_format_is_used_with_its_stop_strings(gguf: str) -> None:
    with Llama(gguf, n_ctx=512, n_threads=1, chat_format="vicuna") as llama:
        llama.create_chat_completion(ASK, max_tokens=1)
        prompt = llama.detokenize(llama.input_ids.tolist()[:-1], special=True).decode()
        assert prompt.endswith("USER: How are you? ASSISTANT:")
    with Llama(gguf, n_ctx=512, n_threads=1, chat_format="zephyr") as llama:
        end = llama.llm.get_tokenizer().encode("</s>", parse_special=False)
        begun: list[int] = []

        def forcing(ids: Any, scores: Any) -> Any:
            """The model says the stop string."""
            begun.append(len(ids))
            scores[:] = -100.0
            scores[end[len(ids) - begun[0]]] = 0.0
            return scores

        forced = LogitsProcessorList([forcing])
        found = llama.create_chat_completion(ASK, max_tokens=20, logits_processor=forced)
        assert found["choices"][0]["finish_reason"] == "stop"
        assert found["choices"][0]["message"]["content"] == ""


def prompt_of(llama: Llama) -> str:
    """The prompt of a chat, as the model got it."""
    llama.create_chat_completion(ASK, max_tokens=1)
    return llama.detokenize(llama.input_ids.tolist()[:-1], special=True).decode()


def test_the_file_s_own_template_has_a_name(gguf: str) -> None:
    with Llama(gguf, n_ctx=128, n_threads=1) as llama:
        own = prompt_of(llama)
    with Llama(gguf, n_ctx=128, chat_format="chat_template.default", n_threads=1) as llama:
        assert prompt_of(llama) == own
    with Llama(gguf, n_ctx=128, chat_template="{{ messages[0].content }}!", n_threads=1) as llama:
        assert prompt_of(llama).lstrip() == "How are you?!"
    with pytest.raises(RequestError, match=r"'chat_template.rag' is not in the file; it has none"):
        Llama(gguf, chat_format="chat_template.rag")
    check_named("chat_template.rag", lambda: {"tokenizer.chat_template.rag": "x"})
    assert chat_format("chat_template.rag") == ChatFormat("rag")


def test_a_file_without_a_template_has_llama_2_s(gemma3: Path) -> None:
    with Llama(str(gemma3), n_ctx=64) as llama:
        assert llama.chat_format == "llama-2"
        assert prompt_of(llama).endswith("<s>[INST]How are you?  [/INST]")


def test_tools_and_their_older_names(tiny: Llama) -> None:
    new = {"tools": [{"type": "function", "function": TOOL}]}
    new["tool_choice"] = {"type": "function", "function": {"name": "now"}}  # type: ignore[assignment]
    old = {"functions": [TOOL], "function_call": {"name": "now"}}
    for arguments in (new, old):
        found = tiny.create_chat_completion(ASK, temperature=0.0, max_tokens=60, **arguments)
        [choice] = found["choices"]
        assert choice["finish_reason"] == "tool_calls"
        assert choice["message"]["function_call"]["name"] == "now"
        assert choice["message"]["content"] is None
    for arguments in ({}, {"tool_choice": "none"}, {"tools": [], "function_call": "auto"}):
        found = tiny.create_chat_completion(ASK, max_tokens=2, **arguments)
        assert set(found["choices"][0]["message"]) == {"role", "content"}
    with pytest.raises(RequestError, match="tool_choice: expected tools too, found none"):
        tiny.create_chat_completion(ASK, tool_choice="required")


def test_response_formats(tiny: Llama) -> None:
    schema = {"type": "object", "properties": {"a": {"enum": [1, 2]}}, "required": ["a"]}
    wanted: list[dict[str, Any]] = [
        {"type": "json_object", "schema": schema},
        {"type": "json_schema", "json_schema": {"name": "it", "schema": schema}},
    ]
    for one in wanted:
        found = tiny.create_chat_completion(ASK, response_format=one, max_tokens=60)
        assert json.loads(found["choices"][0]["message"]["content"])["a"] in (1, 2)
    tiny.create_chat_completion(ASK, response_format={"type": "text"}, max_tokens=1)
    with pytest.raises(RequestError, match="response_format: expected a dict with the type"):
        tiny.create_chat_completion(ASK, response_format={"type": "xml"})
    with pytest.raises(RequestError, match="messages: expected a list of messages, found 'hello'"):
        tiny.create_chat_completion("hello")  # type: ignore[arg-type]


def test_objects_of_openai_s_api(tiny: Llama) -> None:
    create = tiny.create_chat_completion_openai_v1
    whole = create(ASK, temperature=0.0, max_tokens=4)
    pieces = list(create(messages=ASK, temperature=0.0, max_tokens=4, stream=True))
    text = "".join(piece.choices[0].delta.content or "" for piece in pieces)
    assert whole.choices[0].message.content == text
    assert whole.usage.completion_tokens <= 4
    with pytest.raises(TypeError, match="temprature"):
        create(ASK, temprature=1)


def test_a_chat_handler_gets_all_arguments(gguf: str) -> None:
    def handler(*, llama: Llama, messages: Any, temperature: float, **more: Any) -> Any:
        return llama.model_path, messages, temperature, sorted(more)[:2]

    with Llama(gguf, n_ctx=64, chat_handler=handler, n_threads=1) as llama:
        found = llama.create_chat_completion(ASK)
    assert found == (gguf, ASK, 0.2, ["frequency_penalty", "function_call"])


# ---- tokens, embeddings, state -------------------------------------------------------------------


def test_tokens_are_those_of_llama_cpp(real: Llama, smollm2: Path) -> None:
    """The ids and bytes are those that llama-cpp-python 0.3.36 gives."""
    marked = b"hello <|im_end|>"
    assert real.tokenize(marked) == [28120, 2067, 108, 306, 79, 486, 108, 46]
    assert real.tokenize(marked, special=True) == [28120, 216, 2]
    assert real.detokenize([28120, 2]) == b"hello"
    assert real.detokenize([28120, 2], special=True) == b"hello<|im_end|>"
    assert (real.token_bos(), real.token_eos(), real.token_nl()) == (1, 2, 198)
    assert (real.n_vocab(), real.n_embd(), real.n_ctx()) == (49152, 576, 256)
    assert real.metadata["general.architecture"] == "llama"
    assert real.metadata["tokenizer.ggml.add_bos_token"] == "false"
    tokenizer = LlamaTokenizer.from_ggml_file(str(smollm2))
    assert tokenizer.encode("hi") == real.tokenizer().encode("hi") == [6004]
    assert tokenizer.decode([28120]) == "hello"
    first, second = real.tokenize("é".encode(), add_bos=False)[:1], "é".encode()
    assert real.detokenize(first) in (second, second[:1])
    with pytest.raises(RequestError, match="text: expected bytes, found 'hello'"):
        real.tokenize("hello")  # type: ignore[arg-type]


def test_tokens_one_by_one(real: Llama) -> None:
    prompt = real.tokenize(CAPITAL.encode())
    found = []
    for token in real.generate(prompt, temp=0.0):
        found.append(token)
        if len(found) == 5:
            break
    assert found == [7042, 30, 198, 198, 504]
    real.reset()
    real.eval(prompt)
    assert (real.sample(temp=0.0), real.n_tokens) == (7042, len(prompt))
    real.eval([7042])
    assert real.sample(temp=0.0) == 30
    real.reset()
    real.eval(np.array(prompt, np.intc))
    assert real.n_tokens == len(prompt)
    real.eval([7042])
    more = real.generate([30], temp=0.0, reset=False)
    assert next(more) == 198
    more.close()  # type: ignore[attr-defined]


def test_generation_stops_at_a_criterion_and_at_the_end_of_the_context(gguf: str) -> None:
    with Llama(gguf, n_ctx=24, n_threads=1) as llama:
        prompt = llama.tokenize(b"the cat")
        tokens = list(llama.generate(prompt, temp=0.0))
        assert len(prompt) + len(tokens) in (24, 25)
        stop = StoppingCriteriaList([lambda ids, scores: len(ids) >= len(prompt) + 2])
        assert len(list(llama.generate(prompt, temp=0.0, stopping_criteria=stop))) == 2


def test_state_is_saved_and_restored(gguf: str) -> None:
    with Llama(gguf, n_ctx=128, n_threads=1) as llama:
        text = "the cat sat on the mat and the dog ran away from it"
        expected = text_of(llama(text, max_tokens=6, temperature=0.0))
        state = llama.save_state()
        assert state.n_tokens == llama.n_tokens == len(state.input_ids)
        llama.llm.reset_prefix_cache()
        llama.reset()
        assert llama.n_tokens == 0
        llama.load_state(state)
        assert llama.input_ids.tolist() == state.input_ids.tolist()
        [output] = llama.llm.generate(text, SamplingParams(max_tokens=6, temperature=0.0))
        assert output.num_cached_tokens and output.outputs[0].text == expected
        llama.reset()
        assert llama.save_state().snapshot is None
        llama.set_cache(LlamaRAMCache(capacity_bytes=1 << 20))
        assert text_of(llama(text, max_tokens=6, temperature=0.0)) == expected


def test_embeddings(gguf: str) -> None:
    with (
        LLM(gguf, num_threads=1) as plain,
        Llama(gguf, n_ctx=64, embedding=True, n_threads=1, pooling_type=3) as last,
        Llama(gguf, n_ctx=64, n_batch=4, embedding=True, n_threads=1) as each,
    ):
        unit = last.embed("the cat", normalize=True)
        assert unit == pytest.approx(plain.embed("the cat")[0].embedding, abs=1e-6)
        rows = each.embed("the cat sat on the mat")
        assert len(rows) == 4 and len(rows[0]) == each.n_embd()
        with pytest.raises(RequestError, match=r"input: .* tokens, but n_batch is 4"):
            each.embed("the cat sat on the mat", truncate=False)
        found, count = last.embed(["a", "b"], return_count=True)
        assert len(found) == 2 and count == len(last.tokenize(b"a")) + len(last.tokenize(b"b"))


def test_a_closed_model_is_an_error(gguf: str) -> None:
    llama = Llama(gguf, n_ctx=32, n_threads=1)
    llama.close()
    llama.close()
    with pytest.raises(EngineClosedError):
        llama("a")
