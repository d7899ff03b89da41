"""Pooled hidden states, classes, scores and ranks, compared with transformers."""

from __future__ import annotations

import asyncio
import json
import shutil
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from sdk import LLM, CheckpointError, RequestError, SamplingParams
from sdk.loaders.tokenizer.from_gguf import tokenizer_from_gguf
from sdk.models.classifier import Classifier
from sdk.requests.pooling.pairs import pair_template, read_pair
from sdk.requests.prompts.reader import PromptReader
from tests.api.engines import SHORT, ids
from tests.loaders.conftest import HIDDEN, GgufBytes, f32, llama_gguf
from tests.text.conftest import tiny_bpe

PROMPTS = [ids(1, 5), ids(2, 70), ids(3, 33)]
MODES = ["last", "cls", "mean", "max", "token"]
EXACT: dict[str, Any] = {"compute": "exact", "max_model_len": 256}


@pytest.fixture(scope="module")
def folder(golden: Path) -> Path:
    return golden / "arch-qwen3" / "hf"


@pytest.fixture(scope="module")
def states(folder: Path) -> list[torch.Tensor]:
    """The hidden states of transformers."""
    model = transformers.AutoModel.from_pretrained(folder, dtype=torch.float32)
    with torch.inference_mode():
        prompts = [torch.tensor([prompt["prompt_token_ids"]]) for prompt in PROMPTS]
        return [model(prompt).last_hidden_state[0] for prompt in prompts]


@pytest.fixture(scope="module")
def qwen(folder: Path) -> Iterator[LLM]:
    with LLM(folder, **EXACT) as llm:
        yield llm


@pytest.fixture(scope="module")
def chunked(folder: Path) -> Iterator[LLM]:
    """Prompts run in chunks of at most 16 tokens, so that requests also share steps."""
    with LLM(folder, max_num_batched_tokens=16, max_num_seqs=4, **EXACT) as llm:
        yield llm


def expected(rows: torch.Tensor, mode: str) -> torch.Tensor:
    return {
        "last": rows[-1],
        "cls": rows[0],
        "mean": rows.mean(0),
        "max": rows.amax(0),
        "token": rows,
    }[mode]


@pytest.mark.parametrize("mode", MODES)
def test_pooled_states_are_those_of_transformers(
    qwen: LLM, states: list[torch.Tensor], mode: Any
) -> None:
    plain = qwen.encode(PROMPTS, pooling=mode, normalize=False)
    for output, prompt, rows in zip(plain, PROMPTS, states, strict=True):
        assert output.prompt_token_ids == prompt["prompt_token_ids"] and output.finished
        torch.testing.assert_close(output.outputs.data, expected(rows, mode), rtol=0, atol=2e-4)
    for output, before in zip(qwen.encode(PROMPTS, pooling=mode), plain, strict=True):
        unit = torch.nn.functional.normalize(before.outputs.data.double(), dim=-1).float()
        torch.testing.assert_close(output.outputs.data, unit, rtol=2**-23, atol=0)


@pytest.mark.parametrize("mode", MODES)
def test_states_are_the_same_alone_in_a_batch_and_in_chunks(
    qwen: LLM, chunked: LLM, mode: Any
) -> None:
    together = [one.outputs.data for one in qwen.encode(PROMPTS, pooling=mode)]
    alone = [qwen.encode(prompt, pooling=mode)[0].outputs.data for prompt in PROMPTS]
    parts = [one.outputs.data for one in chunked.encode(PROMPTS, pooling=mode)]
    for one, other, third in zip(together, alone, parts, strict=True):
        assert torch.equal(one, other) and torch.equal(one, third)


def test_the_last_state_is_the_embedding(qwen: LLM) -> None:
    embedded = qwen.embed(PROMPTS)
    encoded = qwen.encode(PROMPTS)
    assert [one.embedding for one in embedded] == [one.outputs.data.tolist() for one in encoded]


def test_states_survive_a_preemption(folder: Path, chunked: LLM) -> None:
    """Long answers take the pages of embeddings in the middle of their prompts."""
    prompts = [ids(seed, 90) for seed in range(6)]
    wanted = [one.outputs.data for one in chunked.encode(prompts, pooling="mean")]
    options = {**EXACT, "max_num_batched_tokens": 16, "max_num_seqs": 4}
    with LLM(folder, kv_cache_memory_bytes=2**18, **options) as llm:
        names = llm.enqueue([ids(s, 5) for s in range(20, 24)], SHORT.clone(max_tokens=150))
        found = [one.outputs.data for one in llm.encode(prompts, pooling="mean")]
        llm.wait_for_completion()
        assert len(names) == 4 and llm.get_metrics()["num_preemptions"] > 0
    assert all(map(torch.equal, found, wanted))


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda llm: llm.encode("a", pooling="avg"), "pooling: expected one of last, cls, mean"),
        (lambda llm: llm.encode("a", pooling=3), "pooling: expected one of"),
        (lambda llm: llm.encode("a", normalize=1), "normalize: expected True or False"),
        (lambda llm: llm.classify("a"), "no classification head. Load a checkpoint"),
        (lambda llm: llm.rerank(1, ["a"]), "query: expected a string"),
        (lambda llm: llm.rerank("a", "b"), "documents: expected a list"),
        (lambda llm: llm.rerank("a", ["b", 1]), r"documents\[1\]: expected a string"),
        (lambda llm: llm.rerank("a", ["b"], 0), "top_n: expected a positive integer"),
        (lambda llm: llm.rerank("a", ["b"], chat_template="x"), "compares embeddings"),
        (lambda llm: llm.score("a", ["b"], chat_template="x"), "compares embeddings"),
    ],
)
def test_bad_arguments_are_rejected(qwen: LLM, call: Any, message: str) -> None:
    with pytest.raises(RequestError, match=message):
        call(qwen)


def test_no_prompts_give_no_outputs(qwen: LLM) -> None:
    assert qwen.encode([]) == qwen.embed([]) == qwen.rerank("a", []) == []


def test_more_token_states_than_memory_is_set_aside_for_are_rejected(qwen: LLM) -> None:
    before = qwen._job_maker._results.nbytes
    qwen._job_maker._results.nbytes = 4 * 64 * 40
    try:
        with pytest.raises(RequestError, match=r"pooling='token': 70 tokens .* enough for 40 tok"):
            qwen.encode(PROMPTS, pooling="token")
        assert len(qwen.encode(PROMPTS[2], pooling="token")[0].outputs.data) == 33
    finally:
        qwen._job_maker._results.nbytes = before


def scores_said(call: Any) -> list[str]:
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        call()
    return [str(one.message) for one in found if one.category is UserWarning]


def test_a_model_that_is_no_reranker_says_once_what_scores_are(
    folder: Path, golden: Path, tmp_path: Path
) -> None:
    with LLM(folder, **EXACT) as llm:
        [text] = scores_said(lambda: [llm.rerank("a", ["b"]), llm.score("a", "b")])
        assert text.startswith("rerank(): this model is neither a reranker nor an embedding model")
    with LLM(folder, **EXACT) as llm:
        [text] = scores_said(lambda: asyncio.run(llm.ascore("a", "b")))
        assert text.startswith("score(): ")
    classifier_folder(golden, tmp_path, ["relevance"])
    with LLM(tmp_path, **EXACT) as llm:
        assert scores_said(lambda: llm.rerank("a", ["b"])) == []


def test_a_reranking_without_a_head_compares_embeddings(qwen: LLM) -> None:
    documents = ["abc", "query text", "other words", "query"]
    scores = [one.score for one in qwen.score("query text", documents)]
    ranked = qwen.rerank("query text", documents)
    assert [one.relevance_score for one in ranked] == sorted(scores, reverse=True)
    assert ranked[0].index == 1 and ranked[0].document == "query text"
    assert ranked[0].relevance_score == pytest.approx(1, abs=1e-5)
    assert qwen.rerank("query text", documents, top_n=2) == ranked[:2]
    assert qwen.rerank("query text", documents, top_n=9) == ranked


# ---- classification heads ------------------------------------------------------------------------


def classifier_folder(
    golden: Path, folder: Path, labels: list[str], tied: bool = False, **config: Any
) -> Any:
    """A random Qwen 3 with a head for ``labels``, written by transformers; returns the model."""
    source = golden / "arch-qwen3" / "hf"
    facts = transformers.AutoConfig.from_pretrained(
        source, num_labels=len(labels), tie_word_embeddings=tied, **config
    )
    facts.id2label = dict(enumerate(labels))
    torch.manual_seed(5)
    model = transformers.AutoModelForSequenceClassification.from_config(facts)
    with torch.no_grad():
        model.score.weight.normal_()
    model = model.float().eval()
    model.save_pretrained(folder)
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        shutil.copy(source / name, folder / name)
    return model


def logits_of(model: Any, prompts: list[Any]) -> list[torch.Tensor]:
    with torch.inference_mode():
        return [model(torch.tensor([prompt])).logits[0] for prompt in prompts]


@pytest.mark.parametrize(
    ("labels", "problem", "activation"),
    [
        (["bad", "fine", "good"], None, lambda x: x.softmax(0)),
        (["bad", "fine", "good"], "multi_label_classification", lambda x: x.sigmoid()),
        (["score"], None, lambda x: x.sigmoid()),
        (["score"], "regression", lambda x: x),
    ],
)
def test_classes_are_those_of_transformers(
    golden: Path, tmp_path: Path, labels: list[str], problem: str | None, activation: Any
) -> None:
    model = classifier_folder(golden, tmp_path, labels, problem_type=problem)
    wanted = logits_of(model, [prompt["prompt_token_ids"] for prompt in PROMPTS])
    with LLM(tmp_path, **EXACT) as llm:
        assert not [text for text in llm.load_warnings if "score" in text]
        found = llm.classify(PROMPTS)
        raw = llm.classify(PROMPTS, use_activation=False)
        alone = [llm.classify(prompt)[0].probs for prompt in PROMPTS]
    assert [one.probs for one in found] == alone
    for output, plain, logits in zip(found, raw, wanted, strict=True):
        torch.testing.assert_close(torch.tensor(plain.probs), logits, rtol=0, atol=1e-3)
        torch.testing.assert_close(
            torch.tensor(output.probs), activation(logits), rtol=0, atol=1e-3
        )
        assert output.labels == labels and output.num_classes == len(labels)
        assert output.label == labels[int(activation(logits).argmax())]


def test_a_checkpoint_that_classifies_does_not_generate(golden: Path, tmp_path: Path) -> None:
    classifier_folder(golden, tmp_path, ["bad", "good"])
    with LLM(tmp_path, **EXACT) as llm:
        for call in (llm.generate, llm.enqueue, llm.stream, llm.pin):
            with pytest.raises(RequestError, match="trained to classify"):
                call("hello there, how are you doing?")
        assert len(llm.embed("hello")[0].embedding) == 64
        with pytest.raises(RequestError, match=r"classes \['bad', 'good'\].*Use classify"):
            llm.rerank("a", ["b"])


def test_a_cross_encoder_scores_pairs(golden: Path, tmp_path: Path) -> None:
    model = classifier_folder(golden, tmp_path, ["relevance"])
    documents = ["the cat", "a dog and", "mat", "the"]
    with LLM(tmp_path, **EXACT) as llm:
        tokenizer = llm.get_tokenizer()
        prompts = [
            tokenizer.encode("cat sat") + tokenizer.encode(text, add_special_tokens=False)
            for text in documents
        ]
        wanted = [float(x.sigmoid()) for x in logits_of(model, prompts)]
        found = llm.score("cat sat", documents)
        assert [one.score for one in found] == pytest.approx(wanted, abs=1e-3)
        ranked = llm.rerank("cat sat", documents, 3)
        order = sorted(range(4), key=lambda index: -found[index].score)[:3]
        assert [(one.index, one.relevance_score) for one in ranked] == [
            (index, found[index].score) for index in order
        ]
        template = "Q: {query} D: {document}?"
        [one] = llm.score("cat", ["mat"], chat_template=template)
        text = tokenizer.encode("Q: cat D: mat?", add_special_tokens=False)
        [same] = llm.classify({"prompt_token_ids": text})
        assert one.score == same.probs[0]
        with pytest.raises(RequestError, match="pairs have a template, which cannot be cut"):
            llm.score("cat", ["mat"], chat_template=template, truncate_prompt_tokens=5)
        with pytest.raises(RequestError, match="expected strings for a model"):
            llm.score([[1, 2]], ["b"])
        with pytest.raises(RequestError, match="chat_template: expected the source"):
            llm.rerank("a", ["b"], chat_template=3)  # type: ignore[arg-type]
        with pytest.raises(RequestError, match="context holds 256"):
            llm.rerank("a" * 3000, ["b"])


def test_pairs_with_the_same_query_share_its_pages(golden: Path, tmp_path: Path) -> None:
    classifier_folder(golden, tmp_path, ["relevance"])
    query = "the cat sat on the mat and the dog said hello to the other cats in the world"
    documents = ["one", "two", "three", "four"]
    with LLM(tmp_path, **EXACT) as llm:
        first = llm.rerank(query, documents)
        hits = llm.get_metrics()["prefix_hits"]
        assert hits > 0
        assert llm.rerank(query, documents) == first
        llm.reset_prefix_cache()
        alone = [llm.score(query, [text])[0].score for text in documents]
        assert {one.index: one.relevance_score for one in first} == dict(enumerate(alone))


def test_a_head_that_contradicts_the_config_is_rejected(golden: Path, tmp_path: Path) -> None:
    classifier_folder(golden, tmp_path, ["bad", "good"])
    config = json.loads((tmp_path / "config.json").read_text())
    for changes, message in (
        ({"id2label": {"0": "a", "1": "b", "2": "c"}}, r"score.weight: expected shape \[3, 64\]"),
        ({"id2label": {"0": "a", "2": "c"}}, r"id2label: expected a label for each of 0..1"),
        ({"problem_type": "ranking"}, "problem_type"),
    ):
        (tmp_path / "config.json").write_text(json.dumps({**config, **changes}))
        with pytest.raises(CheckpointError, match=message):
            LLM(tmp_path, **EXACT)


def gguf_head(labels: Any) -> GgufBytes:
    """A llama with llama.cpp's head of a reranker, two rows."""
    file = llama_gguf()
    file.tensors["cls.output.weight"] = ((HIDDEN, 2), 0, f32(2, HIDDEN, seed=99))
    if labels is not None:
        file.metadata["llama.classifier.output_labels"] = (9, (8, labels))
    return file


@pytest.mark.parametrize("labels", [["yes", "no"], None])
def test_the_head_of_a_gguf_file_is_read(tmp_path: Path, labels: list[str] | None) -> None:
    path = tmp_path / "model.gguf"
    path.write_bytes(gguf_head(labels).build())
    with LLM(path, skip_tokenizer_init=True, compute="exact", max_model_len=64) as llm:
        [found] = llm.classify({"prompt_token_ids": [1, 4, 5]}, use_activation=False)
        state = llm.encode({"prompt_token_ids": [1, 4, 5]}, normalize=False)[0].outputs.data
        with pytest.raises(RequestError, match="trained to classify"):
            llm.generate({"prompt_token_ids": [1]})
    head = torch.frombuffer(bytearray(f32(2, HIDDEN, seed=99)), dtype=torch.float32)
    wanted = head.view(2, HIDDEN) @ state
    torch.testing.assert_close(torch.tensor(found.probs), wanted, rtol=0, atol=1e-5)
    assert found.labels == (labels or ["LABEL_0", "LABEL_1"])


def test_labels_of_a_gguf_file_that_contradict_its_head_are_rejected(tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    path.write_bytes(gguf_head(["yes"]).build())
    with pytest.raises(CheckpointError, match=r"output_labels is \['yes'\], expected 2 names"):
        LLM(path, **EXACT)


def test_a_gguf_file_may_have_the_template_of_pairs() -> None:
    source = "<query>{query}</query><doc>{document}</doc>"
    facts = tiny_bpe(**{"tokenizer.chat_template.rerank": source})
    reader = PromptReader(tokenizer_from_gguf(facts, "x.gguf"), vocab_size=262, max_model_len=128)
    classes = Classifier(("yes", "no"), "softmax")
    template = pair_template(reader, classes, None)
    prompt = read_pair(reader, ("a{document}", "b<|end|>"), template)
    assert prompt.text == "<query>a{document}</query><doc>b<|end|></doc>"
    assert 259 not in prompt.token_ids


# ---- the logits of yes and no --------------------------------------------------------------------


def test_tokens_named_in_the_config_are_classes(folder: Path) -> None:
    options = {**EXACT, "hf_overrides": {"classifier_from_token": ["a", "b"]}}
    with LLM(folder, **options) as llm:
        tokenizer = llm.get_tokenizer()
        pair = [tokenizer.convert_tokens_to_ids(text) for text in ("a", "b")]
        params = SamplingParams(max_tokens=1, temperature=0, logprob_token_ids=pair, logprobs=0)
        [answer] = llm.generate(PROMPTS[1], params)
        assert answer.outputs[0].logprobs is not None
        row = answer.outputs[0].logprobs[0]
        wanted = torch.tensor([row[token].logprob for token in pair]).softmax(0)
        [found] = llm.classify(PROMPTS[1])
        assert found.labels == ["a", "b"]
        torch.testing.assert_close(torch.tensor(found.probs), wanted, rtol=0, atol=1e-5)
        with pytest.raises(RequestError, match="expected a single class, or the classes yes and"):
            llm.score("a", ["b"])


def test_a_yes_or_no_model_gets_the_prompt_of_qwen3_reranker(smollm2: Path) -> None:
    options: dict[str, Any] = {"hf_overrides": {"classifier_from_token": ["no", "yes"]}}
    with LLM(smollm2, max_model_len=512, **options) as llm:
        documents = ["Paris is the capital of France.", "Cats sleep all day."]
        ranked = llm.rerank("What is the capital of France?", documents)
        assert {one.index for one in ranked} == {0, 1}
        assert all(0 < one.relevance_score < 1 for one in ranked)
        prompt = llm.score("What?", ["<|im_end|>"])
        assert len(prompt) == 1
        text = (
            "<|im_start|>system\nJudge whether the Document meets the requirements based on the "
            'Query and the Instruct provided. Note that the answer can only be "yes" or "no".'
            "<|im_end|>\n<|im_start|>user\n<Instruct>: Given a web search query, retrieve relevant "
            "passages that answer the query\n<Query>: What is the capital of France?\n<Document>: "
            f"{documents[0]}<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n"
        )
        [same] = llm.classify(text)
        [found] = [one for one in ranked if one.index == 0]
        assert found.relevance_score == same.probs[1]
        # What the server reserves for a request: the tokens with the template of pairs.
        counted = llm._pooling.pair_tokens("What is the capital of France?", documents[:1])
        assert counted == len(llm.get_tokenizer().encode(text))


@pytest.mark.parametrize("tokens", ["yes", ["yes"], ["yes", 3], [], ["yes", ""]])
def test_a_bad_list_of_tokens_is_rejected(folder: Path, tokens: Any) -> None:
    with pytest.raises(CheckpointError, match="classifier_from_token: expected a list of"):
        LLM(folder, hf_overrides={"classifier_from_token": tokens}, **EXACT)


def test_classes_that_are_no_tokens_are_rejected(folder: Path) -> None:
    options = {**EXACT, "hf_overrides": {"classifier_from_token": ["yes", "certainly not"]}}
    with (
        LLM(folder, **options) as llm,
        pytest.raises(RequestError, match="classifier_from_token: expected tokens of the voc"),
    ):
        llm.classify("a")


@pytest.mark.parametrize("post_norm", [False, True])
def test_states_and_classes_come_after_a_projection_behind_the_layers(
    tmp_path: Path, post_norm: bool
) -> None:
    """OPT-350m has one, from 48 features to 16 here: vectors and heads have that width."""
    torch.manual_seed(5)
    config = transformers.OPTConfig(
        vocab_size=384,
        hidden_size=48,
        word_embed_proj_dim=16,
        ffn_dim=64,
        num_hidden_layers=2,
        num_attention_heads=3,
        max_position_embeddings=256,
        do_layer_norm_before=not post_norm,
        num_labels=3,
        init_std=0.3,
        pad_token_id=1,
    )
    model = transformers.OPTForSequenceClassification(config).eval()
    prompts = [{"prompt_token_ids": [token % 380 + 4 for token in range(3, n)]} for n in (9, 40)]
    given = [torch.tensor([prompt["prompt_token_ids"]]) for prompt in prompts]
    with torch.inference_mode():
        rows = [model.model(one).last_hidden_state[0] for one in given]
        classes = [model(one).logits[0].softmax(-1) for one in given]
    assert rows[0].shape[1] == 16
    model.save_pretrained(tmp_path / "classes")
    with LLM(tmp_path / "classes", skip_tokenizer_init=True, **EXACT) as llm:
        for one, own in zip(llm.classify(prompts), classes, strict=True):
            torch.testing.assert_close(torch.tensor(one.probs), own, rtol=0, atol=1e-4)
    plain = transformers.OPTForCausalLM(config)
    plain.model.load_state_dict(model.model.state_dict())
    plain.save_pretrained(tmp_path / "plain")
    for eager in (False, True):
        options = {"skip_tokenizer_init": True, "enforce_eager": eager, **EXACT}
        with LLM(tmp_path / "plain", **options) as llm:
            for mode in ("token", "mean"):
                found = llm.encode(prompts, pooling=mode, normalize=False)
                for one, own in zip(found, rows, strict=True):
                    wanted = expected(own, mode)
                    torch.testing.assert_close(one.outputs.data, wanted, rtol=0, atol=2e-4)
            assert [len(one.embedding) for one in llm.embed(prompts)] == [16, 16]
