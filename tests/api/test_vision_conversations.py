"""Whole conversations with tiny random models of more families, beside transformers."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from sdk import LLM, CheckpointError, LoRARequest, SamplingParams
from sdk.models.vision.patches import check_image
from sdk.requests.prompts.kinds import ChatOptions
from tests.models.tiny_vision import MODELS, vision_model
from tests.peft_adapters import save, with_peft
from tests.vision_conversations import ALL, Conversations, inputs_of
from tests.vision_prompts import picture, token_of, with_images, write_tokenizer

SEVERAL = [
    {"role": "user", "content": [{"type": "image"}, {"type": "text", "text": "Compare with"}]},
    {"role": "assistant", "content": "What?"},
    {"role": "user", "content": [{"type": "text", "text": "this"}, {"type": "image"}]},
    {"role": "assistant", "content": "Noise."},
    {"role": "user", "content": "And?"},
]
#: Without images, with one in the first turn, with one in a later turn, and with two.
CASES: dict[str, tuple[list[dict[str, Any]], list[Any]]] = {
    "none": ([{"role": "user", "content": "What?"}], []),
    "one": (SEVERAL[:1], [picture(40, 61, 1)]),
    "later": ([{"role": "user", "content": "Hi"}, *SEVERAL[1:3]], [picture(130, 33, 2)]),
    "two": (SEVERAL, [picture(40, 61, 1), picture(97, 30, 2)]),
}
GREEDY = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True, logprobs=1)
LENGTH = 1024


def write_model(one: Conversations, folder: Path) -> None:
    """A folder with weights, tokenizer and the settings of preprocessing."""
    family = one.family
    write_tokenizer(family, folder)
    given = MODELS[one.tiny]
    key = next(name for name in given if name.startswith("image_token"))
    end = token_of(family, folder, family.specials[0])
    ends = dict.fromkeys(("bos_token_id", "eos_token_id", "pad_token_id"), end)
    text = {**given["text_config"], "vocab_size": 320, "max_position_embeddings": LENGTH, **ends}
    model = vision_model(one.tiny, text_config=text, **{key: token_of(family, folder)}, **one.model)
    model.save_pretrained(folder)
    settings = {"image_processor_type": family.kind, **family.size}
    (folder / "preprocessor_config.json").write_text(json.dumps(settings))


@pytest.fixture(scope="module", params=list(ALL))
def seeing(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[Conversations, Any, LLM]]:
    """A family, transformers' model and ours."""
    one = ALL[request.param]
    folder = tmp_path_factory.mktemp(request.param)
    write_model(one, folder)
    theirs = transformers.AutoModelForImageTextToText.from_pretrained(folder).eval()
    theirs.generation_config.eos_token_id = None  # answers have a fixed length
    exact = {"dtype": "float32", "kv_cache_dtype": "float32", "compute": "exact"}
    with LLM(str(folder), max_model_len=LENGTH, num_threads=1, **exact) as made:
        yield one, theirs, made


@pytest.mark.parametrize("case", CASES)
def test_conversations_are_answered_as_by_transformers(
    seeing: tuple[Conversations, Any, LLM], case: str
) -> None:
    one, theirs, llm = seeing
    messages, pictures = CASES[case]
    given = inputs_of(one, messages, pictures)
    [output] = llm.chat(with_images(messages, pictures), GREEDY)
    assert output.prompt_token_ids is not None
    assert list(output.prompt_token_ids) == given["input_ids"][0].tolist()
    with torch.no_grad():
        found = theirs.generate(
            **given,
            max_new_tokens=GREEDY.max_tokens,
            do_sample=False,
            return_dict_in_generate=True,
            output_logits=True,
        )
    rows = torch.cat(list(found.logits)).float().log_softmax(-1)
    ids = found.sequences[0, given["input_ids"].shape[1] :].tolist()
    [ours] = output.outputs
    assert ours.token_ids == ids
    for token, row, chances in zip(ids, rows, ours.logprobs, strict=True):
        assert abs(chances[token].logprob - float(row[token])) <= 1e-4


def test_sizes_and_tiles_that_belong_to_no_image_are_refused(
    seeing: tuple[Conversations, Any, LLM],
) -> None:
    """As an application makes them that fills in an ``ImageInput`` itself."""
    _, _, llm = seeing
    vision = llm.model_config.vision
    assert vision is not None
    [image] = llm._reader.read_chat(with_images(*CASES["one"]), GREEDY, ChatOptions()).images
    good = image.image
    check_image(good, vision)
    wrong = {
        "tokens, expected": good._replace(num_tokens=good.num_tokens + 1),
        "expected as many grids|tokens, expected": good._replace(grids=good.grids[:-1]),
        "expected tiles": good._replace(tiles=(), grids=()),
    }
    if vision.pictures:
        wrong["a size of"] = good._replace(size=(0, 0))
        wrong["tiles of an image of"] = good._replace(tiles=good.tiles[:1], grids=good.grids[:1])
    for why, bad in wrong.items():
        with pytest.raises(ValueError, match=why):
            check_image(bad, vision)


def tokens(output: Any) -> list[tuple[int, float]]:
    """An answer with its log-probabilities."""
    [one] = output.outputs
    pairs = zip(one.token_ids, one.logprobs, strict=True)
    return [(token, chances[token].logprob) for token, chances in pairs]


def test_answers_have_the_same_bits_together_and_after_a_prefix_hit(
    seeing: tuple[Conversations, Any, LLM],
) -> None:
    _, _, llm = seeing
    asked = [with_images(messages, pictures) for messages, pictures in CASES.values()]
    alone = []
    for messages in asked:
        llm.reset_prefix_cache()
        alone.append(tokens(llm.chat(messages, GREEDY)[0]))
    assert [tokens(one) for one in llm.chat(asked, GREEDY)] == alone
    again = llm.chat(asked, GREEDY)
    assert [tokens(one) for one in again] == alone
    assert all(one.num_cached_tokens for one in again[1:])


def test_a_tower_that_fails_ends_the_request_and_nothing_else(
    seeing: tuple[Conversations, Any, LLM], monkeypatch: pytest.MonkeyPatch
) -> None:
    _, _, llm = seeing
    fine = [with_images(*CASES[name]) for name in ("none", "one")]
    wanted = [tokens(one) for one in llm.chat(fine, GREEDY)]
    rank = llm._served.model_runner().images

    def failing(images: Any) -> Any:
        raise ZeroDivisionError("no patches")

    with monkeypatch.context() as patch:
        patch.setattr(rank._tower, "begin", failing)
        new = with_images(SEVERAL[:1], [picture(61, 70, 9)])
        bad, good = llm.chat([new, fine[0]], GREEDY)
    assert bad.outputs[0].finish_reason == "error" and tokens(good) == wanted[0]
    assert "could not be encoded: ZeroDivisionError: no patches" in str(bad.outputs[0].stop_reason)
    assert [tokens(one) for one in llm.chat(fine, GREEDY)] == wanted


@pytest.mark.slow
@pytest.mark.parametrize("name", ["qwen3_vl", "llava_next", "smolvlm"])
def test_adapters_of_the_text_part_are_those_of_peft_and_others_are_refused(
    name: str, tmp_path: Path
) -> None:
    one, folder = ALL[name], tmp_path / "model"
    write_model(one, folder)
    kind = transformers.AutoModelForImageTextToText
    messages, pictures = CASES["two"]
    given, asked = inputs_of(one, messages, pictures), with_images(messages, pictures)
    last = SamplingParams(temperature=0, max_tokens=1, logprobs=-1)
    exact = {"dtype": "float32", "kv_cache_dtype": "float32", "compute": "exact"}
    options = {"max_model_len": LENGTH, "num_threads": 1, "enable_lora": True, **exact}

    def adapted(target: str, place: str) -> tuple[Any, LoRARequest]:
        model = with_peft(kind.from_pretrained(folder), r=4, target_modules=target)
        number = 1 + (place == "tower")
        return model, LoRARequest(place, number, str(save(model, tmp_path / place)))

    text, lora = adapted(r".*(language|text)_model.*\.(q_proj|v_proj|down_proj)", "text")
    with torch.no_grad():
        wanted = text(**given).logits[0, -1].log_softmax(-1)
    with LLM(str(folder), **options) as llm:
        [output] = llm.chat(asked, last, lora_request=lora)
        found = output.outputs[0].logprobs[0]
        assert max(abs(found[i].logprob - float(x)) for i, x in enumerate(wanted)) <= 1e-4
        [plain] = llm.chat(asked, last)
        assert plain.outputs[0].logprobs[0] != found
        _, tower = adapted(r".*visual.*\.qkv|.*vision.*\.q_proj", "tower")
        with pytest.raises(CheckpointError, match="the model has no such matrix"):
            llm.chat(asked, last, lora_request=tower)


def _text(llm: LLM, messages: list[dict[str, Any]]) -> str:
    """What the chat template makes of a conversation, one placeholder for each image."""
    reader = llm._reader.images
    assert reader is not None
    text: str = llm._reader.need_tokenizer("").apply_chat_template(
        messages, image=reader._processor.placeholder
    )
    return text


@pytest.mark.parametrize("pooling", ["lasttoken", "mean"])
def test_a_sentence_folder_of_a_vision_model_embeds_images_and_texts(
    pooling: str, tmp_path: Path
) -> None:
    """As Qwen3-VL-Embedding does: one space for both."""
    one = ALL["qwen3_vl"]
    write_model(one, tmp_path)
    kinds = ["Transformer", "Pooling", "Normalize"]
    modules = [
        {"idx": i, "name": str(i), "path": f"{i}_{kind}" if i else "", "type": f"models.{kind}"}
        for i, kind in enumerate(kinds)
    ]
    (tmp_path / "modules.json").write_text(json.dumps(modules))
    (tmp_path / "1_Pooling").mkdir()
    settings = {"word_embedding_dimension": 64, "pooling_mode": pooling}
    (tmp_path / "1_Pooling" / "config.json").write_text(json.dumps(settings))
    theirs = transformers.AutoModelForImageTextToText.from_pretrained(tmp_path).eval()
    exact = {"dtype": "float32", "kv_cache_dtype": "float32", "compute": "exact"}
    with LLM(str(tmp_path), max_model_len=LENGTH, num_threads=1, **exact) as llm:
        prompts, wanted = [], []
        for messages, pictures in CASES.values():
            given = inputs_of(one, messages, pictures)
            with torch.no_grad():
                states = theirs.model(**given).last_hidden_state[0]
            state = states[-1] if pooling == "lasttoken" else states.mean(0)
            wanted.append(torch.nn.functional.normalize(state, dim=0))
            prompts.append(
                {"prompt": _text(llm, messages), "multi_modal_data": {"image": pictures}}
            )
        found = llm.embed(prompts)
    for own, expected in zip(found, wanted, strict=True):
        assert (torch.tensor(own.embedding) - expected).abs().max() <= 1e-5


def test_a_reranker_with_answers_for_classes_scores_prompts_with_images(tmp_path: Path) -> None:
    """As Qwen3-VL-Reranker does: the probability of "yes" beside "no" as the next token."""
    one = ALL["qwen3_vl"]
    write_model(one, tmp_path)
    theirs = transformers.AutoModelForImageTextToText.from_pretrained(tmp_path).eval()
    exact = {"dtype": "float32", "kv_cache_dtype": "float32", "compute": "exact"}
    words = {"classifier_from_token": ["n", "y"]}
    options = {"max_model_len": LENGTH, "num_threads": 1, "hf_overrides": words}
    with LLM(str(tmp_path), **options, **exact) as llm:
        tokenizer = llm._reader.need_tokenizer("")
        ids = [tokenizer.token_to_id(word) for word in ("n", "y")]
        for messages, pictures in CASES.values():
            with torch.no_grad():
                logits = theirs(**inputs_of(one, messages, pictures)).logits[0, -1]
            given = {"prompt": _text(llm, messages), "multi_modal_data": {"image": pictures}}
            [found] = llm.classify(given)
            expected = logits[torch.tensor(ids)].softmax(-1)
            assert (torch.tensor(found.probs) - expected).abs().max() <= 1e-5
