"""Folders with a head that drafts for another model: EAGLE, EAGLE-3 and Medusa.

Their authors and tools call the same tensors by different names. Here they are those of the head's
model: ``model.layers.0.…`` for the one layer of EAGLE, whose input projection ``fc`` counts as part
of the layer, and ``heads.K.blocks.J`` and ``heads.K.lm_head`` for Medusa.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from sdk.kernels.lazy_torch import Tensor
from sdk.loaders.folders.folder_file import folder_file
from sdk.loaders.folders.hf_folder import MAX_CONFIG, HfFolder, complete_config
from sdk.loaders.folders.safetensors_folder import open_weights
from sdk.loaders.folders.safetensors_reader import SafetensorsFiles, StoredTensor
from sdk.loaders.hub.hub import HubAccess
from sdk.loaders.json_file import read_json
from sdk.loaders.open import locate
from sdk.loaders.torch_file import torch_header
from sdk.quant.checkpoint import TensorEntry
from sdk.quant.errors import CheckpointError

#: Files of ``torch.save`` that a head may have instead of safetensors.
_TORCH_FILES = ("medusa_lm_head.pt", "pytorch_model.bin")
#: Keys of a config under which tools put the config of the layer (vLLM, speculators).
_NESTED = ("model", "transformer_layer_config")
_EAGLE_NAMES = (
    (re.compile(r"^(model\.)?(midlayer|layers\.0)\."), "model.layers.0."),
    (re.compile(r"^(model\.)?fc\b"), "model.layers.0.fc"),
    (re.compile(r"^(model\.)?(norm|embed_tokens)\b"), r"model.\2"),
)
_MEDUSA_PREFIX = re.compile(r"^medusa_heads?\.")
#: A block or the last matrix of a Medusa head, as its authors call it, and as vLLM does.
_MEDUSA_PART = re.compile(r"^(\d+)\.(\d+)(\.linear)?\b")
_MEDUSA_BLOCK = re.compile(r"^blocks\.(\d+)\.layers\.(\d+)\b")
_MEDUSA_LAST = re.compile(r"^lm_heads\.(\d+)\b")
_MEDUSA_HEAD = re.compile(r"^heads\.(\d+)\.")


class HeadFolder(HfFolder):
    """A :class:`sdk.quant.checkpoint.Checkpoint` of a head that drafts.

    ``config`` has the ``model_type`` ``eagle``, ``eagle3`` or ``medusa``, whatever the folder says.
    The shapes of tensors are not checked by it: they depend on the model, too.

    Raises:
        CheckpointError: it is not such a folder.
    """

    @property
    def method(self) -> str:
        """The method of speculative decoding that this head is for."""
        return str(self.config["model_type"])

    def tensor(self, name: str) -> Tensor:
        """As for other folders. Offsets of tokens (``d2t``) become float32, which holds all
        integers up to 2^24, more than a vocabulary may have."""
        if name == "d2t":
            return self._take(self._find(name, name)).float()
        return super().tensor(name)

    def entries(self) -> Sequence[TensorEntry]:
        """All tensors by our names, because the file's do not say what is in a block."""
        ours = (replace(each, name=self._renamed(each.name)) for each in super().entries())
        return [each for each in ours if self._is_used(each.name)]

    def _open(self, folder: Path, weights: Path | None) -> SafetensorsFiles:
        if not any(folder.glob("*.safetensors")):
            for name in _TORCH_FILES:
                path = folder_file(folder, name)
                if path is not None:
                    return SafetensorsFiles([path], torch_header)
        return open_weights(folder, weights)

    def _completed(
        self, raw: dict[str, Any], source: str, files: SafetensorsFiles
    ) -> Mapping[str, Any]:
        method = head_method(raw, files.tensors)
        if method is None:
            raise CheckpointError(
                f"{self.path}: expected a head of EAGLE, EAGLE-3 or Medusa, found neither a "
                "tensor 'fc' nor blocks of Medusa"
            )
        if method == "medusa":
            return {**raw, "model_type": method}
        for key in _NESTED:
            if isinstance(raw.get(key), dict):
                raw = {**raw, **raw[key]}
        single = {key: value for key, value in raw.items() if key != "layer_types"}
        complete = complete_config({"model_type": method, **single, "num_hidden_layers": 1}, source)
        return {**complete, "model_type": method}

    def _named(self, files: SafetensorsFiles) -> dict[str, StoredTensor]:
        named = {self._renamed(name): stored for name, stored in files.tensors.items()}
        return {name: stored for name, stored in named.items() if self._is_used(name)}

    def _renamed(self, name: str) -> str:
        if self.method != "medusa":
            for pattern, ours in _EAGLE_NAMES:
                name = pattern.sub(ours, name)
            return name
        name = _MEDUSA_PREFIX.sub("", name)
        found = _MEDUSA_PART.match(name)
        if found is not None:
            last = found[3] is None and int(found[2]) == self.num_blocks
            part = "lm_head" if last else f"blocks.{found[2]}"
            return f"heads.{found[1]}.{part}{name[found.end() :]}"
        name = _MEDUSA_BLOCK.sub(r"heads.\1.blocks.\2", name)
        return _MEDUSA_LAST.sub(r"heads.\1.lm_head", name)

    @property
    def num_blocks(self) -> int:
        """Residual blocks of each of Medusa's heads."""
        return self._count("medusa_num_layers", "num_hidden_layers", 16)

    @property
    def num_heads(self) -> int:
        """Medusa's heads that are used: a file may have more than the config says."""
        return self._count("medusa_num_heads", "num_heads", 64)

    def _count(self, name: str, other: str, limit: int) -> int:
        key = name if name in self.config else other
        value = self.config.get(key)
        if type(value) is not int or not 1 <= value <= limit:
            raise CheckpointError(
                f"{self.path}: config: {key}: expected an integer in 1..{limit}, found {value!r}"
            )
        return value

    def _is_used(self, name: str) -> bool:
        if name == "t2d" or name.endswith(".rotary_emb.inv_freq"):
            return False  # t2d says which tokens d2t leads to
        found = _MEDUSA_HEAD.match(name) if self.method == "medusa" else None
        return found is None or int(found[1]) < self.num_heads


def head_method(config: Mapping[str, Any], tensors: Iterable[str]) -> str | None:
    """The method of the head with these tensors; None if it is not a head.

    The tensors decide: the ``architectures`` of many heads are those of a plain Llama.
    """
    architectures = config.get("architectures")
    if "medusa_num_heads" in config or architectures == ["MedusaModel"]:
        return "medusa"
    names = [name.removeprefix("model.") for name in tensors]
    if not any(name.startswith("fc.") for name in names):
        return None
    third = any(name.startswith("midlayer.") or ".hidden_norm." in name for name in names)
    return "eagle3" if third else "eagle"


def open_head(model: str | Path, hub: HubAccess | None = None) -> HeadFolder:
    """Open the folder of a head, or the one that a hub id names.

    Raises:
        CheckpointError: it is missing, damaged or something else.
        UnsupportedError: it holds something that is not supported.
    """
    return HeadFolder(locate(model, hub=hub))


def method_of_folder(model: str | Path) -> str | None:
    """The method of the head in a local folder; None for anything else, whatever is wrong with it.

    Reads the config and the names of tensors.
    """
    folder = Path(model).expanduser()
    try:
        if not (folder / "config.json").is_file():
            return None
        config = read_json(folder / "config.json", MAX_CONFIG)
        if "medusa_num_heads" in config:
            return "medusa"
        head = HeadFolder(folder)
        head.close()
        return head.method
    except (CheckpointError, OSError, ValueError):
        return None
