"""Tiny encoders of transformers' classes, with a WordPiece tokenizer, in folders."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
import transformers
from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, processors

WORDS = [
    *("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "bees", "make", "honey", ".", "the", "shop"),
    *("opens", "at", "nine", "##s", "a", "b", "c"),
]
SIZES = {
    "vocab_size": len(WORDS),
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 40,
}


def write_tokenizer(folder: Path) -> None:
    """A WordPiece tokenizer that frames texts and pairs as BERT does."""
    made = Tokenizer(models.WordPiece({w: i for i, w in enumerate(WORDS)}, unk_token="[UNK]"))
    made.normalizer = normalizers.BertNormalizer()
    made.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    made.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]",
        pair="[CLS] $A [SEP] $B:1 [SEP]:1",
        special_tokens=[("[CLS]", 2), ("[SEP]", 3)],
    )
    made.add_special_tokens(WORDS[:5])
    made.save(str(folder / "tokenizer.json"))


def build(folder: Path, name: str, labels: int, **config: Any) -> Any:
    """A tiny model of transformers' class ``name`` in a folder, with weights of order 1."""
    torch.manual_seed(7)
    model_class = getattr(transformers, name)
    settings = {**SIZES, "num_labels": labels, "pad_token_id": 0, **config}
    model = model_class(model_class.config_class(**settings)).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.2)
    model.save_pretrained(folder)
    write_tokenizer(folder)
    return model


def add_modules(folder: Path, **settings: Any) -> None:
    """Make an encoder's folder one of sentence-transformers: mean of the tokens, length 1."""
    kinds = (("Transformer", ""), ("Pooling", "1_Pooling"), ("Normalize", "2_Normalize"))
    modules = [
        {"idx": i, "name": str(i), "path": path, "type": f"sentence_transformers.models.{kind}"}
        for i, (kind, path) in enumerate(kinds)
    ]
    (folder / "1_Pooling").mkdir()
    for name, value in (
        ("modules.json", modules),
        ("1_Pooling/config.json", {"pooling_mode_mean_tokens": True}),
        ("config_sentence_transformers.json", settings),
    ):
        (folder / name).write_text(json.dumps(value))
