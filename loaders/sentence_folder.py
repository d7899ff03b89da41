"""The modules of a sentence-transformers folder that turn hidden states into an embedding.

``modules.json`` names them in order: the model, pooling, then dense layers and normalization. Each
has a folder with a ``config.json``. Sources: sentence-transformers 5 (models/Pooling.py, Dense.py).
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from sdk.kernels.dataclass import dataclass
from sdk.kernels.lazy_torch import torch
from sdk.loaders.folder_file import folder_file, weight_file
from sdk.loaders.json_file import parse_json, read_json
from sdk.loaders.safetensors_reader import SafetensorsFiles
from sdk.quant.embedding_head import ACTIVATIONS, DenseStep, EmbeddingHead, NormalizeStep
from sdk.quant.errors import CheckpointError, UnsupportedError

MODULES = "modules.json"
_LIMIT = 1 << 20
_PLAIN = re.compile(r"[\w-][\w.-]*")
#: Flags of a pooling config -> mode.
_MODES = {
    "pooling_mode_cls_token": "cls",
    "pooling_mode_mean_tokens": "mean",
    "pooling_mode_max_tokens": "max",
    "pooling_mode_lasttoken": "last",
    "pooling_mode_weightedmean_tokens": "weightedmean",
    "pooling_mode_mean_sqrt_len_tokens": "mean_sqrt_len",
}
_NAMES = {"lasttoken": "last"}


@dataclass(frozen=True, slots=True)
class _Module:
    kind: str
    path: str
    config: Mapping[str, Any]


def sentence_head(folder: Path, hidden_size: int) -> EmbeddingHead | None:
    """The head of a folder; None if it has no ``modules.json``.

    Raises:
        CheckpointError: a file is damaged or missing.
        UnsupportedError: a module, or a setting of one, is not supported.
    """
    file = folder_file(folder, MODULES)
    if file is None:
        return None
    modules = _modules(file, folder)
    if not modules or modules[0].kind != "Transformer":
        found = modules[0].kind if modules else "none"
        raise UnsupportedError(f"{file}: expected Transformer as the first module, found {found}")
    if len(modules) < 2 or modules[1].kind != "Pooling":
        found = modules[1].kind if len(modules) > 1 else "none"
        raise UnsupportedError(f"{file}: expected Pooling as the second module, found {found}")
    mode, include_prompt = _pooling(folder / modules[1].path, modules[1].config, hidden_size)
    steps: list[DenseStep | NormalizeStep] = []
    width = hidden_size
    for module in modules[2:]:
        if module.kind == "Normalize":
            steps.append(NormalizeStep())
        elif module.kind == "Dense":
            dense = _dense(folder, module, width)
            width = dense.width
            steps.append(dense)
        elif module.kind != "Dropout":  # of training
            raise UnsupportedError(
                f"{file}: module {module.kind!r}: expected Pooling, Dense or Normalize"
            )
    prompt = _default_prompt(folder)
    if prompt and not include_prompt:
        raise UnsupportedError(
            f"{folder / modules[1].path / 'config.json'}: include_prompt: expected true for a "
            "model with a default prompt, found false"
        )
    _check_lower_case(folder)
    return EmbeddingHead(mode, tuple(steps), prompt)


def _modules(file: Path, folder: Path) -> list[_Module]:
    with file.open("rb") as opened:
        text = opened.read(_LIMIT + 1)
    if len(text) > _LIMIT:
        raise CheckpointError(f"{file}: larger than {_LIMIT >> 20} MiB")
    found = parse_json(b'{"modules": ' + text + b"}", str(file))["modules"]
    if not isinstance(found, list) or not all(isinstance(one, dict) for one in found):
        raise CheckpointError(f"{file}: expected a list of modules, found {str(found)[:80]}")
    modules: list[_Module] = []
    for one in found:
        kind, path = one.get("type"), one.get("path", "")
        if not isinstance(kind, str) or not isinstance(path, str):
            raise CheckpointError(f"{file}: expected a type and a path, found {str(one)[:80]}")
        if path and not _PLAIN.fullmatch(path):
            raise CheckpointError(f"{file}: path: expected the name of a folder, found {path!r}")
        settings = folder_file(folder, f"{path}/config.json") if path else None
        config = {} if settings is None else read_json(settings, _LIMIT)
        modules.append(_Module(kind.rpartition(".")[2], path, config))
    return modules


def _pooling(where: Path, config: Mapping[str, Any], hidden: int) -> tuple[str, bool]:
    """The mode, and whether the tokens of a prompt count."""
    named = config.get("pooling_mode")
    if named is None:
        chosen = [mode for flag, mode in _MODES.items() if config.get(flag)]
    else:
        names = named if isinstance(named, (list, tuple)) else [named]
        chosen = [_NAMES.get(name, name) for name in names if isinstance(name, str)]
    if len(chosen) != 1 or chosen[0] not in _MODES.values():
        raise UnsupportedError(
            f"{where / 'config.json'}: expected one mode of {', '.join(_MODES.values())}, found "
            f"{' and '.join(chosen) or 'none'}"
        )
    size = config.get("word_embedding_dimension", config.get("embedding_dimension", hidden))
    if size != hidden:
        raise CheckpointError(
            f"{where / 'config.json'}: word_embedding_dimension: expected {hidden}, found {size!r}"
        )
    return chosen[0], config.get("include_prompt", True) is not False


def _dense(folder: Path, module: _Module, width: int) -> DenseStep:
    config, where = module.config, folder / module.path / "config.json"
    expected = (config.get("out_features"), config.get("in_features"))
    if expected[1] != width or type(expected[0]) is not int or expected[0] < 1:
        raise CheckpointError(f"{where}: in_features: expected {width}, found {expected[1]!r}")
    activation = str(config.get("activation_function", "Tanh")).rpartition(".")[2]
    if activation not in ACTIVATIONS:
        raise UnsupportedError(
            f"{where}: activation_function: expected one of {', '.join(ACTIVATIONS)}, found "
            f"{activation!r}"
        )
    weights = folder / module.path / "model.safetensors"
    if not weights.is_file():
        raise UnsupportedError(
            f"{weights}: no such file; the weights of a dense layer must be a safetensors file, "
            "because reading a pickle can run any code"
        )
    files = SafetensorsFiles([weight_file(folder, f"{module.path}/model.safetensors")])
    try:
        needed: dict[str, tuple[Any, ...]] = {"linear.weight": expected}
        if config.get("bias", True):
            needed["linear.bias"] = expected[:1]
        shapes = {name: stored.shape for name, stored in files.tensors.items()}
        if shapes != needed:
            raise CheckpointError(f"{weights}: expected {needed}, found {shapes}")
        read = [files.tensor(name).to(torch.float32).numpy() for name in needed]
    finally:
        files.close()
    return DenseStep(read[0], read[1] if len(read) > 1 else None, activation)


def _default_prompt(folder: Path) -> str:
    """The text that is put before every text; empty for most models."""
    file = folder_file(folder, "config_sentence_transformers.json")
    config = {} if file is None else read_json(file, _LIMIT)
    name, prompts = config.get("default_prompt_name"), config.get("prompts") or {}
    if name is None:
        return ""
    prompt = prompts.get(name) if isinstance(prompts, dict) else None
    if not isinstance(prompt, str):
        raise CheckpointError(
            f"{file}: default_prompt_name: expected one of {str(list(prompts))[:80]}, found "
            f"{str(name)[:80]!r}"
        )
    return prompt


def _check_lower_case(folder: Path) -> None:
    file = folder_file(folder, "sentence_bert_config.json")
    config = {} if file is None else read_json(file, _LIMIT)
    if config.get("do_lower_case"):
        raise UnsupportedError(f"{file}: do_lower_case: expected false, found true")
