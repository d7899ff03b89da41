"""Classifiers and rerankers that are encoders: logits are those of transformers."""

from __future__ import annotations

import inspect
import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer

from sdk import LLM, CheckpointError, RequestError, UnsupportedError
from tests.gguf_models import BOOL, F32, STRING, U32, save_gguf
from tests.loaders.conftest import GgufBytes
from tests.tiny_encoders import build

EXACT: dict[str, Any] = {"compute": "exact", "num_threads": 1}
QUERY, DOCUMENTS = "the shop opens", ["bees make honey .", "at nine", "a b c " * 4]


def logits(model: Any, ids: Any, second: int | None = None) -> Any:
    types = {}
    if second is not None and "token_type_ids" in inspect.signature(model.forward).parameters:
        types["token_type_ids"] = torch.tensor([[int(i >= second) for i in range(len(ids))]])
    with torch.inference_mode():
        return model(torch.tensor([ids]), **types).logits[0].numpy()


_LONGER = {"max_position_embeddings": 60}  # those after the padding's
_DISTIL = {"dim": 32, "hidden_dim": 48, "n_layers": 2, "n_heads": 4}
_MODERN = {
    "num_hidden_layers": 4,
    "local_attention": 6,
    "cls_token_id": 2,
    "sep_token_id": 3,
    "bos_token_id": None,
    "eos_token_id": None,
}
#: Class and options; the heads of texts differ in layers, activation, norm and pooling.
CLASSES: dict[str, tuple[str, dict[str, Any]]] = {
    "bert": ("BertForSequenceClassification", {}),
    "roberta": ("RobertaForSequenceClassification", _LONGER),
    "xlm-roberta": ("XLMRobertaForSequenceClassification", {**_LONGER, "pad_token_id": 1}),
    "camembert": ("CamembertForSequenceClassification", {**_LONGER, "pad_token_id": 1}),
    "electra": ("ElectraForSequenceClassification", {"embedding_size": 16}),
    "distilbert": ("DistilBertForSequenceClassification", _DISTIL),
    "modernbert": ("ModernBertForSequenceClassification", _MODERN),
    "modernbert, mean": (
        "ModernBertForSequenceClassification",
        {**_MODERN, "classifier_pooling": "mean", "classifier_activation": "silu"},
    ),
    "mpnet": ("MPNetForSequenceClassification", {**_LONGER, "pad_token_id": 1}),
    "gte": ("GteForSequenceClassification", {"type_vocab_size": 2}),
    "nomic": ("NomicBertForSequenceClassification", {}),
    "jina v3": ("JinaEmbeddingsV3ForSequenceClassification", {"type_vocab_size": 1}),
    "eurobert, late": ("EuroBertForSequenceClassification", {"num_key_value_heads": 2}),
    "eurobert, mean": ("EuroBertForSequenceClassification", {"classifier_pooling": "mean"}),
    "eurobert, bos": ("EuroBertForSequenceClassification", {"classifier_pooling": "bos"}),
    "tokens, mpnet": ("MPNetForTokenClassification", {**_LONGER, "pad_token_id": 1}),
    "tokens, gte": ("GteForTokenClassification", {"type_vocab_size": 0}),
    "tokens, nomic": ("NomicBertForTokenClassification", {}),
    "tokens, jina v3": ("JinaEmbeddingsV3ForTokenClassification", {}),
    "tokens, eurobert": ("EuroBertForTokenClassification", {}),
    "tokens, roberta": ("RobertaForTokenClassification", _LONGER),
    "tokens, distilbert": ("DistilBertForTokenClassification", _DISTIL),
    "tokens, modernbert": ("ModernBertForTokenClassification", _MODERN),
}


@pytest.mark.quick_cases(4)
@pytest.mark.parametrize("name", CLASSES)
def test_classes_of_an_encoder_are_those_of_transformers(name: str, tmp_path: Path) -> None:
    labels = 1 if name == "bert" else 3
    kind, options = CLASSES[name]
    model = build(tmp_path, kind, labels, **options)
    with LLM(tmp_path, **EXACT) as llm:
        assert llm.load_warnings == ()
        raw = llm.classify(DOCUMENTS, use_activation=False)
        found = llm.classify(DOCUMENTS)
        for one, plain in zip(found, raw, strict=True):
            expected = logits(model, one.prompt_token_ids)
            assert np.allclose(plain.probs, expected, rtol=0, atol=1e-4 * np.abs(expected).max())
            wanted = torch.from_numpy(expected)
            wanted = wanted.sigmoid() if labels == 1 else wanted.softmax(-1)
            assert np.allclose(one.probs, wanted.numpy(), atol=1e-4)
        with pytest.raises(RequestError):
            llm.generate("the shop")


def test_a_reranker_with_jina_s_names_of_an_xlm_roberta(tmp_path: Path) -> None:
    """As jina-reranker-v2-base-multilingual is published: transformers' model, renamed."""
    kind, options = CLASSES["xlm-roberta"]
    model = build(tmp_path, kind, 1, **options)
    names = {
        ".encoder.layer.": ".encoder.layers.",
        ".embeddings.LayerNorm.": ".emb_ln.",
        ".attention.output.dense.": ".mixer.out_proj.",
        ".attention.output.LayerNorm.": ".norm1.",
        ".intermediate.dense.": ".mlp.fc1.",
        ".output.dense.": ".mlp.fc2.",
        ".output.LayerNorm.": ".norm2.",
    }
    state: dict[str, torch.Tensor] = {}
    given = load_file(tmp_path / "model.safetensors")
    for name, values in given.items():
        for theirs, own in names.items():
            name = name.replace(theirs, own)
        path, query, suffix = name.partition(".attention.self.query.")
        if query:
            stem = path.replace(".layers.", ".layer.") + ".attention.self."
            parts = [given[f"{stem}{part}.{suffix}"] for part in ("query", "key", "value")]
            state[f"{path}.mixer.Wqkv.{suffix}"] = torch.cat(parts)
        elif ".attention.self." not in name:
            state[name] = values
    save_file(state, tmp_path / "model.safetensors", {"format": "pt"})
    code = "jinaai/jina-reranker-v2-base-multilingual--modeling.XLMRobertaFlashForClassification"
    change(tmp_path, auto_map={"AutoModel": code}, use_flash_attn=True)
    with LLM(tmp_path, **EXACT) as llm:
        assert llm.load_warnings == ()
        [found] = llm.classify(DOCUMENTS[0], use_activation=False)
    expected = logits(model, found.prompt_token_ids)
    assert np.allclose(found.probs, expected, rtol=0, atol=1e-4 * np.abs(expected).max())


def test_a_cross_encoder_reads_pairs_with_token_types(tmp_path: Path) -> None:
    model = build(tmp_path, "BertForSequenceClassification", 1)
    with LLM(tmp_path, **EXACT) as llm:
        found = [one.score for one in llm.score(QUERY, DOCUMENTS)]
        alone = [llm.score(QUERY, document)[0].score for document in DOCUMENTS]
        ranked = llm.rerank(QUERY, DOCUMENTS, 2)
        tokenizer = Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
        expected = []
        for document in DOCUMENTS:
            pair = tokenizer.encode(QUERY, document)
            [value] = logits(model, pair.ids, pair.type_ids.index(1))
            expected.append(1 / (1 + np.exp(-float(value))))
        assert np.allclose(found, expected, atol=1e-5) and found == alone
        order = sorted(range(3), key=lambda index: -found[index])[:2]
        assert [one.index for one in ranked] == order
        with pytest.raises(RequestError, match="context holds 40"):
            llm.score(QUERY, "a b c " * 20)
        [cut] = llm.score(QUERY, "a b c " * 20, truncate_prompt_tokens=-1)
        pair = tokenizer.encode(QUERY, "a b c " * 20)
        ids = [*pair.ids[:39], 3]
        [value] = logits(model, ids, pair.type_ids.index(1))
        assert abs(cut.score - 1 / (1 + np.exp(-float(value)))) < 1e-5


def test_tokens_are_classified(tmp_path: Path) -> None:
    labels = {0: "O", 1: "B", 2: "I"}
    model = build(tmp_path, "BertForTokenClassification", 3, id2label=labels)
    with LLM(tmp_path, **EXACT) as llm:
        [found] = llm.classify(DOCUMENTS[0])
        [raw] = llm.classify(DOCUMENTS[0], use_activation=False)
        with pytest.raises(RequestError, match="classifies the tokens"):
            llm.rerank(QUERY, DOCUMENTS)
    expected = logits(model, found.prompt_token_ids)
    assert np.allclose(raw.probs, expected, rtol=0, atol=1e-4 * np.abs(expected).max())
    assert np.allclose(found.probs, torch.from_numpy(expected).softmax(1).numpy(), atol=1e-4)
    assert found.label == [labels[i] for i in expected.argmax(1)] and found.num_classes == 3


@pytest.mark.parametrize(
    ("key", "value", "activation"),
    [
        ("sentence_transformers", {"activation_fn": "torch.nn.modules.linear.Identity"}, "none"),
        ("sentence_transformers", {"activation_fn": "torch.nn.Sigmoid"}, "sigmoid"),
        ("sbert_ce_default_activation_function", "torch.nn.modules.linear.Identity", "none"),
        ("problem_type", "regression", "none"),
    ],
)
def test_the_activation_of_a_cross_encoder_is_the_config_s(
    key: str, value: Any, activation: str, tmp_path: Path
) -> None:
    model = build(tmp_path, "BertForSequenceClassification", 1)
    change(tmp_path, **{key: value})
    with LLM(tmp_path, **EXACT) as llm:
        [found] = llm.score(QUERY, DOCUMENTS[0])
    pair = Tokenizer.from_file(str(tmp_path / "tokenizer.json")).encode(QUERY, DOCUMENTS[0])
    [value] = logits(model, pair.ids, pair.type_ids.index(1))
    expected = float(value) if activation == "none" else 1 / (1 + np.exp(-float(value)))
    assert abs(found.score - expected) < 1e-4


def change(folder: Path, **values: Any) -> None:
    file = folder / "config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), **values}))


BAD: dict[str, tuple[Callable[[Path], object], str]] = {
    "activation": (
        lambda folder: change(
            folder, sentence_transformers={"activation_fn": "torch.nn.Tanhshrink"}
        ),
        "activation_fn: expected one of Identity, Sigmoid, Softmax",
    ),
    "labels": (
        lambda folder: change(folder, id2label={"0": "a", "1": "b"}),
        r"classifier.weight: expected shape \[2, 32\], as the config says, found \[1, 32\]",
    ),
    "bias": (
        lambda folder: save_file(
            {**load_file(folder / "model.safetensors"), "classifier.bias": torch.zeros(3)},
            folder / "model.safetensors",
            {"format": "pt"},
        ),
        r"classifier.bias: expected shape \[1\], found \[3\]",
    ),
}


def test_an_activation_of_a_head_that_is_not_known_is_named(tmp_path: Path) -> None:
    kind, options = CLASSES["modernbert"]
    build(tmp_path, kind, 2, **options)
    change(tmp_path, classifier_activation="mish")
    with pytest.raises(UnsupportedError, match="classifier_activation: expected one of gelu"):
        LLM(tmp_path, **EXACT)


@pytest.mark.parametrize("name", BAD)
def test_a_head_that_contradicts_the_config_is_named(name: str, tmp_path: Path) -> None:
    build(tmp_path, "BertForSequenceClassification", 1)
    damage, message = BAD[name]
    damage(tmp_path)
    with pytest.raises((CheckpointError, UnsupportedError), match=message):
        LLM(tmp_path, **EXACT)


def test_a_head_that_is_missing_is_named(tmp_path: Path) -> None:
    build(tmp_path, "BertModel", 1)
    change(tmp_path, architectures=["BertForSequenceClassification"])
    with pytest.raises(CheckpointError, match=r"no tensor classifier.weight"):
        LLM(tmp_path, **EXACT)


#: Parts of RoBERTa's and DistilBERT's tensors, and llama.cpp's names for them.
_GGUF_NAMES = {
    "embeddings.word_embeddings": "token_embd",
    "embeddings.position_embeddings": "position_embd",
    "embeddings.token_type_embeddings": "token_types",
    "embeddings.LayerNorm": "token_embd_norm",
    "attention.self.query": "attn_q",
    "attention.self.key": "attn_k",
    "attention.self.value": "attn_v",
    "attention.output.dense": "attn_output",
    "attention.output.LayerNorm": "attn_output_norm",
    "intermediate.dense": "ffn_up",
    "output.LayerNorm": "layer_output_norm",
    "output.dense": "ffn_down",
    "attention.q_lin": "attn_q",
    "attention.k_lin": "attn_k",
    "attention.v_lin": "attn_v",
    "attention.out_lin": "attn_output",
    "sa_layer_norm": "attn_output_norm",
    "ffn.lin1": "ffn_up",
    "ffn.lin2": "ffn_down",
    "output_layer_norm": "layer_output_norm",
    "classifier.dense": "cls",
    "classifier.out_proj": "cls.output",
    "pre_classifier": "cls",
    "classifier": "cls.output",
}


def gguf(model: Any, path: Path, leave_out: str = "", **more: tuple[int, Any]) -> Path:
    """The file of a classifier as llama.cpp's converter writes it; ``more``: other keys."""
    file = GgufBytes({"general.architecture": (STRING, "bert")})
    facts: dict[str, tuple[int, Any]] = {
        "block_count": (U32, 2),
        "context_length": (U32, 40),
        "embedding_length": (U32, 32),
        "feed_forward_length": (U32, 48),
        "attention.head_count": (U32, 4),
        "attention.layer_norm_epsilon": (F32, 1e-12),
        "attention.causal": (BOOL, False),
        "pooling_type": (U32, 4),
        **{key.replace("__", "."): value for key, value in more.items()},
    }
    for key, value in facts.items():
        file.metadata[f"bert.{key}"] = value
    for name, values in model.state_dict().items():
        stem, _, suffix = name.rpartition(".")
        block = re.search(r"layer\.(\d)\.", stem)
        part = stem[block.end() :] if block else re.sub(r"^(roberta|distilbert|bert)\.", "", stem)
        if part not in _GGUF_NAMES or _GGUF_NAMES[part] == leave_out:
            continue
        place = f"blk.{block[1]}." if block else ""
        rows = (
            values[2:42] if model.config.model_type == "roberta" and "position" in part else values
        )
        data = np.ascontiguousarray(rows.float().numpy(), "<f4")
        tensor = (data.shape[::-1], 0, data.tobytes())
        file.tensors[f"{place}{_GGUF_NAMES[part]}.{suffix}"] = tensor
    return save_gguf(path, file)


@pytest.mark.parametrize("name", ["roberta", "distilbert"])
def test_the_head_of_a_gguf_file_is_that_of_its_folder(name: str, tmp_path: Path) -> None:
    kind, options = CLASSES[name]
    model = build(tmp_path, kind, 2, **{**options, "pad_token_id": 1, "layer_norm_eps": 1e-12})
    ids = [2, *range(5, 17), 3]
    path = gguf(model, tmp_path / "m.gguf")
    with LLM(path, skip_tokenizer_init=True, **EXACT) as llm:
        [found] = llm.classify({"prompt_token_ids": ids}, use_activation=False)
    expected = logits(model, ids)
    assert np.allclose(found.probs, expected, rtol=0, atol=1e-4 * np.abs(expected).max())


def test_a_gguf_file_whose_head_is_not_whole_is_refused(tmp_path: Path) -> None:
    model = build(tmp_path, "RobertaForSequenceClassification", 2, max_position_embeddings=60)
    path = gguf(model, tmp_path / "m.gguf", leave_out="cls")
    with pytest.raises(UnsupportedError, match=r"no tensor cls.weight.*Use the model's folder"):
        LLM(path, skip_tokenizer_init=True, **EXACT)


def test_a_pooling_of_a_gguf_file_that_is_not_known_is_named(tmp_path: Path) -> None:
    model = build(tmp_path, "RobertaForSequenceClassification", 2, max_position_embeddings=60)
    path = gguf(model, tmp_path / "m.gguf", classifier__pooling_type=(U32, 4))
    with pytest.raises(CheckpointError, match=r"pooling_type is 4, expected 1 \(mean\) or 2"):
        LLM(path, skip_tokenizer_init=True, **EXACT)
