"""Token healing: answers begin with the text of the prompt's last tokens, which is not repeated."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from sdk import LLM, RequestError, SamplingParams
from tests.api.engines import ids

HEAL = SamplingParams(temperature=0, max_tokens=8, token_healing=True, ignore_eos=True)
URL = 'My page is at <a href="http:'


def test_an_url_goes_on_with_two_slashes(smol: LLM) -> None:
    [plain] = smol.generate(URL, HEAL.clone(token_healing=False))
    [output] = smol.generate(URL, HEAL)
    tokenizer = smol.get_tokenizer()
    assert tokenizer.decode(output.outputs[0].token_ids[0]) == "://"
    assert output.outputs[0].text.startswith("//")
    assert output.prompt == URL
    assert output.prompt_token_ids == plain.prompt_token_ids[:-1]
    whole = tokenizer.decode(output.prompt_token_ids + output.outputs[0].token_ids)
    assert whole == URL + output.outputs[0].text


def test_a_space_at_the_end_does_no_harm(smol: LLM) -> None:
    params = HEAL.clone(max_tokens=3)
    [plain] = smol.generate("The capital of France is", params.clone(token_healing=False))
    [healed] = smol.generate("The capital of France is ", params)
    assert healed.outputs[0].text == plain.outputs[0].text.removeprefix(" ")


@pytest.mark.parametrize("seed", range(6))
def test_prompt_and_answer_are_one_text_whatever_is_drawn(tiny: LLM, smol: LLM, seed: int) -> None:
    params = HEAL.clone(temperature=3.0, seed=seed, max_tokens=6, n=2)
    for llm, texts in ((tiny, ["the ca", "hello wor", "a b"]), (smol, [URL, "naïve caf", "日本"])):
        tokenizer = llm.get_tokenizer()
        for output in llm.generate(texts, params):
            for answer in output.outputs:
                whole = tokenizer.decode(
                    output.prompt_token_ids + answer.token_ids, skip_special_tokens=True
                )
                if not whole.endswith("\ufffd") and not answer.text.endswith("\ufffd"):
                    assert whole == str(output.prompt) + answer.text


def test_streams_batches_and_processors_give_the_same(smol: LLM) -> None:
    [whole] = smol.generate(URL, HEAL)
    pieces = [piece.outputs[0].text for piece in smol.stream(URL, HEAL)]
    assert "".join(pieces) == whole.outputs[0].text
    together = smol.generate([ids(1), URL, "x", URL], HEAL)
    assert together[1].outputs[0] == together[3].outputs[0] == whole.outputs[0]
    seen = []

    def watch(output: Any, row: Any) -> Any:
        seen.append(int(row.isfinite().sum()))
        return row

    [processed] = smol.generate(URL, HEAL.clone(logits_processors=[watch]))
    assert processed.outputs[0].token_ids == whole.outputs[0].token_ids
    assert seen[0] == 27 and seen[1] == smol.model_config.vocab_size
    penalized = smol.generate(URL, HEAL.clone(repetition_penalty=1.3, logprobs=2))
    assert penalized[0].outputs[0].text.startswith("//")


def test_a_preemption_does_not_change_the_answer(tiny_path: Path, tiny: LLM) -> None:
    params = HEAL.clone(max_tokens=60)
    prompts = [f"{'hello wor' * k}ld the ca" for k in range(1, 6)]
    wanted = [one.outputs[0] for one in tiny.generate(prompts, params)]
    with LLM(tiny_path, max_model_len=128, kv_cache_memory_bytes=2**18) as llm:
        found = [one.outputs[0] for one in llm.generate(prompts, params)]
        assert llm.get_metrics()["num_preemptions"] > 0
    assert found == wanted


def test_stop_strings_see_only_the_new_text(smol: LLM) -> None:
    [output] = smol.generate(URL, HEAL.clone(stop=["://", "www"], max_tokens=12))
    text = output.outputs[0].text
    assert text.startswith("//") and output.outputs[0].stop_reason != "://"


def test_a_message_that_is_continued_is_healed(smol: LLM) -> None:
    messages = [{"role": "user", "content": "Link?"}, {"role": "assistant", "content": "http:"}]
    [output] = smol.chat(messages, HEAL, continue_final_message=True)
    assert output.outputs[0].text.startswith("//")
    [opened] = smol.chat(messages[:1], HEAL)
    [same] = smol.chat(messages[:1], HEAL.clone(token_healing=False))
    assert opened.outputs[0] == same.outputs[0]


def test_a_code_model_s_prefix_is_not_healed_before_its_middle(smol: LLM) -> None:
    with pytest.raises(RequestError, match="fill-in-the-middle"):
        smol.generate({"prompt": "a", "suffix": "b"}, HEAL)


def test_the_event_loop_goes_on_while_the_vocabulary_is_sorted(tiny_path: Path) -> None:
    with LLM(tiny_path, max_model_len=128) as llm:
        reader = llm._reader
        assert not reader.is_short("a", HEAL) and not reader.is_short("a", [HEAL])
        assert reader.is_short("a", None) and reader.is_short("a", HEAL.clone(token_healing=False))

        async def both() -> list[str]:
            [one] = await llm.agenerate("hello wor", HEAL)
            text = [piece.outputs[0].text async for piece in llm.astream("hello wor", HEAL)]
            return [one.outputs[0].text, "".join(text)]

        first, second = asyncio.run(both())
        assert first == second
        assert reader.is_short("a", HEAL)


def test_what_cannot_be_healed_is_rejected(tiny_path: Path) -> None:
    with pytest.raises(RequestError, match="token_healing must be True or False"):
        SamplingParams(token_healing=1)  # type: ignore[arg-type]
    with (
        LLM(tiny_path, max_model_len=128, skip_tokenizer_init=True) as llm,
        pytest.raises(RequestError, match="token_healing needs a tokenizer"),
    ):
        llm.generate(ids(1), HEAL)


def test_words_that_are_joined_later_cannot_be_healed(tiny: LLM, monkeypatch: Any) -> None:
    monkeypatch.setattr(type(tiny._reader.tokenizer), "bytewise", False)
    with pytest.raises(RequestError, match="expected a tokenizer that decodes byte by byte"):
        tiny.generate("the ca", HEAL)
