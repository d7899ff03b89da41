"""A folder as `save_pretrained` writes it (config.json and safetensors files) as a `Checkpoint`."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from sdk.kernels.layouts import Dense, Float8, Layout
from sdk.loaders.formats.float8 import FLOAT8, SCALES, Float8Settings, scaled_matrix
from sdk.loaders.formats.quantized import CONFIG_FILES, quantization
from sdk.loaders.json_file import read_json
from sdk.loaders.model_shapes import check_config, expected_shape
from sdk.loaders.safetensors_reader import (
    SafetensorsFiles,
    StoredTensor,
    checked_file,
    read_index,
)
from sdk.quant.checkpoint import TensorEntry
from sdk.quant.errors import CheckpointError, UnsupportedError
from sdk.quant.weight import Weight, weight_of

logger = logging.getLogger("sdk")

#: The largest config.json in use (with long lists of quantized layers) stays below 2 MB.
MAX_CONFIG = 8 << 20
INDEX_NAME = "model.safetensors.index.json"
SINGLE_NAME = "model.safetensors"
_PICKLES = (".bin", ".pt", ".pth", ".ckpt")
_FLOATS = ("F32", "F16", "BF16")
#: Tensors that carry nothing a model needs: buffers computed anew from the config.
_IGNORABLE = (".rotary_emb.inv_freq", ".attn.bias", ".attn.masked_bias", ".attention.masked_bias")
#: Where the language model is kept by a model that also sees (transformers 4 and 5) and by a folder
#: saved without its head; what stands in our names instead.
_PREFIXES = (
    ("language_model.model.", "model."),
    ("language_model.lm_head.", "lm_head."),
    ("model.language_model.", "model."),
)


class HfFolder:
    """See `sdk.quant.checkpoint.Checkpoint`; ``path`` is the folder.

    ``weights`` names one safetensors file to use in place of those the folder lists.
    """

    format = "safetensors"

    def __init__(self, folder: Path, weights: Path | None = None) -> None:
        self.path = folder
        self.on_bytes: Callable[[int, int], None] | None = None
        raw = read_json(folder / "config.json", MAX_CONFIG)
        for name in CONFIG_FILES:
            if "quantization_config" not in raw and (folder / name).is_file():
                raw["quantization_config"] = read_json(folder / name, MAX_CONFIG)
        files = _open_weights(folder, weights)
        self._float8 = quantization(raw, files.tensors, str(folder))
        self.config: Mapping[str, Any] = complete_config(raw, str(folder / "config.json"))
        generation = folder / "generation_config.json"
        self.generation_config: Mapping[str, Any] = (
            read_json(generation, MAX_CONFIG) if generation.is_file() else {}
        )
        self._files: SafetensorsFiles | None = files
        self._names = _canonical_names(files)
        self._pulled: set[str] = set()
        self._done = 0
        self._total = sum(files.tensors[name].nbytes for name in self._names.values())

    @cached_property
    def tokenizer(self) -> Any:
        """The tokenizer of the folder; None when it has none."""
        from sdk.loaders.tokenizer.from_folder import tokenizer_from_folder

        return tokenizer_from_folder(self.path)

    def weight(self, name: str) -> Weight:
        stored = self._find(name, f"{name}.weight")
        if len(stored.shape) != 2:
            raise self._fail(stored, f"shape {list(stored.shape)}, expected a matrix")
        if self._float8 is not None and stored.dtype in FLOAT8:
            layout: Layout = self._scaled(name, stored, self._float8)
        else:
            layout = Dense(self._read(name, stored))
        self._report(stored)
        return weight_of(layout)

    def tensor(self, name: str) -> Tensor:
        stored = self._find(name, name)
        values = self._read(name, stored).to(torch.float32, copy=True)
        self._opened().release(stored.name)
        self._report(stored)
        return values

    def has(self, name: str) -> bool:
        self._opened()
        return name in self._names or f"{name}.weight" in self._names

    def entries(self) -> Sequence[TensorEntry]:
        return [
            TensorEntry(tensor.name, tensor.shape, tensor.dtype, tensor.nbytes)
            for tensor in self._opened().tensors.values()
        ]

    def unused(self) -> list[str]:
        tied = bool(self.config.get("tie_word_embeddings"))
        return [
            stored
            for name, stored in self._names.items()
            if stored not in self._pulled
            and not name.endswith(_IGNORABLE)
            and not (tied and name == "lm_head.weight")
        ]

    def close(self) -> None:
        # The mapping itself goes with the last weight that shares its pages.
        self._files = None
        self.__dict__.pop("tokenizer", None)  # whoever asked for it may keep it alive

    # -- inside --------------------------------------------------------------------------------

    def _opened(self) -> SafetensorsFiles:
        if self._files is None:
            raise CheckpointError(f"{self.path}: the checkpoint is closed")
        return self._files

    def _fail(self, stored: StoredTensor, what: str) -> CheckpointError:
        return CheckpointError(f"{stored.file.path}: tensor {stored.name!r}: {what}")

    def _find(self, name: str, key: str) -> StoredTensor:
        files = self._opened()
        if key not in self._names:
            raise CheckpointError(f"{self.path}: {name} is missing: no tensor {key!r} in the files")
        return files.tensors[self._names[key]]

    def _scaled(self, name: str, stored: StoredTensor, settings: Float8Settings) -> Float8:
        values = self._read(name, stored, FLOAT8)
        keys = [name + ending for ending in SCALES if name + ending in self._names]
        if len(keys) != 1:
            names = " and ".join(keys) or "none"
            raise self._fail(stored, f"{stored.dtype}: expected one scale beside it, found {names}")
        scale = self._find(name, keys[0])
        layout = scaled_matrix(
            values,
            self._opened().tensor(scale.name),
            settings,
            f"{scale.file.path}: tensor {scale.name!r}",
        )
        for key in (keys[0], f"{name}.input_scale"):
            if key in self._names:
                self._report(self._find(name, key))
        return layout

    def _read(self, name: str, stored: StoredTensor, types: tuple[str, ...] = _FLOATS) -> Tensor:
        expected = expected_shape(self.config, name.removesuffix(".weight"))
        if expected is not None and stored.shape != expected:
            raise self._fail(
                stored, f"shape {list(stored.shape)}, the config asks for {list(expected)} ({name})"
            )
        if stored.dtype not in types:
            raise UnsupportedError(
                f"{stored.file.path}: tensor {stored.name!r} is {stored.dtype}, which is not run "
                f"as a plain tensor; save the model in {', '.join(_FLOATS)}"
            )
        return self._opened().tensor(stored.name)

    def _report(self, stored: StoredTensor) -> None:
        if stored.name in self._pulled:
            return
        self._pulled.add(stored.name)
        self._done += stored.nbytes
        if self.on_bytes is not None:
            self.on_bytes(self._done, self._total)


def _canonical_names(files: SafetensorsFiles) -> dict[str, str]:
    """Our name of every tensor of the language model -> its name in the files."""
    stored = list(files.tensors)
    if "embed_tokens.weight" in files.tensors:  # saved without a head
        return {f"model.{name}": name for name in stored}
    if any(name.startswith("model.layers.") for name in stored):
        return {name: name for name in stored}
    found = {
        ours + name.removeprefix(theirs): name
        for theirs, ours in _PREFIXES
        for name in stored
        if name.startswith(theirs)
    }
    if not found:
        return {name: name for name in stored}
    if "lm_head.weight" in files.tensors:
        found["lm_head.weight"] = "lm_head.weight"
    return found


def _open_weights(folder: Path, weights: Path | None) -> SafetensorsFiles:
    """The safetensors files of a folder: those of the index, else the one there is."""
    if weights is not None:
        return SafetensorsFiles([checked_file(folder, weights.name)])
    index = folder / INDEX_NAME
    found = sorted(path.name for path in folder.glob("*.safetensors"))
    if index.is_file():
        files = read_index(index, folder)
        listed = {tensor.file.path.name for tensor in files.tensors.values()}
        stale = [name for name in found if name not in listed]
        if stale:
            logger.warning(
                "%s: not listed in %s, ignored: %s", folder, INDEX_NAME, ", ".join(stale)
            )
        return files
    if SINGLE_NAME in found:
        others = [name for name in found if name != SINGLE_NAME]
        if others:
            logger.warning("%s: beside %s, ignored: %s", folder, SINGLE_NAME, ", ".join(others))
        return SafetensorsFiles([checked_file(folder, SINGLE_NAME)])
    models = [name for name in found if not name.startswith("adapter_")]
    if len(models) == 1:
        return SafetensorsFiles([checked_file(folder, models[0])])
    if models:
        raise CheckpointError(
            f"{folder}: {len(models)} safetensors files ({', '.join(models[:3])}, ...) but no "
            f"{INDEX_NAME} that says what is where; download the index too"
        )
    raise _no_weights(folder, found)


def _no_weights(folder: Path, adapters: list[str]) -> CheckpointError:
    pickles = sorted(path.name for path in folder.iterdir() if path.suffix in _PICKLES)
    if pickles:
        return UnsupportedError(
            f"{folder}: only {', '.join(pickles[:3])}: such files are pickles, which can run any "
            "code when read, and are not opened. Convert them where you trust them: "
            'python -c "from transformers import AutoModelForCausalLM as M; '
            f"M.from_pretrained('{folder}').save_pretrained('OUT')\""
        )
    if adapters:
        return UnsupportedError(
            f"{folder}: {', '.join(adapters)} is an adapter for another model, not a model"
        )
    return CheckpointError(f"{folder}: no .safetensors files in it")


def complete_config(raw: dict[str, Any], source: str) -> dict[str, Any]:
    """A config.json with the defaults of its model class filled in, as transformers would.

    Files leave out what equals the default of the class. Nothing from the hub or the folder is
    run: ``auto_map`` is ignored, and an unknown ``model_type`` is left as it is. A model that also
    sees is reduced to its language model.

    Raises:
        CheckpointError: a number is impossible, or the class refuses the config.
    """
    if not isinstance(raw.get("model_type"), str):
        raise CheckpointError(f"{source}: model_type is {raw.get('model_type')!r}, expected a name")
    text = raw.get("text_config")
    if isinstance(text, dict) and isinstance(text.get("model_type"), str):
        check_config(text, f"{source}: text_config")
        outer = ("eos_token_id", "tie_word_embeddings")
        raw = {**{key: raw[key] for key in outer if key in raw}, **text}
    check_config(raw, source)
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    given = {key: value for key, value in raw.items() if key != "auto_map"}
    if raw["model_type"] not in CONFIG_MAPPING:
        return given
    try:
        filled = CONFIG_MAPPING[raw["model_type"]].from_dict(given).to_dict()
    except Exception as error:  # what a config class raises depends on the model and the version
        raise CheckpointError(
            f"{source}: not a sound {raw['model_type']} config: {error}"
        ) from error
    config = {**given, **filled}
    check_config(config, source)
    return config
