"""A GGUF file with the encoder of images of a model ("mmproj"), as llama.cpp's converter writes it.

Its metadata begin with ``clip.``, and say which projector the encoder has. What they mean for a
family is in its ``MmprojRules``. The config that is made from them has the keys of Hugging Face's.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from sdk.kernels.lazy_torch import Tensor, torch
from sdk.kernels.weights.layouts import Dense
from sdk.loaders.formats.gguf_decode import decode_matrix
from sdk.loaders.gguf_files.header import GgufTensor
from sdk.loaders.gguf_files.mmproj_files import beside
from sdk.loaders.gguf_files.reader import GgufFile, read_gguf
from sdk.models.configs.fields import MAX_LAYERS, MAX_WIDTH, Fields
from sdk.models.vision.family import (
    PROCESSOR,
    SHAPES,
    VISION,
    WHOLE,
    Family,
    MmprojRules,
    families,
)
from sdk.models.vision.mmproj_names import LAYER_NAMES, WHOLE_NAMES
from sdk.quant.checkpoint import VISION_ROOT, TensorEntry
from sdk.quant.errors import CheckpointError, UnsupportedError
from sdk.quant.weight import Weight, weight_of

logger = logging.getLogger("sdk")

ARCHITECTURE = "clip"
_LAYER = re.compile(r"v\.blk\.(\d{1,4})\.(.+)")
#: What each picture of a patch is multiplied with, in files of video models.
_FIRST_PICTURE, _SECOND_PICTURE = "v.patch_embd.weight", "v.patch_embd.weight.1"


def open_beside(file: Path, text: GgufFile, config: Mapping[str, Any]) -> Mmproj | None:
    """The mmproj beside the file of a model that fits it; ``None``: there is none."""
    reasons = []
    for path in beside(file):
        try:
            return Mmproj(path, text, config)
        except (CheckpointError, UnsupportedError) as error:
            reasons.append(str(error))
    for reason in reasons:
        logger.warning("not used for images: %s", reason)
    return None


class Mmproj:
    """An opened file; its tensors have our names, ``vision.…``.

    ``text``, ``config``: the file of the text model and its config.

    :raises CheckpointError: the file is damaged or belongs to another model.
    :raises UnsupportedError: it holds something that is not supported.
    """

    def __init__(self, path: Path, text: GgufFile, config: Mapping[str, Any]) -> None:
        self.path = path
        self._file = read_gguf(path)
        try:
            self._family, self._rules = self._found()
            self._check_text(config)
            clip = "clip.vision."
            self.keys = Fields(
                {
                    key.removeprefix(root): _plain(value)
                    for root in ("clip.", clip)
                    for key, value in self._file.metadata.items()
                    if key.startswith(root)
                }
                | {SHAPES: {name: own.shape for name, own in self._file.tensors.items()}},
                f"{path}: {clip[:-1]}",
            )
            self._check_width(config)
            token = self._token(text)
            self._names = self._our_names()
            vision, whole = self._rules.config(self._common(), self.keys, config)
        except (CheckpointError, UnsupportedError):
            self._file.close()
            raise
        #: Keys of Hugging Face's preprocessor_config.json.
        self.processor: dict[str, Any] = {
            "image_mean": self.keys.values.get("image_mean"),
            "image_std": self.keys.values.get("image_std"),
            **self._rules.processor(self.keys),
        }
        sections = _sections(text)
        #: What a config of Hugging Face has beside the text part.
        self.config: dict[str, Any] = {
            VISION: vision,
            WHOLE: {
                **whole,
                "image_token_id": token,
                PROCESSOR: self.processor,
                **({} if sections is None else {"mrope_section": sections}),
            },
        }
        self._pulled: set[str] = set()
        self.on_read: Callable[[int], None] = lambda nbytes: None

    @property
    def nbytes(self) -> int:
        """Of all tensors."""
        return sum(tensor.nbytes for tensor in self._file.tensors.values())

    def has(self, name: str) -> bool:
        """Whether it has a matrix or tensor ``name``."""
        return name in self._names or f"{name}.weight" in self._names

    def weight(self, name: str) -> Weight:
        """One matrix, packed as in the file."""
        stored = self._find(f"{name}.weight")
        if len(stored.shape) != 2:
            raise self._fail(stored, f"expected a matrix, found shape {list(stored.shape)}")
        layout = self._layout(stored)
        if self._rules.interleaved_qk and name.endswith(("q_proj", "k_proj")):
            return weight_of(layout).with_rows(self._halves_apart(stored))
        if name.removeprefix(VISION_ROOT) not in self._rules.turned:
            return weight_of(layout)
        return weight_of(Dense(weight_of(layout).dequantize().t().contiguous()))

    def tensor(self, name: str) -> Tensor:
        """One tensor, float32."""
        stored = self._find(name)
        found = weight_of(self._layout(stored)).dequantize().reshape(stored.shape)
        second = self._file.tensors.get(_SECOND_PICTURE)
        if stored.name == _FIRST_PICTURE and second is not None:
            other = weight_of(self._layout(second)).dequantize().reshape(second.shape)
            if other.shape != found.shape:
                raise self._fail(second, f"expected shape {list(stored.shape)}")
            found = torch.stack([found, other], dim=2)
        return found

    def entries(self) -> list[TensorEntry]:
        """All tensors that it has a use for, under our names."""
        by_file = {entry.name: entry for entry in self._file.entries()}
        return [replace(by_file[theirs], name=ours) for ours, theirs in self._names.items()]

    def unused(self) -> list[str]:
        """Tensors that have not been pulled, if any has been: a model may be loaded for text. A
        norm behind the layer that the text reads has no use."""
        norm = WHOLE_NAMES["norm"] + "."
        return [
            name
            for name in self._file.tensors
            if self._pulled
            and name not in self._pulled
            and name not in self._rules.unused
            and (self._family.norm_after or not name.startswith(norm))
        ]

    def close(self) -> None:
        """Close the file."""
        self._file.close()

    # -- inside --------------------------------------------------------------------------------

    def _found(self) -> tuple[Family, MmprojRules]:
        metadata = self._file.metadata
        kind = metadata.get("general.architecture")
        if kind != ARCHITECTURE:
            raise CheckpointError(
                f"{self.path}: general.architecture: expected {ARCHITECTURE!r}, the encoder of "
                f"images of a model (mmproj), found {str(kind)[:80]!r}"
            )
        if metadata.get("clip.has_vision_encoder") is not True:
            raise UnsupportedError(
                f"{self.path}: clip.has_vision_encoder: expected true, found "
                f"{metadata.get('clip.has_vision_encoder')!r}: files for sound alone are not "
                "supported"
            )
        key = "clip.projector_type"
        if key not in metadata:  # files with an encoder of sound, too
            key = "clip.vision.projector_type"
        known = {
            name: (own, own.mmproj)
            for own in families()
            if own.mmproj is not None
            for name in own.mmproj.projectors
        }
        found = metadata.get(key)
        if found not in known:
            raise UnsupportedError(
                f"{self.path}: {key}: expected one of {', '.join(sorted(known))}, found "
                f"{str(found)[:80]!r}: its images are not supported; "
                "limit_mm_per_prompt={'image': 0} opens the text alone"
            )
        return known[found]

    def _check_text(self, config: Mapping[str, Any]) -> None:
        model_type = config.get("model_type")
        if model_type not in self._rules.text:
            raise CheckpointError(
                f"{self.path}: a file for images of {' or '.join(self._rules.text)}, but the text "
                f"model is {model_type!r}: expected the mmproj of the same model"
            )

    def _check_width(self, config: Mapping[str, Any]) -> None:
        last = self._rules.last
        if last is None:
            width, where = (
                self.keys.count("projection_dim", MAX_WIDTH),
                "clip.vision.projection_dim",
            )
        else:
            shape, where = self.keys.values[SHAPES].get(last), f"the rows of {last}"
            width = shape and shape[0]
        if width != config["hidden_size"]:
            raise CheckpointError(
                f"{self.path}: {where}: expected the text model's "
                f"embedding_length, {config['hidden_size']}, found {width}: this is the mmproj of "
                "another model"
            )

    def _token(self, text: GgufFile) -> int:
        """The id of the token that stands for a row of an image."""
        tokens = text.metadata.get("tokenizer.ggml.tokens")
        names = [] if tokens is None else list(tokens)
        for name in self._rules.tokens:
            if name in names:
                return names.index(name)
        raise CheckpointError(
            f"{self.path}: expected a token {' or '.join(self._rules.tokens)} in the vocabulary of "
            f"{text.path}, found none: this is the mmproj of another model"
        )

    def _common(self) -> dict[str, Any]:
        """What the metadata say of all towers, in Hugging Face's words."""
        keys = self.keys
        width = keys.count("embedding_length", MAX_WIDTH)
        activation = "quick_gelu"
        for flag, name in (("use_gelu", self._rules.gelu), ("use_silu", "silu")):
            if self._file.metadata.get(f"clip.{flag}") is True:
                activation = name
        return {
            "hidden_size": width,
            "intermediate_size": keys.count("feed_forward_length", MAX_WIDTH),
            "num_hidden_layers": keys.count("block_count", MAX_LAYERS),
            "num_attention_heads": keys.count("attention.head_count", MAX_WIDTH),
            "patch_size": keys.count("patch_size", MAX_WIDTH),
            "image_size": keys.count("image_size", MAX_WIDTH),
            "layer_norm_eps": keys.positive("attention.layer_norm_epsilon", default=1e-6),
            "hidden_act": activation,
        }

    def _our_names(self) -> dict[str, str]:
        """The file's name of each of ours."""
        tensors = self._file.tensors
        whole = {**WHOLE_NAMES, **self._rules.names(self.keys)}
        # Files of 2024 and early 2025 call the MLP's first matrix the second one.
        up = tensors.get("v.blk.0.ffn_down.weight")
        wide = self.keys.count("feed_forward_length", MAX_WIDTH)
        swapped = up is not None and up.shape[0] == wide != up.shape[-1]
        layer = {**LAYER_NAMES, **self._rules.layer}
        if swapped:
            ends = "mlp.up_proj", "mlp.down_proj"
            layer[ends[0]], layer[ends[1]] = layer[ends[1]], layer[ends[0]]
        found: dict[str, str] = {}
        for theirs in tensors:
            if theirs == _SECOND_PICTURE:
                continue
            number = _LAYER.fullmatch(theirs)
            own = _ours(number[2], layer) if number else _ours(theirs, whole)
            if own is not None:
                place = f"layers.{int(number[1])}." if number else ""
                found[f"{VISION_ROOT}{place}{own}"] = theirs
        return found

    def _find(self, name: str) -> GgufTensor:
        theirs = self._names.get(name)
        if theirs is None:
            raise CheckpointError(f"{self.path}: {name} is missing: no such tensor in the file")
        return self._file.tensors[theirs]

    def _layout(self, stored: GgufTensor) -> Any:
        if stored.name not in self._pulled:
            self._pulled.add(stored.name)
            self.on_read(stored.nbytes)
        data = self._file.data(stored.name)
        where = f"{self.path}: tensor {stored.name!r}"
        return decode_matrix(stored.type, data, stored.shape[-1], where)

    def _halves_apart(self, stored: GgufTensor) -> Tensor:
        """For each row of q or k the row of the file, int64."""
        heads, rows = self.keys.count("attention.head_count", MAX_WIDTH), stored.shape[0]
        if rows % (2 * heads):
            raise self._fail(stored, f"expected a multiple of {2 * heads} rows ({heads} heads)")
        pairs = torch.arange(rows).view(heads, rows // heads // 2, 2)
        return pairs.transpose(1, 2).reshape(-1)

    def _fail(self, stored: GgufTensor, what: str) -> CheckpointError:
        return CheckpointError(f"{self.path}: tensor {stored.name!r}: {what}")


def _ours(theirs: str, names: Mapping[str, str]) -> str | None:
    for ours, stem in names.items():
        if theirs.startswith(f"{stem}.") and "." not in theirs.removeprefix(f"{stem}."):
            return ours + theirs.removeprefix(stem)
        if theirs == stem:
            return ours
    return None


def _plain(value: Any) -> Any:
    """A value of metadata as JSON has it."""
    if isinstance(value, np.ndarray):
        return value.tolist()
    return value.item() if isinstance(value, np.generic) else value


def _sections(text: GgufFile) -> Sequence[int] | None:
    """How many rotary frequencies of the text model turn by time, row and column."""
    name = text.metadata.get("general.architecture")
    found = _plain(text.metadata.get(f"{name}.rope.dimension_sections"))
    return found[:3] if isinstance(found, list) and len(found) >= 3 else None
