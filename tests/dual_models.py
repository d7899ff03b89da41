"""Tiny random dual encoders with tokenizers and processors, and what transformers makes of them."""

from __future__ import annotations

import io
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import sentencepiece
import torch
import transformers
from numpy.typing import NDArray
from tokenizers import Tokenizer, models, pre_tokenizers, trainers
from torch import Tensor

from tests.models.tiny_vision import DUAL, vision_model

Floats = NDArray[np.float32]

#: What tokenizers are trained on.
_CORPUS = [
    *("a photo of a cat", "a photo of a dog", "two red bicycles beside the old house", "a map"),
    *("the invoice of March, with a total of 120 euros", "a screenshot of a spreadsheet", "it's!"),
    *("people who walk through the rain", "an X-ray of a hand", "fresh bread and 3 apples"),
] * 20
TEXTS = ["a photo of a Cat", "It's the INVOICE, of  March!", "x", "two red bicycles, 3 apples"]
_SIZES = {
    "clip": {"size": {"shortest_edge": 56}, "crop_size": {"height": 56, "width": 56}},
    "siglip": {"size": {"height": 56, "width": 56}},
    "siglip2": {"patch_size": 7, "max_num_patches": 40},
}
#: The model of each kind, and the tokenizer.
_KINDS = {
    "clip": ("clip", "clip"),
    "siglip": ("siglip", "siglip"),
    "siglip2": ("siglip", "siglip2"),
    "naflex": ("siglip2", "siglip2"),
}


def write_dual(kind: str, folder: Path, **changes: Any) -> Any:
    """A folder of ``clip``, ``siglip``, ``siglip2`` or ``naflex``; returns transformers' model."""
    own = _KINDS[kind][0]
    folder.mkdir(parents=True, exist_ok=True)
    size, specials = write_tokenizer(kind, folder)
    text = {**DUAL[own]["text_config"], "vocab_size": size, **specials}
    model = vision_model(own, text_config=text, **changes)
    model.save_pretrained(folder)
    settings = {"image_processor_type": _class(own), **_SIZES[own]}
    (folder / "preprocessor_config.json").write_text(json.dumps(settings))
    return model


def _class(own: str) -> str:
    kinds = {"clip": "CLIP", "siglip": "Siglip", "siglip2": "Siglip2"}
    return f"{kinds[own]}ImageProcessor"


def _clip_tokenizer(folder: Path) -> tuple[int, dict[str, int]]:
    """As published: bytes with marks at the ends of words, without tokenizer.json."""
    trained = Tokenizer(models.BPE(end_of_word_suffix="</w>"))
    trained.normalizer = transformers.CLIPTokenizer().backend_tokenizer.normalizer
    trained.pre_tokenizer = transformers.CLIPTokenizer().backend_tokenizer.pre_tokenizer
    trainer = trainers.BpeTrainer(
        vocab_size=700,
        show_progress=False,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        end_of_word_suffix="</w>",
    )
    trained.train_from_iterator(_CORPUS, trainer)
    state = json.loads(trained.to_str())["model"]
    vocab, merges = state["vocab"], state["merges"]
    for letter in pre_tokenizers.ByteLevel.alphabet():
        vocab.setdefault(f"{letter}</w>", len(vocab))
    ends = {"<|startoftext|>": len(vocab), "<|endoftext|>": len(vocab) + 1}
    made = transformers.CLIPTokenizer(
        vocab={**vocab, **ends}, merges=[tuple(one) for one in merges], model_max_length=24
    )
    made.save_pretrained(folder)
    found = {"bos_token_id": ends["<|startoftext|>"], "eos_token_id": ends["<|endoftext|>"]}
    return len(vocab) + 2, found


def _siglip_tokenizer(folder: Path) -> tuple[int, dict[str, int]]:
    """A SentencePiece model as T5 has it, which pads with the end of a text."""
    model = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(_CORPUS),
        model_writer=model,
        vocab_size=150,
        model_type="unigram",
        hard_vocab_limit=False,
        pad_id=0,
        eos_id=1,
        unk_id=2,
        bos_id=-1,
        minloglevel=2,
    )
    (folder / "spiece.model").write_bytes(model.getvalue())
    settings = {
        "tokenizer_class": "SiglipTokenizer",
        "model_max_length": 24,
        "eos_token": "</s>",
        "pad_token": "</s>",
        "unk_token": "<unk>",
        "do_lower_case": True,
        "additional_special_tokens": [],
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    loaded = sentencepiece.SentencePieceProcessor(model_proto=model.getvalue())
    return loaded.get_piece_size(), {"pad_token_id": 1, "eos_token_id": 1}


def _siglip2_tokenizer(folder: Path) -> tuple[int, dict[str, int]]:
    """Gemma's kind of BPE, which pads with a token of its own."""
    trained = Tokenizer(models.BPE(byte_fallback=True, unk_token="<unk>", fuse_unk=True))
    made = transformers.Siglip2Tokenizer()
    trained.normalizer = made.backend_tokenizer.normalizer
    trained.pre_tokenizer = made.backend_tokenizer.pre_tokenizer
    specials = ["<pad>", "<eos>", "<bos>", "<unk>", "<mask>"]
    bytes_ = [f"<0x{byte:02X}>" for byte in range(256)]
    trainer = trainers.BpeTrainer(
        vocab_size=420, show_progress=False, special_tokens=[*specials, *bytes_]
    )
    trained.train_from_iterator(_CORPUS, trainer)
    state = json.loads(trained.to_str())["model"]
    tokenizer = transformers.Siglip2Tokenizer(
        vocab=state["vocab"],
        merges=[tuple(one) for one in state["merges"]],
        padding_side="right",
        model_max_length=24,
    )
    tokenizer.save_pretrained(folder)
    return len(state["vocab"]), {"pad_token_id": 0, "bos_token_id": 2, "eos_token_id": 1}


_TOKENIZERS = {
    "clip": _clip_tokenizer,
    "siglip": _siglip_tokenizer,
    "siglip2": _siglip2_tokenizer,
}


def write_tokenizer(kind: str, folder: Path) -> tuple[int, dict[str, int]]:
    """The files of a tokenizer; returns the size of the vocabulary and the ids for a config."""
    return _TOKENIZERS[_KINDS[kind][1]](folder)


def their_tokenizer(kind: str, folder: Path) -> Any:
    classes = {
        "clip": transformers.CLIPTokenizer,
        "siglip": transformers.SiglipTokenizer,
        "siglip2": transformers.Siglip2Tokenizer,
    }
    return classes[_KINDS[kind][1]].from_pretrained(folder)


def their_texts(kind: str, folder: Path, model: Any, texts: Sequence[str]) -> Tensor:
    """Vectors of length 1, float32 ``[texts, width]``."""
    padding: Any = True if kind == "clip" else "max_length"
    tokenizer = their_tokenizer(kind, folder)
    given = tokenizer(list(texts), padding=padding, truncation=True, return_tensors="pt")
    mask = {"attention_mask": given["attention_mask"]} if kind == "clip" else {}
    with torch.no_grad():
        found = model.get_text_features(input_ids=given["input_ids"], **mask).pooler_output
    return torch.nn.functional.normalize(found, dim=-1)


def their_images(kind: str, model: Any, pictures: Sequence[NDArray[np.uint8]]) -> Tensor:
    """The same of images, uint8 ``[height, width, 3]``."""
    own = _KINDS[kind][0]
    processor = getattr(transformers, f"{_class(own)}Pil")(**_SIZES[own])
    pixels = processor(list(pictures), input_data_format="channels_last", return_tensors="pt")
    with torch.no_grad():
        found = model.get_image_features(**pixels).pooler_output
    return torch.nn.functional.normalize(found, dim=-1)
