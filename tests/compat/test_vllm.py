"""vLLM's interface: options, parameters, outputs, embeddings, the async engine and errors."""

from __future__ import annotations

import asyncio
import dataclasses
import inspect
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image

from sdk import (
    LLM as OurLLM,
    EngineClosedError,
    RequestError,
    SamplingParams as OurParams,
)
from sdk.api.image_hosts import ImageHosts
from sdk.api.outputs import ClassificationOutput
from sdk.compat import vllm
from sdk.compat.vllm import (
    LLM,
    AsyncEngineArgs,
    AsyncLLMEngine,
    BeamSearchParams,
    EngineArgs,
    GuidedDecodingParams,
    LoRARequest,
    PoolerConfig,
    PoolingParams,
    RequestOutputKind,
    SamplingParams,
    StructuredOutputsParams,
)
from sdk.compat.vllm._options import OPTIONS, llm_options
from sdk.compat.vllm.inputs import our_prompt
from sdk.compat.vllm.outputs import class_output
from sdk.loaders.open import open_checkpoint
from sdk.testing import FakeLLM

GREEDY = SamplingParams(temperature=0.0, max_tokens=4)
ASK = [{"role": "user", "content": "How are you?"}]


@pytest.fixture(scope="module")
def model(golden: Path) -> str:
    return str(golden / "arch-llama3" / "hf")


@pytest.fixture(scope="module")
def llm(model: str) -> Iterator[LLM]:
    with LLM(model, max_model_len=256, num_threads=1) as made:
        yield made


# ---- options -------------------------------------------------------------------------------------


def test_options_that_cannot_be_honored_are_rejected_by_name() -> None:
    rejected = {name: one for name, one in OPTIONS.items() if one.use == "only"}
    assert len(rejected) > 25
    for name, option in rejected.items():
        assert llm_options({name: option.default}) == {}
        other = {"a": 1} if option.default is None else "other"
        with pytest.raises(RequestError, match=f"^{name}=.* is not supported: ") as raised:
            llm_options({name: other})
        assert option.instead in str(raised.value)


def test_options_without_effect_take_any_value() -> None:
    free = [name for name, one in OPTIONS.items() if one.use == "free"]
    assert {"disable_log_stats", "async_scheduling", "compilation_config"} <= set(free)
    assert llm_options(dict.fromkeys(free, "anything")) == {}


def test_options_of_the_same_name_are_passed_on() -> None:
    same = [name for name, one in OPTIONS.items() if one.use == "same"]
    assert {"max_model_len", "dtype", "enforce_eager", "seed"} <= set(same)
    assert llm_options({name: OPTIONS[name].default for name in same}) == {}
    assert llm_options({"max_model_len": 64, "seed": 3}) == {"max_model_len": 64, "seed": 3}
    known = set(inspect.signature(OurLLM).parameters)
    assert set(same) <= known


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({"quantization": "awq"}, {}),
        ({"quantization": "int4"}, {"quantization": "int4"}),
        ({"cpu_offload_gb": 2}, {}),
        ({"cpu_offload_gb": 2, "device": "cuda"}, {"cpu_offload": 2 << 30, "device": "cuda"}),
        ({"hf_overrides": {"a": 1}}, {"hf_overrides": {"a": 1}}),
        ({"hf_token": True}, {}),
        ({"max_num_seqs": 300}, {"max_num_seqs": 300, "max_num_batched_tokens": 300}),
        ({"max_num_batched_tokens": 32}, {"max_num_batched_tokens": 32, "max_num_seqs": 32}),
        ({"chat_template": "{{ 1 }}"}, {"chat_template": "{{ 1 }}"}),
        (
            {"speculative_config": {"method": "ngram"}, "spec_tokens": 3},
            {"speculative_config": {"method": "ngram", "num_speculative_tokens": 3}},
        ),
        (
            {"spec_method": "ngram", "spec_model": None},
            {"speculative_config": {"method": "ngram"}},
        ),
        ({"memory": "1GiB"}, {"memory": "1GiB"}),
        ({"offload_params": set(), "tokenizer": None}, {}),
    ],
)
def test_options_are_translated(given: dict[str, Any], expected: dict[str, Any]) -> None:
    assert llm_options(given) == expected


def test_a_chat_template_may_be_a_file(tmp_path: Path) -> None:
    path = tmp_path / "chat.jinja"
    path.write_text("{{ messages }}")
    for given in (path, str(path)):
        assert llm_options({"chat_template": given}) == {"chat_template": "{{ messages }}"}


def test_bad_options_are_errors(model: str) -> None:
    with pytest.raises(RequestError, match="hf_token: expected None or True, found str; log in"):
        llm_options({"hf_token": "hf_secret"})
    with pytest.raises(RequestError, match="hf_overrides: expected a dict, found"):
        llm_options({"hf_overrides": lambda config: config})
    with pytest.raises(RequestError, match="'bitsandbytes' is not supported: files that it"):
        llm_options({"quantization": "bitsandbytes"})
    with pytest.raises(RequestError, match="structured_outputs_config: colour is not supported"):
        LLM(model, structured_outputs_config={"backend": "auto", "colour": "red"})
    with pytest.raises(TypeError, match="unknown option 'max_modl_len'"):
        LLM(model, max_modl_len=3)
    with pytest.raises(RequestError, match=r"lora_target_modules=.* all matrices of an adapter"):
        LLM(model, enable_lora=True, lora_target_modules=["q_proj"])


def test_engine_args_are_attributes(model: str) -> None:
    args = EngineArgs(model, max_model_len=64, num_threads=1)
    assert (args.model, args.max_model_len) == (model, 64)  # type: ignore[attr-defined]
    assert args.gpu_memory_utilization == 0.92  # type: ignore[attr-defined]
    args.max_model_len = 32  # type: ignore[attr-defined]
    with LLM.from_engine_args(args) as made:
        assert made.llm.max_model_len == 32
        assert made.get_world_size() == 1
    assert EngineArgs().model == "Qwen/Qwen3-0.6B"  # type: ignore[attr-defined]


def test_the_defaults_of_sdk_are_vllm_s_but_for_those_that_the_page_names() -> None:
    root = Path(__file__).parents[2]
    page = (root / "docs" / "api.md").read_text(encoding="utf-8")
    named = page.partition("\n## Differences from vLLM")[2]
    ours = {name: one.default for name, one in inspect.signature(OurLLM).parameters.items()}
    options = {n for n, o in OPTIONS.items() if n in ours and ours[n] != o.default}
    chosen_by_vllm = {"block_size", "enable_prefix_caching", "enable_chunked_prefill"}
    assert options == {"max_num_seqs", "gpu_memory_utilization"} | chosen_by_vllm
    assert all(OPTIONS[name].default is None for name in chosen_by_vllm)
    there, here = SamplingParams().ours(), OurParams()
    fields = {one.name for one in dataclasses.fields(SamplingParams)} & set(vars(here))
    parameters = {name for name in fields if getattr(here, name) != getattr(there, name)}
    assert parameters == {"max_tokens"}
    assert [name for name in options | parameters if f"`{name}" not in named] == []
    assert "`max_tokens` an answer" in (root / "README.md").read_text(encoding="utf-8")


# ---- parameters ----------------------------------------------------------------------------------


def test_parameters_have_vllm_s_defaults_and_can_be_changed() -> None:
    params = SamplingParams()
    assert (params.max_tokens, params.temperature, params.stop) == (16, 1.0, [])
    params.max_tokens, params.stop = 3, ["x"]
    changed = params.ours()
    assert (changed.max_tokens, changed.stop) == (3, ("x",))
    copy = params.clone()
    copy.stop.append("y")  # type: ignore[union-attr]
    assert params.stop == ["x"]
    params.top_p = 7
    with pytest.raises(RequestError, match="top_p must be"):
        params.ours()


def test_every_parameter_is_used_refused_or_without_effect() -> None:
    given: dict[str, Any] = {
        "n": 2,
        "presence_penalty": 0.5,
        "frequency_penalty": 0.25,
        "repetition_penalty": 1.5,
        "temperature": 0.5,
        "top_p": 0.5,
        "top_k": 5,
        "min_p": 0.25,
        "seed": 3,
        "stop": ("a",),
        "stop_token_ids": (5,),
        "ignore_eos": True,
        "max_tokens": 7,
        "min_tokens": 2,
        "logprobs": 1,
        "prompt_logprobs": 2,
        "logprob_token_ids": (3,),
        "skip_special_tokens": False,
        "spaces_between_special_tokens": False,
        "include_stop_str_in_output": True,
        "output_kind": RequestOutputKind.DELTA,
        "logit_bias": {4: 1.0},
        "allowed_token_ids": (4, 5),
        "extra_args": {"a": 1},
        "bad_words": ("b",),
        "thinking_token_budget": 9,
    }
    ours = SamplingParams(**given).ours()
    assert {name: getattr(ours, name) for name in given} == given
    free = {"flat_logprobs": True, "stream_interval": 3, "skip_clone": True}
    more = {"output_text_buffer_length": 4, "skip_reading_prefix_cache": True}
    assert SamplingParams(**free, **more).ours() == SamplingParams().ours()
    refused: dict[str, Any] = {
        "watermarking": True,
        "prompt_logprob_token_ids": [[1]],
        "prompt_logprob_start": 0,
        "repetition_detection": object(),
        "routed_experts_prompt_start": 1,
        "trace_decode_token_ids": [1],
    }
    for name, value in refused.items():
        with pytest.raises(RequestError, match=f"^{name}=.* is not supported: leave it out"):
            SamplingParams(**{name: value})
    named = {*given, *free, *more, *refused, "detokenize"}
    named |= {"structured_outputs", "guided_decoding"}
    assert named == set(inspect.signature(SamplingParams).parameters)
    assert SamplingParams(thinking_token_budget=-1).ours().thinking_token_budget is None


def test_optional_values_and_older_names() -> None:
    params = SamplingParams.from_optional(temperature=None, logit_bias={"5": 500.0}, n=2)
    assert (params.temperature, params.logit_bias, params.n) == (1.0, {5: 100.0}, 2)
    old = SamplingParams(guided_decoding=GuidedDecodingParams(choice=["a", "b"])).ours()
    assert old.structure == StructuredOutputsParams(choice=["a", "b"])
    with pytest.raises(RequestError, match="guided_decoding is the older name"):
        SamplingParams(guided_decoding={"regex": "a"}, structured_outputs={"regex": "a"})


def test_pooling_and_beam_parameters() -> None:
    off = PoolingParams(use_activation=False)
    assert PoolerConfig().activates(PoolingParams()) and not PoolerConfig().activates(off)
    assert not PoolerConfig(use_activation=False).activates(PoolingParams())
    assert PoolerConfig(use_activation=False).activates(PoolingParams(use_activation=True))
    with pytest.raises(RequestError, match=r"logit_mean=0.5 is not supported: leave it out"):
        PoolerConfig(logit_mean=0.5)
    with pytest.raises(RequestError, match="pooling_type: expected one of LAST, CLS, MEAN, ALL"):
        PoolerConfig(pooling_type="STEP")
    assert PoolingParams(task="embed").clone() == PoolingParams(task="embed")
    with pytest.raises(RequestError, match="dimensions=8 is not supported: leave it out"):
        PoolingParams(dimensions=8)
    with pytest.raises(RequestError, match="structured_outputs: beam search does not support it"):
        BeamSearchParams(2, 3, structured_outputs={"regex": "a"}).ours()
    with pytest.raises(RequestError, match="watermarking: beam search does not support it"):
        BeamSearchParams(2, 3, watermarking=True).ours()


def test_prompts_are_translated() -> None:
    tokens = {"prompt_token_ids": [1, 2], "prompt": "ab", "prompt_token_offsets": None}
    assert our_prompt(tokens) == ({"prompt_token_ids": [1, 2]}, "ab")
    assert our_prompt({"prompt": "ab", "cache_salt": "s"}) == (
        {"prompt": "ab", "cache_salt": "s"},
        None,
    )
    assert our_prompt([1, 2]) == ([1, 2], None)


# ---- answers -------------------------------------------------------------------------------------


def numbers(row: Any) -> dict[int, Any]:
    return {token: (entry.logprob, entry.rank) for token, entry in row.items()}


def test_the_texts_of_tokens_are_vllm_s(llm: LLM) -> None:
    """With the space before a word, and nothing for a part of a character."""
    [output] = llm.generate("the cat", SamplingParams(max_tokens=1, prompt_logprobs=1))
    rows = zip(output.prompt_token_ids[1:], output.prompt_logprobs[1:], strict=True)
    texts = [row[token].decoded_token for token, row in rows]
    assert "".join(texts) == " the cat"
    last = next(i for i in range(256, 0, -1) if llm._text_of(i) == "")
    params = SamplingParams(max_tokens=1, logprobs=0, allowed_token_ids=[last])
    [part] = llm.generate("the cat", params)
    assert part.outputs[0].logprobs[0][last].decoded_token == ""


def test_answers_are_those_of_our_llm(llm: LLM) -> None:
    texts = ["the cat", "a dog ran"]
    params = SamplingParams(temperature=0.0, max_tokens=5, logprobs=2, prompt_logprobs=1)
    found = llm.generate(texts, params)
    ours = llm.llm.generate(texts, params.ours())
    for output, own in zip(found, ours, strict=True):
        [answer], [expected] = output.outputs, own.outputs
        assert (answer.text, answer.token_ids) == (expected.text, expected.token_ids)
        assert answer.cumulative_logprob == expected.cumulative_logprob
        assert list(map(numbers, answer.logprobs)) == list(map(numbers, expected.logprobs))
        assert output.prompt_logprobs[0] is None
        assert output.metrics.num_generation_tokens == 5
        assert output.metrics.first_token_latency > 0
    with_text = {"prompt_token_ids": found[0].prompt_token_ids, "prompt": "the cat"}
    assert llm.generate(with_text, GREEDY)[0].prompt == "the cat"
    each = [SamplingParams(max_tokens=1), SamplingParams(max_tokens=2)]
    assert [len(o.outputs[0].token_ids) for o in llm.generate(texts, each)] == [1, 2]
    with pytest.raises(RequestError, match="sampling_params: expected SamplingParams, found 3"):
        llm.generate("a", 3)  # type: ignore[arg-type]


def test_the_sampled_token_comes_first_in_its_log_probabilities(llm: LLM) -> None:
    params = SamplingParams(temperature=3.0, max_tokens=20, logprobs=2, seed=1, prompt_logprobs=1)
    [output] = llm.generate("the cat", params)
    [answer] = output.outputs
    firsts = [next(iter(row)) for row in answer.logprobs or ()]
    assert firsts == list(answer.token_ids)
    assert any(row[token].rank > 2 for token, row in zip(firsts, answer.logprobs, strict=True))
    rows = zip(output.prompt_token_ids[1:], output.prompt_logprobs[1:], strict=True)
    assert all(next(iter(row)) == token for token, row in rows)


def test_default_parameters_are_those_of_the_files_or_vllm_s(golden: Path) -> None:
    folder = golden / "arch-llama3"
    named = open_checkpoint(folder / "hf").generation_config
    with LLM(str(folder / "model.gguf"), max_model_len=64, num_threads=1) as plain:
        default = plain.get_default_sampling_params()
        assert default == SamplingParams()
        assert len(plain.generate("the cat")[0].outputs[0].token_ids) <= 16
    override = {"temperature": 0.25, "top_k": 3, "max_new_tokens": 5}
    with LLM(
        str(folder / "hf"), override_generation_config=override, max_model_len=64, num_threads=1
    ) as chosen:
        expected = {"temperature": 0.25, "top_k": 3, "max_tokens": 5}
        expected |= {k: named[k] for k in ("top_p",) if k in named}
        assert chosen.get_default_sampling_params() == SamplingParams(**expected)


def test_conversations_and_tools(llm: LLM) -> None:
    [single] = llm.chat(ASK, GREEDY)
    two = llm.chat([ASK, ASK], [GREEDY, SamplingParams(max_tokens=1)])
    assert two[0].outputs[0].token_ids == single.outputs[0].token_ids
    tool = {"type": "function", "function": {"name": "now", "parameters": {"type": "object"}}}
    [shown] = llm.chat(ASK, GREEDY, tools=[tool])
    assert "now" in (shown.prompt or "") and "now" not in (single.prompt or "")
    ended = [*ASK, {"role": "assistant", "content": "I am"}]
    [more] = llm.chat(ended, GREEDY, add_generation_prompt=False, continue_final_message=True)
    assert (more.prompt or "").endswith("I am")


def test_structures_of_all_requests(model: str) -> None:
    config = {"backend": "xgrammar", "disable_any_whitespace": True}
    with LLM(model, max_model_len=128, num_threads=1, structured_outputs_config=config) as made:
        schema = {"type": "object", "properties": {"a": {"enum": [1]}}, "required": ["a"]}
        schema["additionalProperties"] = False
        params = SamplingParams(max_tokens=40, structured_outputs={"json": schema})
        [output] = made.generate("x", params)
        assert output.outputs[0].text == '{"a":1}'
        assert params.structured_outputs == {"json": schema}  # the caller's are not changed
        [plain] = made.generate("x", SamplingParams(max_tokens=3))
        assert len(plain.outputs[0].token_ids) == 3


def test_requests_are_queued(llm: LLM) -> None:
    names = llm.enqueue(["the cat", "a dog"], GREEDY) + llm.enqueue_chat(ASK, GREEDY)
    found = llm.wait_for_completion(use_tqdm=False)
    assert [output.request_id for output in found] == names
    assert found[0].outputs[0].text == llm.generate("the cat", GREEDY)[0].outputs[0].text


def test_beams(llm: LLM) -> None:
    params = BeamSearchParams(beam_width=2, max_tokens=3)
    prompts = ["the cat", "a dog"]
    together = llm.beam_search(prompts, params)
    assert together == llm.beam_search(prompts, params, concurrency_limit=1)
    best = together[0].sequences[0]
    assert best.orig_prompt == "the cat" and best.text and best.text.startswith("the cat")
    assert sum(row[t].logprob for t, row in zip(best.tokens[-3:], best.logprobs, strict=True)) == (
        pytest.approx(best.cum_logprob)
    )
    assert next(iter(best.logprobs[0])) == best.tokens[-3]
    assert llm.beam_search([], params) == [] and llm.generate([]) == []
    with pytest.raises(RequestError, match="concurrency_limit: expected at least 1, found 0"):
        llm.beam_search(prompts, params, concurrency_limit=0)
    with pytest.raises(RequestError, match="params: expected BeamSearchParams, found"):
        llm.beam_search(prompts, GREEDY)  # type: ignore[arg-type]


def test_arguments_that_cannot_be_honored(llm: LLM) -> None:
    adapter = LoRARequest("a", 1, "/a")
    calls: list[Any] = [llm.generate, llm.encode, llm.embed, llm.classify, llm.enqueue]
    for call in calls:
        if call not in (llm.encode, llm.classify):  # which want a task and a head first
            with pytest.raises(RequestError, match=r"lora_request: .* enable_lora=True"):
                call("x", lora_request=adapter)
        with pytest.raises(RequestError, match=r"tokenization_kwargs=.* is not supported: leave"):
            call("x", tokenization_kwargs={"truncation": True})
    for chat in (llm.chat, llm.enqueue_chat):
        with pytest.raises(RequestError, match=r"mm_processor_kwargs=.* is not supported"):
            chat(ASK, mm_processor_kwargs={"a": 1})
    with pytest.raises(RequestError, match="lora_request"):
        llm.beam_search("x", BeamSearchParams(1, 1), lora_request=adapter)
    with pytest.raises(RequestError, match="lora_request"):
        llm.score("x", "y", lora_request=adapter)
    image = {"prompt": "x", "multi_modal_data": {"image": object()}}
    with pytest.raises(RequestError, match="multi_modal_data: expected none: this model"):
        llm.generate(image)


# ---- embeddings ----------------------------------------------------------------------------------


def test_embeddings_are_those_of_our_llm(llm: LLM) -> None:
    texts = ["the cat", "a dog ran"]
    own = llm.llm.embed(texts)
    for output, expected in zip(llm.embed(texts), own, strict=True):
        assert output.outputs.embedding == pytest.approx(expected.embedding)
        assert output.prompt_token_ids == expected.prompt_token_ids
    raw = PoolingParams(use_activation=False)
    [long] = llm.embed("the cat", pooling_params=raw)
    assert sum(x * x for x in long.outputs.embedding) != pytest.approx(1.0)
    [pooled] = llm.encode("the cat", pooling_task="embed")
    assert pooled.outputs.data.tolist() == pytest.approx(own[0].embedding)
    assert pooled.outputs == vllm.PoolingOutput(pooled.outputs.data)
    [each] = llm.encode("the cat", PoolingParams(task="token_embed"))
    assert each.outputs.data.shape == (len(each.prompt_token_ids), 64)
    scores = [one.outputs.score for one in llm.score(texts[0], texts)]
    assert scores == [one.score for one in llm.llm.score(texts[0], texts)]


def test_embedding_errors(llm: LLM) -> None:
    with pytest.raises(RequestError, match=r"pooling_task: expected one of embed, .* found None"):
        llm.encode("x")
    with pytest.raises(RequestError, match="pooling_params: expected PoolingParams, found 'cls'"):
        llm.embed("x", pooling_params="cls")  # type: ignore[arg-type]
    with pytest.raises(RequestError, match="score: use_activation=False and other poolings"):
        llm.score("x", "y", pooling_params=PoolingParams(use_activation=False))
    with pytest.raises(RequestError, match="classify: this model has no classification head"):
        llm.classify("x")


@pytest.mark.parametrize("kind", ["LAST", "CLS", "MEAN", "ALL", None])
def test_a_pooler_config(model: str, kind: str | None) -> None:
    config = {"pooling_type": kind, "use_activation": False}
    with LLM(model, max_model_len=64, num_threads=1, pooler_config=config) as made:
        [found] = made.embed("the cat")
        mode: Any = {"CLS": "cls", "MEAN": "mean"}.get(kind or "", "last")
        [expected] = made.llm.encode("the cat", pooling=mode, normalize=False)
        assert found.outputs.embedding == expected.outputs.data.tolist()
        [pooled] = made.encode("the cat", pooling_task="embed")
        assert pooled.outputs.data.tolist() == found.outputs.embedding
    with pytest.raises(RequestError, match="pooler_config: expected a PoolerConfig, found 'mean'"):
        LLM(model, pooler_config="mean")


def test_classes(model: str) -> None:
    tokens = {"classifier_from_token": ["a", "b"]}
    with LLM(model, max_model_len=64, num_threads=1, hf_overrides=tokens) as made:
        [found] = made.classify("the cat")
        assert found.outputs.num_classes == 2 and sum(found.outputs.probs) == pytest.approx(1)
        [pooled] = made.encode("the cat", pooling_task="classify")
        assert torch.equal(pooled.outputs.data, torch.tensor(found.outputs.probs))
        logits = made.classify("the cat", pooling_params=PoolingParams(use_activation=False))
        assert sum(logits[0].outputs.probs) != pytest.approx(1)
    own = ClassificationOutput("7", [1, 2], [0.25, 0.75], ["no", "yes"])
    assert class_output(own).outputs.probs == [0.25, 0.75]


# ---- the engine ----------------------------------------------------------------------------------


def test_the_engine_s_methods(llm: LLM) -> None:
    assert llm.get_tokenizer().decode(llm.get_tokenizer().encode("the cat"))
    assert llm.reset_prefix_cache()
    llm.sleep()
    with pytest.raises(RequestError):
        llm.generate("a", GREEDY)
    assert llm.wake_up(tags=["weights"])
    assert llm.generate("a", GREEDY)[0].finished


def test_an_async_engine_shares_an_llm(llm: LLM) -> None:
    engine = AsyncLLMEngine(llm)
    expected = llm.generate("the cat", GREEDY)[0].outputs[0]

    async def run() -> None:
        outputs = [o async for o in engine.generate("the cat", GREEDY, "a", prompt_text="shown")]
        assert outputs[-1].outputs[0].text == expected.text
        assert [len(o.outputs[0].token_ids) for o in outputs][-1] == 4
        assert outputs[0].request_id == "a" and outputs[0].prompt == "the cat"
        pooled = [o async for o in engine.encode("the cat", PoolingParams(task="embed"), "b")]
        assert pooled[0].request_id == "b" and pooled[0].outputs.data.shape == (64,)
        assert await engine.reset_prefix_cache()
        await engine.sleep()
        assert await engine.is_sleeping()
        assert await engine.wake_up() and not await engine.is_sleeping()
        await engine.do_log_stats()
        with pytest.raises(RequestError, match="lora_request"):
            async for _ in engine.generate("x", GREEDY, "c", lora_request=LoRARequest("a", 1)):
                pass

    asyncio.run(run())
    assert engine.get_tokenizer().vocab_size == llm.get_tokenizer().vocab_size
    engine.shutdown()
    assert not engine.errored and engine.is_running and not engine.is_stopped
    assert llm.generate("a", GREEDY)


def test_closing_a_generator_and_aborting_end_requests(model: str) -> None:
    args = AsyncEngineArgs(model, max_model_len=512, num_threads=1, enable_log_requests=True)
    engine = AsyncLLMEngine.from_engine_args(args)
    long = SamplingParams(max_tokens=400, temperature=0.0, ignore_eos=True)

    async def run() -> None:
        left = engine.generate("the cat", long, "left")
        await left.__anext__()
        await left.aclose()
        reasons = []
        async for output in engine.generate("the dog", long, "ended"):
            reasons.append(output.outputs[0].finish_reason)
            if len(reasons) == 1:
                await engine.abort(["ended"])
        assert reasons[-1] == "abort" and len(reasons) < 300
        short = SamplingParams(max_tokens=1)
        assert [o async for o in engine.generate("a", short, "left")]
        assert engine.llm.get_metrics()["num_running"] == 0

    asyncio.run(run())
    engine.shutdown()
    assert engine.errored
    with pytest.raises(EngineClosedError):
        asyncio.run(engine.check_health())


# ---- images --------------------------------------------------------------------------------------


def test_options_of_images_are_ours() -> None:
    limits = {"image": {"count": 2, "width": 512}, "video": 1}
    given = {
        "limit_mm_per_prompt": limits,
        "allowed_local_media_path": "/tmp",
        "allowed_media_domains": ["img.example.org"],
    }
    options = llm_options(given)
    assert options["limit_mm_per_prompt"] == {"image": 2}
    assert options["allowed_local_media_path"] == "/tmp"
    assert isinstance(options["image_fetcher"], ImageHosts)
    assert llm_options({"language_model_only": True}) == {"limit_mm_per_prompt": {"image": 0}}
    with pytest.raises(RequestError, match=r"mm_processor_kwargs=.* is not supported"):
        llm_options({"mm_processor_kwargs": {"max_pixels": 9}})
    with pytest.raises(RequestError, match="limit_mm_per_prompt: expected a dict, found 3"):
        llm_options({"limit_mm_per_prompt": 3})


def test_prompts_and_conversations_with_images(monkeypatch: pytest.MonkeyPatch) -> None:
    fake = FakeLLM("Red.", images=True)
    monkeypatch.setattr("sdk.compat.vllm.entrypoints.llm._OurLLM", lambda model, **given: fake)
    made = LLM("a model that sees")
    pixels = Image.new("RGB", (40, 30), "red")
    prompt = {"prompt": "USER: <image> What is it?", "multi_modal_data": {"image": pixels}}
    try:
        [found] = made.generate(prompt, SamplingParams(max_tokens=9), use_tqdm=False)
        assert found.outputs[0].text == "Red." and found.prompt == prompt["prompt"]
        assert found.prompt_token_ids.count(made.llm._reader.images.token_id) == 4
        part = {"type": "image_pil", "image_pil": pixels}
        [found] = made.chat([{"role": "user", "content": [part]}], use_tqdm=False)
        assert found.prompt_token_ids.count(made.llm._reader.images.token_id) == 4
        with pytest.raises(RequestError, match="found 2 for 1 images"):
            made.generate({**prompt, "prompt": "<image><image>"}, use_tqdm=False)
    finally:
        made.llm.close()
