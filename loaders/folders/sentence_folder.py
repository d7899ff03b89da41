"""The modules of a sentence-transformers folder that turn hidden states into an embedding.

``modules.json`` names them in order: the model, pooling, then dense layers and normalization. Each
has a folder with a ``config.json``. A model of late interaction has no pooling: its dense layers
apply to each token. Sources: sentence-transformers 5 and 6 (Pooling, Dense, LayerNorm).
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from sdk.kernels.dataclass import dataclass
from sdk.kernels.lazy_torch import torch
from sdk.loaders.folders.folder_file import folder_file, weight_file
from sdk.loaders.folders.safetensors_reader import SafetensorsFiles
from sdk.loaders.json_file import parse_json, read_json
from sdk.quant.embedding_head import (
    ACTIVATIONS,
    DenseStep,
    EmbeddingHead,
    LayerNormStep,
    NormalizeStep,
    Step,
)
from sdk.quant.errors import CheckpointError, UnsupportedError

MODULES = "modules.json"
_LIMIT = 1 << 20
_PLAIN = re.compile(r"[\w-][\w.-]*")
#: Flags of a pooling config -> mode, in the order in which several are joined.
_MODES = {
    "pooling_mode_cls_token": "cls",
    "pooling_mode_max_tokens": "max",
    "pooling_mode_mean_tokens": "mean",
    "pooling_mode_mean_sqrt_len_tokens": "mean_sqrt_len",
    "pooling_mode_weightedmean_tokens": "weightedmean",
    "pooling_mode_lasttoken": "last",
}
_NAMES = {"lasttoken": "last", "mean_sqrt_len_tokens": "mean_sqrt_len"}
_SIMILARITIES = ("cosine", "dot", "euclidean", "manhattan")


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
    modes: tuple[str, ...] = ("token",)
    include_prompt, rest = True, modules[1:]
    if len(modules) > 1 and modules[1].kind == "Pooling":
        where = folder / modules[1].path / "config.json"
        modes, include_prompt = _pooling(where, modules[1].config, hidden_size)
        rest = modules[2:]
    elif len(modules) < 2 or modules[1].kind != "Dense":
        found = modules[1].kind if len(modules) > 1 else "none"
        raise UnsupportedError(
            f"{file}: expected Pooling as the second module, or Dense for a vector of each token, "
            f"found {found}"
        )
    steps: list[Step] = []
    width = hidden_size * len(modes)
    for module in rest:
        if module.kind == "Normalize":
            steps.append(NormalizeStep())
        elif module.kind in ("Dense", "LayerNorm"):
            step = (_dense if module.kind == "Dense" else _layer_norm)(folder, module, width)
            width = step.width
            steps.append(step)
        elif module.kind != "Dropout":  # of training
            raise UnsupportedError(
                f"{file}: module {module.kind!r}: expected Pooling, Dense, LayerNorm or Normalize"
            )
    max_tokens, lower_case = _limits(folder)
    return EmbeddingHead(
        modes,
        tuple(steps),
        include_prompt=include_prompt,
        max_tokens=max_tokens,
        lower_case=lower_case,
        **_settings(folder, modes == ("token",)),
    )


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


def _pooling(where: Path, config: Mapping[str, Any], hidden: int) -> tuple[tuple[str, ...], bool]:
    """The modes, and whether the tokens of a prompt count."""
    named = config.get("pooling_mode")
    if named is None and not any(flag in config for flag in _MODES):
        named = "mean"
    if named is None:
        chosen = [mode for flag, mode in _MODES.items() if config.get(flag)]
    else:
        names = named if isinstance(named, (list, tuple)) else [named]
        chosen = [_NAMES.get(name, name) for name in map(str, names)]
    if not chosen or not set(chosen) <= set(_MODES.values()):
        raise UnsupportedError(
            f"{where}: expected modes of {', '.join(_MODES.values())}, found "
            f"{' and '.join(chosen)[:80] or 'none'}"
        )
    size = config.get("word_embedding_dimension", config.get("embedding_dimension", hidden))
    if size != hidden:
        raise CheckpointError(
            f"{where}: word_embedding_dimension: expected {hidden}, found {size!r}"
        )
    return tuple(chosen), config.get("include_prompt", True) is not False


def _dense(folder: Path, module: _Module, width: int) -> DenseStep:
    config, where = module.config, folder / module.path / "config.json"
    expected = (config.get("out_features"), config.get("in_features"))
    if expected[1] != width or type(expected[0]) is not int or expected[0] < 1:
        raise CheckpointError(f"{where}: in_features: expected {width}, found {expected[1]!r}")
    if config.get("use_residual"):
        raise UnsupportedError(f"{where}: use_residual: expected false, found true")
    activation = str(config.get("activation_function", "Tanh")).rpartition(".")[2]
    if activation not in ACTIVATIONS:
        raise UnsupportedError(
            f"{where}: activation_function: expected one of {', '.join(ACTIVATIONS)}, found "
            f"{activation!r}"
        )
    needed: dict[str, tuple[Any, ...]] = {"linear.weight": expected}
    if config.get("bias", True):
        needed["linear.bias"] = expected[:1]
    read = _weights(folder, module, needed)
    return DenseStep(read[0], read[1] if len(read) > 1 else None, activation)


def _layer_norm(folder: Path, module: _Module, width: int) -> LayerNormStep:
    where, size = folder / module.path / "config.json", module.config.get("dimension")
    if size != width:
        raise CheckpointError(f"{where}: dimension: expected {width}, found {size!r}")
    weight, bias = _weights(folder, module, {"norm.weight": (width,), "norm.bias": (width,)})
    return LayerNormStep(weight, bias)


def _weights(folder: Path, module: _Module, needed: Mapping[str, tuple[Any, ...]]) -> list[Any]:
    """The tensors of a module as float32 arrays, in the order of ``needed``: name -> shape."""
    weights = folder / module.path / "model.safetensors"
    if not weights.is_file():
        raise UnsupportedError(
            f"{weights}: no such file; the weights of {module.kind} must be a safetensors file, "
            "because reading a pickle can run any code"
        )
    files = SafetensorsFiles([weight_file(folder, f"{module.path}/model.safetensors")])
    try:
        shapes = {name: stored.shape for name, stored in files.tensors.items()}
        if shapes != needed:
            raise CheckpointError(f"{weights}: expected {needed}, found {shapes}")
        return [files.tensor(name).to(torch.float32).numpy() for name in needed]
    finally:
        files.close()


def _settings(folder: Path, per_token: bool) -> dict[str, Any]:
    """Fields of a head: prompts, how vectors are compared, and PyLate's of late interaction."""
    file = folder_file(folder, "config_sentence_transformers.json")
    config = {} if file is None else read_json(file, _LIMIT)
    prompts = config.get("prompts") or {}
    if not isinstance(prompts, dict) or not all(isinstance(one, str) for one in prompts.values()):
        raise CheckpointError(f"{file}: prompts: expected texts by name, found {prompts!r:.80}")
    late: dict[str, Any] = {}
    if per_token:
        for kind in ("query", "document"):
            if isinstance(prefix := config.get(f"{kind}_prefix"), str):
                prompts = {kind: prefix, **prompts}
        words = config.get("skiplist_words") or []
        if not isinstance(words, list) or not all(isinstance(word, str) for word in words):
            raise CheckpointError(f"{file}: skiplist_words: expected texts, found {words!r:.80}")
        late = {
            "skipped_words": tuple(words),
            "pads_queries": config.get("do_query_expansion") is True,
        }
    name = config.get("default_prompt_name")
    if name is not None and (not isinstance(name, str) or name not in prompts):
        raise CheckpointError(
            f"{file}: default_prompt_name: expected one of {str(list(prompts))[:80]}, found "
            f"{str(name)[:80]!r}"
        )
    similarity = config.get("similarity_fn_name") or "cosine"
    if similarity == "MaxSim" and per_token:
        similarity = "cosine"
    if similarity not in _SIMILARITIES:
        raise UnsupportedError(
            f"{file}: similarity_fn_name: expected one of {', '.join(_SIMILARITIES)}, found "
            f"{str(similarity)[:80]!r}"
        )
    return {"prompts": prompts, "default_prompt": name, "similarity": similarity, **late}


def _limits(folder: Path) -> tuple[int | None, bool]:
    """The longest text in tokens, and whether texts are read in lower case."""
    file = folder_file(folder, "sentence_bert_config.json")
    config = {} if file is None else read_json(file, _LIMIT)
    most = config.get("max_seq_length")
    if most is not None and (type(most) is not int or most < 1):
        raise CheckpointError(
            f"{file}: max_seq_length: expected a positive integer, found {most!r}"
        )
    return most, config.get("do_lower_case") is True
