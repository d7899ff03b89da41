"""Folders of sentence-transformers: `embed` gives what their modules describe.

The oracle is transformers' hidden states and numpy, in the arithmetic of sentence-transformers'
modules.
"""

from __future__ import annotations

import asyncio
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from safetensors.torch import save_file

from sdk import LLM, AsyncLLM, CheckpointError, RequestError, UnsupportedError
from sdk.compat.vllm import LLM as VLLM
from sdk.engine.plan import Pooling
from sdk.engine.rank.pooling import Pooler
from sdk.loaders.tokenizer.from_folder import tokenizer_from_folder
from tests.gguf_models import U32, gguf_of, save_gguf
from tests.models.conftest import tiny

IDS = [[5, 17, 200, 3, 99, 42, 7], [11, 12, 13], [9] * 70]
PROMPTS = [{"prompt_token_ids": ids} for ids in IDS]
OPTIONS: dict[str, Any] = {"compute": "exact", "max_model_len": 256, "num_threads": 1}
#: sentence-transformers' flag of each mode, and its arithmetic.
MODES: dict[str, tuple[str, Callable[[Any], Any]]] = {
    "cls": ("pooling_mode_cls_token", lambda x: x[0]),
    "mean": ("pooling_mode_mean_tokens", lambda x: x.mean(0)),
    "max": ("pooling_mode_max_tokens", lambda x: x.max(0)),
    "last": ("pooling_mode_lasttoken", lambda x: x[-1]),
    "weightedmean": (
        "pooling_mode_weightedmean_tokens",
        lambda x: (x * np.arange(1, len(x) + 1)[:, None]).sum(0) / np.arange(1, len(x) + 1).sum(),
    ),
    "mean_sqrt_len": (
        "pooling_mode_mean_sqrt_len_tokens",
        lambda x: x.sum(0) / np.sqrt(len(x)),
    ),
}
ACTIVATIONS = {"Tanh": np.tanh, "Identity": lambda x: x}


@pytest.fixture(scope="module")
def source(golden: Path) -> Path:
    return golden / "arch-qwen3" / "hf"


@pytest.fixture(scope="module")
def states(source: Path) -> list[Any]:
    """The hidden states of transformers."""
    model = transformers.AutoModel.from_pretrained(source, dtype=torch.float32)
    with torch.inference_mode():
        return [model(torch.tensor([ids])).last_hidden_state[0].double().numpy() for ids in IDS]


def module(index: int, kind: str, path: str = "") -> dict[str, Any]:
    name = f"sentence_transformers.models.{kind}"
    return {"idx": index, "name": str(index), "path": path, "type": name}


class Folder:
    """A copy of a model's folder with modules; the copy's weights are links."""

    def __init__(self, source: Path, path: Path, pooling: Any) -> None:
        shutil.copytree(source, path)
        self.path = path
        self.modules = [module(0, "Transformer"), module(1, "Pooling", "1_Pooling")]
        self.write("1_Pooling/config.json", pooling)

    def write(self, name: str, value: Any) -> None:
        file = self.path / name
        file.parent.mkdir(exist_ok=True)
        file.write_text(json.dumps(value))

    def add(self, kind: str, path: str = "", **config: Any) -> None:
        self.modules.append(module(len(self.modules), kind, path))
        if config:
            self.write(f"{path}/config.json", config)

    def dense(self, path: str, shape: tuple[int, int], activation: str, bias: bool = True) -> Any:
        """Weight and bias of a dense layer that is added."""
        generator = np.random.default_rng(len(self.modules))
        weight = generator.normal(0, shape[1] ** -0.5, shape).astype(np.float32)
        tensors = {"linear.weight": torch.from_numpy(weight)}
        found = generator.normal(size=shape[0]).astype(np.float32) if bias else None
        if found is not None:
            tensors["linear.bias"] = torch.from_numpy(found)
        name = f"torch.nn.modules.activation.{activation}"
        self.add(
            "Dense",
            path,
            in_features=shape[1],
            out_features=shape[0],
            bias=bias,
            activation_function=name,
        )
        save_file(tensors, self.path / path / "model.safetensors")
        return weight, found

    def open(self, **options: Any) -> LLM:
        self.write("modules.json", self.modules)
        return LLM(self.path, **OPTIONS, **options)


@pytest.fixture
def folder(source: Path, tmp_path: Path) -> Callable[..., Folder]:
    def make(pooling: Any = {"pooling_mode_mean_tokens": True}) -> Folder:  # noqa: B006
        return Folder(source, tmp_path / "model", pooling)

    return make


def close(found: Any, expected: Any) -> bool:
    return bool(np.allclose(found, expected, rtol=0, atol=2e-4 * np.abs(expected).max()))


@pytest.mark.parametrize("name", MODES)
def test_each_pooling_is_that_of_its_flag(
    name: str, folder: Callable[..., Folder], states: list[Any]
) -> None:
    flag, oracle = MODES[name]
    made = folder({"word_embedding_dimension": states[0].shape[1], flag: True})
    with made.open(max_num_batched_tokens=32, max_num_seqs=8) as llm:  # the longest prompt in parts
        found = [one.embedding for one in llm.embed(PROMPTS)]
        raw = [one.outputs.data for one in llm.encode(PROMPTS, pooling=name, normalize=False)]
    for vector, same, hidden in zip(found, raw, states, strict=True):
        assert close(vector, oracle(hidden)) and close(same.numpy(), oracle(hidden))


def test_dense_layers_and_normalization_follow_in_their_order(
    folder: Callable[..., Folder], states: list[Any]
) -> None:
    made = folder({"pooling_mode": "mean", "embedding_dimension": states[0].shape[1]})
    first, bias = made.dense("2_Dense", (24, states[0].shape[1]), "Tanh")
    second, none = made.dense("3_Dense", (10, 24), "Identity", bias=False)
    made.add("Dropout")
    made.add("Normalize", "4_Normalize")
    assert none is None
    expected = []
    for hidden in states:
        y = second @ np.tanh(first @ hidden.mean(0) + bias)
        expected.append(y / np.linalg.norm(y))
    with made.open() as llm:
        found = [one.embedding for one in llm.embed(PROMPTS)]
        assert all(close(a, b) for a, b in zip(found, expected, strict=True))
        encoded = llm.encode(PROMPTS)
        assert all(close(a.outputs.data.numpy(), b) for a, b in zip(encoded, expected, strict=True))
        [score] = llm.score(PROMPTS[0], PROMPTS[1])
        assert abs(score.score - expected[0] @ expected[1]) < 1e-4
        last = llm.encode(PROMPTS[:1], pooling="last", normalize=False)
        assert close(last[0].outputs.data.numpy(), states[0][-1])

    async def later() -> list[Any]:
        async with AsyncLLM(made.path, **OPTIONS) as llm:
            return [one.embedding for one in await llm.embed(PROMPTS)]

    assert asyncio.run(later()) == found
    theirs = VLLM(str(made.path), max_model_len=256)
    assert np.dot(theirs.embed(PROMPTS)[0].outputs.embedding, expected[0]) > 0.9999


@pytest.mark.parametrize("name", ["ReLU", "Sigmoid", "SiLU", "GELU"])
def test_other_activations_are_those_of_torch(
    name: str, folder: Callable[..., Folder], states: list[Any]
) -> None:
    made = folder()
    weight, bias = made.dense("2_Dense", (8, states[0].shape[1]), name)
    with made.open() as llm:
        found = llm.embed(PROMPTS[0])[0].embedding
    y = torch.from_numpy(weight @ states[0].mean(0) + bias)
    assert close(found, getattr(torch.nn, name)()(y).numpy())


def test_several_poolings_are_joined_in_the_order_of_sentence_transformers(
    folder: Callable[..., Folder], states: list[Any]
) -> None:
    flags = {MODES[name][0]: True for name in ("last", "weightedmean", "mean_sqrt_len", "mean")}
    made = folder({**flags, "pooling_mode_max_tokens": True, "pooling_mode_cls_token": True})
    order = ("cls", "max", "mean", "mean_sqrt_len", "weightedmean", "last")
    with made.open() as llm:
        found = [one.embedding for one in llm.embed(PROMPTS)]
    for vector, hidden in zip(found, states, strict=True):
        assert close(vector, np.concatenate([MODES[name][1](hidden) for name in order]))
    made.write("1_Pooling/config.json", {"pooling_mode": ["lasttoken", "mean_sqrt_len_tokens"]})
    with made.open() as llm:
        [found] = [one.embedding for one in llm.embed(PROMPTS[0])]
    joined = [MODES[name][1](states[0]) for name in ("last", "mean_sqrt_len")]
    assert close(found, np.concatenate(joined))


def test_a_pooling_without_a_mode_is_the_mean(
    folder: Callable[..., Folder], states: list[Any]
) -> None:
    with folder({"word_embedding_dimension": states[0].shape[1]}).open() as llm:
        assert close(llm.embed(PROMPTS[0])[0].embedding, states[0].mean(0))


def test_a_layer_norm_is_that_of_torch(folder: Callable[..., Folder], states: list[Any]) -> None:
    made, size = folder(), states[0].shape[1]
    norm = torch.nn.LayerNorm(size)
    with torch.no_grad():
        norm.weight.copy_(torch.linspace(0.5, 2, size))
        norm.bias.copy_(torch.linspace(-1, 1, size))
    made.add("LayerNorm", "2_LayerNorm", dimension=size)
    tensors = {f"norm.{name}": value.detach() for name, value in norm.named_parameters()}
    save_file(tensors, made.path / "2_LayerNorm" / "model.safetensors")
    with made.open() as llm:
        found = llm.embed(PROMPTS[0])[0].embedding
    expected = norm(torch.from_numpy(states[0].mean(0)).float())
    assert close(found, expected.detach().numpy())


def test_a_prompt_that_is_not_pooled_leaves_its_tokens_out(folder: Callable[..., Folder]) -> None:
    made = folder({"pooling_mode": ["cls", "mean", "weightedmean"], "include_prompt": False})
    settings = {"prompts": {"q": "ask: "}, "default_prompt_name": "q"}
    made.write("config_sentence_transformers.json", settings)
    with made.open() as llm:
        [found] = llm.embed("hello world")
        [plain] = llm.embed({"prompt_token_ids": found.prompt_token_ids})
        rows = llm.encode("ask: hello world", pooling="token", normalize=False)[0].outputs.data
        skip = len(llm.get_tokenizer().encode("ask: "))
    hidden, size = rows.double().numpy(), rows.shape[1]
    used, weights = hidden[skip:], np.arange(skip + 1, len(hidden) + 1)[:, None]
    expected = [used[0], used.mean(0), (used * weights).sum(0) / weights.sum()]
    assert close(found.embedding, np.concatenate(expected))
    assert close(plain.embedding[size : 2 * size], hidden.mean(0))


def test_a_prompt_is_chosen_by_name_or_given(folder: Callable[..., Folder]) -> None:
    made = folder()
    prompts = {"query": "ask: ", "document": "", "passage": "text: "}
    made.write("config_sentence_transformers.json", {"prompts": prompts})
    with made.open() as llm:
        for asked, text in (
            ({}, "hello"),
            ({"prompt_name": "query"}, "ask: hello"),
            ({"prompt_name": "passage"}, "text: hello"),
            ({"prompt": "any "}, "any hello"),
        ):
            [found], [expected] = llm.embed("hello", **asked), llm.embed(text)
            assert found.prompt_token_ids == expected.prompt_token_ids
            [same] = llm.encode("hello", pooling="mean", **asked)
            assert same.prompt_token_ids == found.prompt_token_ids
        [asked], [read] = llm.embed("hi", prompt_name="query"), llm.embed("there")
        [ranked] = llm.rerank("hi", ["there"])
        cosine = np.dot(asked.embedding, read.embedding) / (
            np.linalg.norm(asked.embedding) * np.linalg.norm(read.embedding)
        )
        assert abs(ranked.relevance_score - cosine) < 1e-5
        with pytest.raises(RequestError, match=r"one of 'document', 'passage', 'query'.*found 'x'"):
            llm.embed("hello", prompt_name="x")
        with pytest.raises(RequestError, match="expected texts to put the prompt before"):
            llm.embed(PROMPTS, prompt_name="query")
    with folder_without(made).open() as llm:
        with pytest.raises(RequestError, match=r"prompt_name: expected none.*prompt=TEXT"):
            llm.embed("hello", prompt_name="query")
        [found], [expected] = llm.embed("hello", prompt="ask: "), llm.embed("ask: hello")
        assert found.embedding == expected.embedding


def folder_without(made: Folder) -> Folder:
    """The folder without its prompts."""
    (made.path / "config_sentence_transformers.json").unlink()
    return made


def test_texts_longer_than_the_model_was_trained_for_are_refused_or_cut(
    folder: Callable[..., Folder],
) -> None:
    made = folder()
    made.write("sentence_bert_config.json", {"max_seq_length": 6, "do_lower_case": False})
    text = "one two three four five six seven eight"
    with made.open() as llm:
        with pytest.raises(RequestError, match=r"trained for texts of 6 .max_seq_length"):
            llm.embed(text)
        ids = llm.get_tokenizer().encode(text)
        [cut], [whole] = (
            llm.embed(text, truncate_prompt_tokens=-1),
            llm.embed(text, truncate_prompt_tokens=200),
        )
        assert (cut.prompt_token_ids, whole.prompt_token_ids) == (ids[:6], ids)
        assert len(llm.encode(text, pooling="mean")[0].prompt_token_ids) == len(ids)


def test_texts_are_read_in_lower_case_where_the_files_say_so(folder: Callable[..., Folder]) -> None:
    made = folder()
    made.write("sentence_bert_config.json", {"do_lower_case": True})
    with made.open() as llm:
        found = llm.embed(["Hello WORLD", {"prompt": "Hello WORLD"}], prompt="ASK ")
        [expected] = llm.embed("ask hello world")
    assert [one.prompt_token_ids for one in found] == [expected.prompt_token_ids] * 2


@pytest.mark.parametrize("kind", ["dot", "euclidean", "manhattan"])
def test_scores_are_the_similarity_of_the_files(
    kind: str, folder: Callable[..., Folder], states: list[Any]
) -> None:
    made = folder()
    made.write("config_sentence_transformers.json", {"similarity_fn_name": kind})
    a, b = (hidden.mean(0) for hidden in states[:2])
    expected = {
        "dot": a @ b,
        "euclidean": -np.linalg.norm(a - b),
        "manhattan": -np.abs(a - b).sum(),
    }[kind]
    with made.open() as llm:
        [score] = llm.score(PROMPTS[0], PROMPTS[1])
    assert abs(score.score - expected) < 2e-4 * abs(expected)


def test_a_model_of_late_interaction_has_a_vector_for_each_token(
    folder: Callable[..., Folder], states: list[Any]
) -> None:
    made = folder()
    made.modules.pop()
    weight, _ = made.dense("1_Dense", (12, states[0].shape[1]), "Identity", bias=False)
    tokenizer = tokenizer_from_folder(made.path)
    assert tokenizer is not None
    skipped = tokenizer.encode("[D] a, b")[-1]
    settings = {
        "query_prefix": "[Q] ",
        "document_prefix": "[D] ",
        "skiplist_words": [tokenizer.id_to_token(skipped)],
        "similarity_fn_name": "MaxSim",
    }
    made.write("config_sentence_transformers.json", settings)

    def units(hidden: Any) -> Any:
        rows = hidden @ weight.T
        return rows / np.linalg.norm(rows, axis=1, keepdims=True)

    with made.open() as llm:
        for options in ({}, {"pooling": "token"}):
            found = llm.encode(PROMPTS, **options)
            for one, hidden in zip(found, states, strict=True):
                assert close(one.outputs.data.numpy(), units(hidden))
        with pytest.raises(RequestError, match="a vector for each token"):
            llm.embed("hello")
        query = llm.encode("hi", prompt_name="query", normalize=False)[0]
        document = llm.encode("a, b", prompt_name="document", normalize=False)[0]
        [score] = llm.score("hi", "a, b")
    kept = [token != skipped for token in document.prompt_token_ids]
    assert not all(kept)
    products = query.outputs.data.double() @ document.outputs.data.double()[kept].T
    assert abs(score.score - float(products.amax(1).sum())) < 1e-4 * abs(score.score)
    made.write("config_sentence_transformers.json", {**settings, "do_query_expansion": True})
    with made.open() as llm, pytest.raises(RequestError, match="do_query_expansion"):
        llm.score("hi", "a, b")


def test_vectors_of_any_length_have_cosines(
    folder: Callable[..., Folder], states: list[Any]
) -> None:
    with folder().open() as llm:
        [score] = llm.score(PROMPTS[0], PROMPTS[1])
        [unit] = llm.encode(PROMPTS[:1])
    a, b = (hidden.mean(0) for hidden in states[:2])
    assert abs(score.score - a @ b / np.linalg.norm(a) / np.linalg.norm(b)) < 1e-4
    assert abs(float(unit.outputs.data.norm()) - 1) < 1e-5


def test_a_default_prompt_is_put_before_texts(folder: Callable[..., Folder]) -> None:
    made = folder()
    settings = {"prompts": {"query": "ask: ", "doc": ""}, "default_prompt_name": "query"}
    made.write("config_sentence_transformers.json", settings)
    with made.open() as llm:
        ids = llm.get_tokenizer().encode("ask: hello")
        found = [*llm.embed(["hello", {"prompt": "hello"}, {"prompt_token_ids": ids}])]
    assert [one.prompt_token_ids for one in found] == [ids] * 3
    made.write("config_sentence_transformers.json", {**settings, "default_prompt_name": "x"})
    with pytest.raises(CheckpointError, match=r"default_prompt_name: expected one of .*found 'x'"):
        made.open()


UNSUPPORTED: dict[str, tuple[Callable[[Folder], object], str]] = {
    "module": (
        lambda made: made.add("CNN", "2_CNN"),
        "module 'CNN': expected Pooling, Dense",
    ),
    "no pooling": (
        lambda made: made.write("1_Pooling/config.json", {"pooling_mode_mean_tokens": False}),
        "expected modes of .*, found none",
    ),
    "new mode": (
        lambda made: made.write("1_Pooling/config.json", {"pooling_mode": "best"}),
        "found best",
    ),
    "no second module": (lambda made: made.modules.pop(), "Pooling as the second module"),
    "other order": (lambda made: made.modules.reverse(), "Transformer as the first module"),
    "activation": (
        lambda made: made.dense("2_Dense", (4, 64), "Mish"),
        "activation_function: expected one of Identity, .*found 'Mish'",
    ),
    "pickle": (
        lambda made: (
            made.dense("2_Dense", (4, 64), "Tanh"),
            (made.path / "2_Dense" / "model.safetensors").unlink(),
        ),
        "must be a safetensors file",
    ),
    "similarity": (
        lambda made: made.write(
            "config_sentence_transformers.json", {"similarity_fn_name": "hamming"}
        ),
        "similarity_fn_name: expected one of cosine, dot, euclidean, manhattan, found 'hamming'",
    ),
    "residual": (
        lambda made: made.add(
            "Dense", "2_Dense", in_features=64, out_features=64, use_residual=True
        ),
        "use_residual: expected false, found true",
    ),
}


@pytest.mark.parametrize("name", UNSUPPORTED)
def test_what_is_not_supported_is_refused_where_embeddings_are_asked_for(
    name: str, folder: Callable[..., Folder]
) -> None:
    change, message = UNSUPPORTED[name]
    made = folder()
    change(made)
    with made.open() as llm:
        for call in (lambda: llm.embed("a"), lambda: llm.encode("a"), lambda: llm.score("a", "b")):
            with pytest.raises(UnsupportedError, match=message):
                call()
        assert len(llm.encode("a", pooling="mean")) == 1
        assert llm.generate("a")[0].finished


DAMAGED: dict[str, tuple[Callable[[Folder], object], str]] = {
    "not a list": (lambda made: setattr(made, "modules", {"a": 1}), "expected a list of modules"),
    "no type": (lambda made: made.modules.append({"path": ""}), "expected a type and a path"),
    "another folder": (
        lambda made: made.add("Normalize", "../x"),
        "expected the name of a folder, found '../x'",
    ),
    "width": (
        lambda made: made.write(
            "1_Pooling/config.json",
            {"pooling_mode_mean_tokens": True, "word_embedding_dimension": 3},
        ),
        "word_embedding_dimension: expected 64, found 3",
    ),
    "input width": (lambda made: made.dense("2_Dense", (4, 5), "Tanh"), "in_features: expected 64"),
    "shapes": (
        lambda made: (
            made.dense("2_Dense", (4, 64), "Tanh"),
            save_file(
                {"linear.weight": torch.zeros(4, 3)},
                made.path / "2_Dense" / "model.safetensors",
            ),
        ),
        "model.safetensors: expected .*found",
    ),
    "norm width": (
        lambda made: made.add("LayerNorm", "2_LayerNorm", dimension=3),
        "dimension: expected 64, found 3",
    ),
    "length": (
        lambda made: made.write("sentence_bert_config.json", {"max_seq_length": 0}),
        "max_seq_length: expected a positive integer, found 0",
    ),
    "prompts": (
        lambda made: made.write("config_sentence_transformers.json", {"prompts": ["a"]}),
        "prompts: expected texts by name",
    ),
    "words to skip": (
        lambda made: (
            made.modules.pop(),
            made.dense("1_Dense", (4, 64), "Identity"),
            made.write("config_sentence_transformers.json", {"skiplist_words": [1]}),
        ),
        "skiplist_words: expected texts",
    ),
    "size": (
        lambda made: made.modules.append({"type": "x" * (1 << 20), "path": ""}),
        "modules.json: larger than 1 MiB",
    ),
}


@pytest.mark.parametrize("name", DAMAGED)
def test_damaged_modules_are_named(name: str, folder: Callable[..., Folder]) -> None:
    change, message = DAMAGED[name]
    made = folder()
    change(made)
    with pytest.raises(CheckpointError, match=message):
        made.open()


@pytest.mark.parametrize(
    ("kind", "mode"), [(1, "mean"), (2, "cls"), (3, "last"), (0, "last"), (4, "last")]
)
def test_a_gguf_file_names_its_pooling(kind: int, mode: str, tmp_path: Path) -> None:
    file = gguf_of(tiny("llama", tie_word_embeddings=False), {"pooling_type": (U32, kind)})
    path = save_gguf(tmp_path / "m.gguf", file)
    prompts = [{"prompt_token_ids": [5, 17, 80, 3]}]
    with LLM(path, skip_tokenizer_init=True, max_model_len=64) as llm:
        [found] = llm.embed(prompts)
        [expected] = llm.encode(prompts, pooling=mode)  # type: ignore[arg-type]
        assert llm.load_warnings == ()
    assert np.allclose(found.embedding, expected.outputs.data.numpy(), atol=1e-6)


def test_sums_do_not_depend_on_where_a_prompt_was_cut() -> None:
    rows = torch.from_numpy(np.random.default_rng(0).normal(size=(9, 4)).astype(np.float32))
    for mode in ("mean", "weightedmean", "mean_sqrt_len"):
        whole, parts = (Pooler(Pooling(mode, False)) for _ in range(2))
        whole.add(rows)
        for part in (rows[:2], rows[2:3], rows[3:]):
            parts.add(part)
        assert torch.equal(whole.result(), parts.result())
