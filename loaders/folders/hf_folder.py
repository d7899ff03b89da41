"""A folder written by `save_pretrained` (config.json and safetensors files) as a `Checkpoint`.

Folders in Mistral's own format (`mistral_params`) are read the same way.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import Any

from sdk.kernels.lazy_torch import Tensor, import_torch, torch
from sdk.kernels.packages import missing
from sdk.kernels.weights.layouts import Dense
from sdk.loaders.folders import minicpmv_config, mistral_params, vision_tensors
from sdk.loaders.folders.expert_names import JoinedPart, joined_part, spelled_as_ours
from sdk.loaders.folders.folder_file import folder_file
from sdk.loaders.folders.safetensors_folder import open_weights
from sdk.loaders.folders.safetensors_reader import (
    FLOAT_TYPES,
    SafetensorsFiles,
    StoredTensor,
    alike,
    entry_of,
    is_large,
    same_bytes,
    unread,
)
from sdk.loaders.folders.tensor_names import TensorNames
from sdk.loaders.formats.kv_scales import KV_SCALES, read_kv_scales
from sdk.loaders.formats.quantized import CONFIG_FILES, Quantization, quantization
from sdk.loaders.formats.stored_layer import StoredLayer
from sdk.loaders.json_file import read_json
from sdk.loaders.model_shapes import check_config, expected_shape, experts_transposed, num_experts
from sdk.loaders.next_token_names import next_token_name
from sdk.loaders.qkv_rows import stored_rows
from sdk.loaders.quiet import transformers_to_our_log
from sdk.models.architecture import (
    WITHOUT_HEAD,
    TensorRules,
    architecture,
    real_type,
    states_everything,
)
from sdk.models.configs.keys import check_class, check_fixed, with_our_keys
from sdk.models.vision.family import PROCESSOR, VISION, WHOLE, text_part, vision_of
from sdk.quant.checkpoint import TensorEntry
from sdk.quant.errors import CheckpointError, UnsupportedError
from sdk.quant.online import LAYER_TABLES
from sdk.quant.permuted import Permuted, PermutedWeight
from sdk.quant.weight import PackedWeight, Weight, weight_of

logger = logging.getLogger("sdk")

#: The largest config.json in use (with long lists of quantized layers) stays below 2 MB.
MAX_CONFIG = 8 << 20
_FLOATS = ("F32", "F16", "BF16")
#: The matrix of the embedding and that of the head, in the spellings of files.
_EMBEDDINGS = ("embed_tokens.weight", "wte.weight", "embed_in.weight", "word_embeddings.weight")
_HEADS = ("lm_head.weight", "embed_out.weight")
#: Prefixes of the language model in a multimodal model (transformers 4 and 5) and in a folder saved
#: without its head, and our prefixes.
_PREFIXES = (
    ("language_model.model.", "model."),
    ("language_model.lm_head.", "lm_head."),
    ("model.language_model.", "model."),
    ("model.text_model.", "model."),
    ("llm.", ""),
)


class HfFolder:
    """See `sdk.quant.checkpoint.Checkpoint`; ``path`` is the folder.

    ``weights``: one safetensors file to use instead of those that the folder lists.
    """

    format = "safetensors"

    def __init__(self, folder: Path, weights: Path | None = None) -> None:
        self.path = folder
        self.on_bytes: Callable[[int, int], None] | None = None
        theirs = (folder / mistral_params.FILE).is_file()
        self._by_mistral = theirs and not (folder / "config.json").is_file()
        source = folder / (mistral_params.FILE if self._by_mistral else "config.json")
        raw = read_json(folder_file(folder, source.name) or source, MAX_CONFIG)
        if self._by_mistral:
            raw = mistral_params.config_of(raw, str(source))
        raw = minicpmv_config.composite(raw, folder, str(source))
        for name in CONFIG_FILES:
            if raw.get("quantization_config") is None:
                settings = folder_file(folder, name)
                if settings is not None:
                    raw["quantization_config"] = read_json(settings, MAX_CONFIG)
        files = self._open(folder, weights)
        self._quantization = quantization(raw, files.tensors, str(folder))
        self.config: Mapping[str, Any] = self._completed(raw, str(source), files)
        self.processor: Mapping[str, Any] = vision_tensors.processor_of(folder)
        if WHOLE in self.config:
            whole = {**self.config[WHOLE], PROCESSOR: self.processor}
            self.config = {**self.config, WHOLE: whole}
        generation = folder_file(folder, "generation_config.json")
        self.generation_config: Mapping[str, Any] = (
            {} if generation is None else read_json(generation, MAX_CONFIG)
        )
        self._files: SafetensorsFiles | None = files
        self._warned: set[str] = set()
        own = architecture(self.config.get("model_type"))
        self._rules = TensorRules() if own is None else own.tensors
        if own is not None and own.config.defaults.get("tie_word_embeddings"):
            self.config = {"tie_word_embeddings": True, **self.config}
        named, of_vision = vision_tensors.named(self.config, self._named(files))
        self._turned = vision_tensors.turned(self.config)
        self._tensors, ahead = self._with_next_token(named)
        #: Our name of each tensor whose name is another one in the files.
        self._stored_names: Mapping[str, str] = {**ahead, **of_vision}
        if self._rules.names:
            self._stored_names = {stored.name: name for name, stored in self._tensors.items()}
        if "score.weight" in self._tensors and "lm_head.weight" not in self._tensors:
            # A classification head replaces the other one, which the embedding stands in for.
            self.config = {**self.config, "tie_word_embeddings": True}
        elif self._lacks_a_head():
            self.config = {**self.config, "tie_word_embeddings": True, WITHOUT_HEAD: True}
        #: The file's name of a head that is the embedding once more.
        self._copied_head: str | None = None
        if self.config.get("tie_word_embeddings"):
            self._look_for_a_head()
        self.kv_scales: Mapping[str, float] = read_kv_scales(files, self._tensors, str(folder))
        self._pulled: set[str] = set()
        self._whole: tuple[str, Weight] | None = None
        self._done = 0
        self._total = _language_bytes(files)

    @cached_property
    def tokenizer(self) -> Any:
        """The tokenizer of the folder; None when it has none."""
        from sdk.loaders.tokenizer.from_folder import tokenizer_from_folder

        return tokenizer_from_folder(self.path)

    def weight(self, name: str) -> Weight:
        name = spelled_as_ours(name)  # transformers' code uses Mixtral's first spelling too
        found = self._weight(name)
        rows = stored_rows(self.config, name)
        if rows is not None:
            self._check_rows(name, found.shape[0], rows)
            assert isinstance(found, PackedWeight | PermutedWeight)
            return found.with_rows(rows)
        if not self._by_mistral or not name.endswith((".q_proj", ".k_proj")):
            return found
        queries = name.endswith(".q_proj")
        heads = self.config["num_attention_heads" if queries else "num_key_value_heads"]
        if not isinstance(found, PackedWeight) or found.shape[0] % (2 * heads):
            raise CheckpointError(
                f"{self.path}: {name}: expected a multiple of {2 * heads} rows ({heads} heads), "
                f"found {found.shape[0]}"
            )
        return mistral_params.halves_apart(found, heads)

    def _weight(self, name: str) -> Weight:
        layer = self._packed(name)
        if layer is not None:
            return self._decoded(layer)
        part = self._joined(name)
        if part is not None:
            return self._cut(name, part)
        stored = self._find(name, f"{name}.weight")
        if len(stored.shape) != 2:
            raise self._fail(stored, f"expected a matrix, found shape {list(stored.shape)}")
        by_row = name.endswith(LAYER_TABLES) and stored.dtype in FLOAT_TYPES
        if by_row or (is_large(stored) and not self._is_moved(name)):
            self._check_stored(name, stored)
            self._report(stored)
            return unread(stored)
        turned = self._is_turned(name)
        values = self._read(name, stored, turned=turned)
        self._report(stored)
        return weight_of(Dense(values.t() if turned else values))

    def tensor(self, name: str) -> Tensor:
        name = spelled_as_ours(name)
        part = self._joined(name)
        if part is not None:
            whole = self._find(name, part.whole)
            values = self._read(part.whole, whole, part.expert)
            self._report(whole)
            return part.of(values).to(torch.float32, copy=True)
        stored = self._find(name, name)
        values = self._read(name, stored).to(torch.float32)
        self._report(stored)
        rows = stored_rows(self.config, name)
        if rows is None:
            return values
        self._check_rows(name, len(values), rows)
        return values[rows]

    def has(self, name: str) -> bool:
        self._opened()
        name = spelled_as_ours(name)
        if self._adds_nothing(name):
            return False
        known = name in self._tensors or f"{name}.weight" in self._tensors
        return known or self._packed(name) is not None or self._joined(name) is not None

    def spelled_in_file(self, name: str) -> str:
        """The file's name of a tensor, or of a matrix without its ending; ours if it has none."""
        for ending in ("", ".weight"):
            stored = self._tensors.get(name + ending)
            if stored is not None:
                return stored.name.removesuffix(ending)
        return name

    def alike(self, one: str, other: str) -> bool:
        first, second = (self._tensors.get(f"{name}.weight") for name in (one, other))
        return first is not None and second is not None and alike(first, second)

    def entries(self) -> Sequence[TensorEntry]:
        entries = {
            stored.name: self._entry(stored)
            for stored in self._opened().tensors.values()
            if stored.name != self._copied_head
        }
        if self._quantization is not None:
            self._join_packed(self._quantization, entries)
        return [self._as_ours(entry) for entry in entries.values()]

    def unused(self) -> list[str]:
        return [
            self._stored_names.get(stored.name, stored.name)
            for name, stored in self._tensors.items()
            if stored.name not in self._pulled
            and not name.endswith(KV_SCALES)
            and stored.name != self._copied_head
        ]

    def close(self) -> None:
        if self._files is not None:
            self._files.close()
        self._files = self._whole = None
        self.__dict__.pop("tokenizer", None)  # callers may keep it alive

    # -- inside --------------------------------------------------------------------------------

    def _look_for_a_head(self) -> None:
        """A config may say that the head is the embedding while the files have a head of their own:
        that one is used, as in transformers. Its bytes are compared with the embedding's, because
        some tools write the embedding twice: 0.2 s for 2 x 272 MB in the page cache.
        """
        name = next((name for name in _HEADS if name in self._tensors), None)
        if name is None:
            if self._packed("lm_head") is not None:
                self.config = {**self.config, "tie_word_embeddings": False}
            return
        head, ends = self._tensors[name], tuple(f".{name}" for name in _EMBEDDINGS)
        found = (own for key, own in self._tensors.items() if f".{key}".endswith(ends))
        embedding = next(found, None)
        if embedding is not None and same_bytes(head, embedding):
            self._copied_head = head.name
            return
        self.config = {**self.config, "tie_word_embeddings": False}
        self._warn("tie_word_embeddings is true, but the files have a head of their own", head.name)

    def _open(self, folder: Path, weights: Path | None) -> SafetensorsFiles:
        """The files of the weights."""
        return open_weights(folder, weights)

    def _completed(
        self, raw: dict[str, Any], source: str, files: SafetensorsFiles
    ) -> Mapping[str, Any]:
        """The config, from that in the file ``source``."""
        return complete_config(raw, source)

    def _named(self, files: SafetensorsFiles) -> dict[str, StoredTensor]:
        """Every tensor of the model by our name."""
        if self._rules.names:
            ours = TensorNames(self._rules.names).ours
            if self._rules.experts_by_rows:
                by_expert(files, ours, num_experts(self.config) or 1)
            tensors = files.tensors.items()
            return {spelled_as_ours(ours(_without_prefix(name))): x for name, x in tensors}
        return _canonical_names(files, self._by_mistral)

    def _with_next_token(
        self, tensors: dict[str, StoredTensor]
    ) -> tuple[dict[str, StoredTensor], dict[str, str]]:
        """The tensors with our names for those of multi-token prediction, and these names by the
        file's."""
        layers = self.config.get("num_hidden_layers")
        if not isinstance(layers, int):
            return tensors, {}
        named = {next_token_name(name, layers): own for name, own in tensors.items()}
        return named, {own.name: name for name, own in named.items() if name not in tensors}

    def _lacks_a_head(self) -> bool:
        """Whether it holds the body of a model alone (``Qwen3Model``), whose head is not tied: an
        embedding model. The embedding takes the place of the head, so that there is nothing more in
        memory; nobody may see what it would say."""
        names = self.config.get("architectures")
        body = isinstance(names, list) and bool(names) and str(names[0]).endswith("Model")
        tied = self.config.get("tie_word_embeddings")
        return body and not tied and not any(name.startswith("lm_head.") for name in self._tensors)

    def _entry(self, stored: StoredTensor) -> TensorEntry:
        ours = self._stored_names.get(stored.name, stored.name).removesuffix(".weight")
        return entry_of(stored, whole=self._is_moved(ours))

    def _is_moved(self, name: str) -> bool:
        """Whether the rows of a matrix are not those of the files, one after another."""
        by_head = self._by_mistral and name.endswith((".q_proj", ".k_proj"))
        return by_head or self._is_turned(name) or stored_rows(self.config, name) is not None

    def _is_turned(self, name: str) -> bool:
        """Whether the files have a matrix as ``[in, out]``."""
        by_layer = self._rules.layers_transposed and name.startswith("model.layers.")
        return by_layer or name in self._turned

    def _as_ours(self, entry: TensorEntry) -> TensorEntry:
        """The entry of a tensor whose name in the files does not say what it is, or whose matrix
        they store as ``[in, out]``."""
        ours = self._stored_names.get(entry.name)
        if ours is None:
            return entry
        turned = self._is_turned(ours.removesuffix(".weight"))
        turned = turned and len(entry.shape) == 2 and entry.format in _FLOATS
        return replace(entry, name=ours, shape=entry.shape[::-1] if turned else entry.shape)

    def _check_rows(self, name: str, found: int, rows: Tensor) -> None:
        if found != len(rows):
            raise CheckpointError(
                f"{self.path}: {name}: expected {len(rows)} rows for the heads of the config, "
                f"found {found}"
            )

    def _opened(self) -> SafetensorsFiles:
        if self._files is None:
            raise CheckpointError(f"{self.path}: the checkpoint is closed")
        return self._files

    def _fail(self, stored: StoredTensor, what: str) -> CheckpointError:
        return CheckpointError(f"{stored.file.path}: tensor {stored.name!r}: {what}")

    def _find(self, name: str, key: str) -> StoredTensor:
        self._opened()
        if key not in self._tensors:
            raise CheckpointError(f"{self.path}: {name} is missing: no tensor {key!r} in the files")
        return self._tensors[key]

    def _packed(self, name: str) -> StoredLayer | None:
        """The tensors of a packed layer; None for a plain one."""
        files = self._opened()
        if self._quantization is None:
            return None
        shape = expected_shape(self.config, name)
        layer = StoredLayer(
            name,
            (shape[0], shape[1]) if shape is not None and len(shape) == 2 else None,
            self._tensors,
            files.metadata,
            self.path,
            self._take,
            self._warn,
        )
        return layer if self._quantization.packs(layer) else None

    def _joined(self, name: str) -> JoinedPart | None:
        """Where an expert's matrix or bias is in a tensor of all; None if it has its own tensor."""
        if name in self._tensors or f"{name}.weight" in self._tensors:
            return None
        part = joined_part(name, self.config)
        if part is None or part.expert >= (num_experts(self.config) or 0):
            return None
        known = part.whole in self._tensors or self._packed(part.whole) is not None
        return part if known else None

    def _cut(self, name: str, part: JoinedPart) -> Weight:
        """One expert's matrix out of a tensor of all; the last such tensor is cached."""
        layer = self._packed(part.whole)
        if layer is None:
            stored = self._tensors[part.whole]
            values = self._read(part.whole, stored, part.expert)
            transposed = experts_transposed(self.config, part.whole, stored.shape)
            self._report(stored)
            return weight_of(Dense(part.of(values.t() if transposed else values)))
        if self._whole is None or self._whole[0] != part.whole:
            self._whole = part.whole, self._decoded(layer)
        weight, count = self._whole[1], num_experts(self.config) or 1
        first, rows, step = part.rows(weight.shape[0] // count)
        if weight.shape[0] % count or not isinstance(weight, PackedWeight):
            raise CheckpointError(
                f"{self.path}: {name}: expected rows for {count} experts, found {weight.shape[0]}"
            )
        return weight.take_rows(first, rows, step)

    def _join_packed(self, quantization: Quantization, entries: dict[str, TensorEntry]) -> None:
        """Replace the entries of a packed layer's tensors by one."""
        for name, stored in self._tensors.items():
            path = quantization.layer_of(name)
            layer = None if path is None else self._packed(path)
            if path is None or layer is None or stored.name not in entries:
                continue
            for part in quantization.tensors_of(layer):
                if part is not stored:
                    entries.pop(part.name, None)
            file_path = stored.name.removesuffix(name.removeprefix(path))
            entries[stored.name] = quantization.entry(layer, file_path)

    def _decoded(self, layer: StoredLayer) -> Weight:
        assert self._quantization is not None
        found = self._quantization.decode(layer)
        if isinstance(found, Permuted):
            weight: Weight = PermutedWeight(weight_of(found.layout), found.order)
        else:
            weight = weight_of(found)
        if self._adds_nothing(f"{layer.name}.bias"):
            self._report(self._tensors[f"{layer.name}.bias"])
        return weight

    def _adds_nothing(self, name: str) -> bool:
        """Whether it is a packed layer's bias of zeros, which some quantizers write everywhere."""
        stem = name.removesuffix(".bias")
        if stem == name or name not in self._tensors or self._packed(stem) is None:
            return False
        return not bool(self._opened().tensor(self._tensors[name].name).any())

    def _take(self, stored: StoredTensor) -> Tensor:
        values = self._opened().tensor(stored.name)
        self._report(stored)
        return values

    def _warn(self, what: str, name: str) -> None:
        if what not in self._warned:
            self._warned.add(what)
            logger.warning("%s: %s: %s (and maybe others)", self.path, name, what)

    def _read(
        self, name: str, stored: StoredTensor, expert: int | None = None, *, turned: bool = False
    ) -> Tensor:
        """``turned``: the file has the matrix as ``[in, out]``."""
        self._check_stored(name, stored, turned=turned)
        return self._opened().tensor(stored.name, expert)

    def _check_stored(self, name: str, stored: StoredTensor, *, turned: bool = False) -> None:
        expected = expected_shape(self.config, name.removesuffix(".weight"), stored.shape)
        if expected is not None and turned:
            expected = expected[::-1]
        if expected is not None and stored.shape != expected:
            raise self._fail(
                stored,
                f"{name}: expected shape {list(expected)} by the config, "
                f"found {list(stored.shape)}",
            )
        if stored.dtype not in _FLOATS:
            raise UnsupportedError(
                f"{stored.file.path}: tensor {stored.name!r} is {stored.dtype}, which is not "
                f"supported for a plain tensor; save the model in {', '.join(_FLOATS)}"
            )

    def _report(self, stored: StoredTensor) -> None:
        if stored.name in self._pulled:
            return
        self._pulled.add(stored.name)
        self._done += stored.nbytes
        if self.on_bytes is not None:
            self.on_bytes(self._done, self._total)


def by_expert(files: SafetensorsFiles, ours: Callable[[str], str], count: int) -> None:
    """Give tensors with the rows of one expert after the other a dimension of experts."""
    for name, stored in files.tensors.items():
        rows, *rest = stored.shape or (0,)
        whole = re.fullmatch(r".+\.mlp\.experts\.(gate|up|down)_proj", ours(name))
        if whole and len(rest) == 1 and rows % count == 0:
            files.tensors[name] = replace(stored, shape=(count, rows // count, *rest))


def _canonical_names(files: SafetensorsFiles, by_mistral: bool) -> dict[str, StoredTensor]:
    """Every tensor by our name; those beside a language model keep theirs."""
    if by_mistral:
        ours = mistral_params.spelled_as_ours
        return {ours(name): tensor for name, tensor in files.tensors.items()}
    stored = {spelled_as_ours(name): tensor for name, tensor in files.tensors.items()}
    if any(name.startswith("embed_tokens.") for name in stored):  # saved without a head
        return {f"model.{name}": tensor for name, tensor in stored.items()}
    if any(name.startswith("model.layers.") for name in stored):
        return stored
    return {_without_prefix(name): tensor for name, tensor in stored.items()}


def _language_bytes(files: SafetensorsFiles) -> int:
    """The bytes of the language model, as far as names tell: in a multimodal model, those of the
    tensors that have one of the prefixes, and of the head."""
    prefixes = tuple(theirs for theirs, _ in _PREFIXES)
    if any(name.startswith(prefixes) for name in files.tensors):
        prefixes += ("lm_head.",)
    else:
        prefixes = ("",)
    return sum(one.nbytes for name, one in files.tensors.items() if name.startswith(prefixes))


def _without_prefix(name: str) -> str:
    """The name of a tensor of a multimodal model's language model, or its own."""
    for theirs, ours in _PREFIXES:
        if name.startswith(theirs):
            return ours + name.removeprefix(theirs)
    return name


def complete_config(raw: dict[str, Any], source: str) -> dict[str, Any]:
    """A config.json with the defaults of its model class, as transformers would fill them in.

    Files leave out values that equal the class's defaults; one that leaves out nothing that is read
    is not given to transformers. No code from the hub or the folder is
    run: ``auto_map`` is ignored, and a config of unknown ``model_type`` stays unchanged. A
    multimodal model is reduced to its language model.

    Raises:
        CheckpointError: a number is impossible, or the class rejects the config.
    """
    if not isinstance(raw.get("model_type"), str):
        raise CheckpointError(f"{source}: model_type is {raw.get('model_type')!r}, expected a name")
    raw = {**raw, "model_type": real_type(raw)}
    vision = vision_tensors.parts(raw)
    raw.pop(VISION, None)
    check_fixed(raw, source)  # also what a multimodal config has outside its text part
    text = raw.get("text_config")
    if isinstance(text, dict) and isinstance(text.get("model_type"), str):
        check_config(text, f"{source}: text_config")
        outer: dict[str, Any] = {
            key: raw[key] for key in ("eos_token_id", "tie_word_embeddings") if key in raw
        }
        tied = outer.get("tie_word_embeddings") or text.get("tie_word_embeddings")
        # Either place may say it, and the other one has its default; a head in the files counts.
        text = text_part(raw, text)
        raw = {**outer, **text, **({"tie_word_embeddings": tied} if tied is not None else {})}
    check_config(raw, source)
    check_fixed(raw, source)
    own = architecture(raw["model_type"])
    if own is not None and not own.folders:
        raise UnsupportedError(
            f"{source}: model_type {own.model_type!r}: folders of this model are not supported, "
            "its GGUF files are"
        )
    from sdk.loaders.folders.partial_rotation import check_partial_rotation  # of folders alone

    check_partial_rotation(raw, source)
    given = {key: value for key, value in raw.items() if key != "auto_map"}
    ours = with_our_keys(given)
    if not states_everything(ours):
        ours = with_our_keys(filled_by_transformers(given, source))
    return _with_vision({**ours, **vision}, source)


def _with_vision(config: dict[str, Any], source: str) -> dict[str, Any]:
    """The config whose vision part has the defaults of its class, if it leaves out what is read."""
    if VISION not in config:
        return config
    try:
        vision_of(config)
    except CheckpointError:
        whole = {**config[WHOLE], VISION: config[VISION]}
        return {**config, VISION: filled_by_transformers(whole, source)[VISION]}
    return config


def filled_by_transformers(given: dict[str, Any], source: str) -> dict[str, Any]:
    """The config with the defaults of its model class; unchanged if transformers has none."""
    import_torch()  # transformers would, but Ctrl-C must not meet it there
    try:
        from transformers.models.auto.configuration_auto import CONFIG_MAPPING
    except ImportError as error:
        what = f"{source}: its fields that are left to the defaults of its model class need"
        raise missing(error, what) from error
    name = given["model_type"]
    if name not in CONFIG_MAPPING:
        return given
    try:
        with transformers_to_our_log():
            filled = CONFIG_MAPPING[name].from_dict(_decoded(given)).to_dict()
            defaults = CONFIG_MAPPING[name]().to_dict()
    except Exception as error:  # what a config class raises depends on the model and the version
        raise CheckpointError(f"{source}: not a valid {name} config: {error}") from error
    config = {**given, **filled}
    check_config(config, source)
    check_class(config, defaults, source)
    return config


def _decoded(value: Any) -> Any:
    """A value of a config.json with the floats that JSON does not have, which transformers 5 writes
    as ``{"__float__": "Infinity"}``."""
    if isinstance(value, dict):
        kind = value.get("__float__")
        if len(value) == 1 and kind in ("Infinity", "-Infinity", "NaN"):
            return float(kind)
        return {key: _decoded(own) for key, own in value.items()}
    return [_decoded(own) for own in value] if isinstance(value, list) else value
