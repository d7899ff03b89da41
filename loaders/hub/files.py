"""Selects the files of the requested model in a hub repository."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from fnmatch import fnmatchcase
from pathlib import Path

from sdk.quant.errors import CheckpointError

#: Other files than weights: config, tokenizer, template. No code (.py) and no pickles.
_SMALL = (".json", ".jinja", ".model", ".txt")
_INDEX = ".safetensors.index.json"
_PART = re.compile(r"-\d{5}-of-\d{5}(?=\.gguf$)")
#: The type at the end of a file name: ``model-UD-Q4_K_XL.gguf``, ``model.f16.gguf``.
_LABEL = re.compile(r"(?:^|[-._/])((?:UD-)?(?:I?Q\d|TQ\d|MXFP4|NVFP4|B?F16|F32)[A-Z0-9_]*)$", re.I)
#: GGUF files that are not models themselves.
_NO_MODEL = re.compile(r"mmproj|imatrix", re.I)


def gguf_files(repo: str, names: Sequence[str], tag: str | None, filename: str | None) -> list[str]:
    """The files of the requested GGUF model, in the order of its parts.

    Raises:
        CheckpointError: no model matches, or several do; the message lists them.
    """
    models = _models(names)
    if filename is not None:
        found = _named(models, names, filename)
        asked = f"filename={filename!r}"
    elif tag is not None:
        labels = {base: _label(base) for base in models}
        found = [base for base in models if labels[base].lower() == tag.lower()]
        asked = f"{tag!r}"
    else:
        found, asked = list(models), "one"
    if len(found) == 1:
        return models.get(found[0], [found[0]])
    if not models:
        raise CheckpointError(f"{repo}: expected a .gguf file in it, found {_some(names)}")
    if found:
        raise CheckpointError(f"{repo}: several GGUF models in it; {_how_to_name(repo, found)}")
    raise CheckpointError(
        f"{repo}: no GGUF model in it is {asked}; {_how_to_name(repo, list(models))}"
    )


def has_gguf(names: Sequence[str]) -> bool:
    return bool(_models(names))


def small_files(names: Sequence[str]) -> list[str]:
    """The files that a safetensors folder needs besides its weights, with the shard index."""
    return [name for name in names if "/" not in name and name.endswith(_SMALL)]


def weight_files(names: Sequence[str], folder: Path) -> list[str]:
    """The safetensors files of a repository, whose small files are already in ``folder``."""
    found = [name for name in names if "/" not in name and name.endswith(".safetensors")]
    indices = [name for name in names if "/" not in name and name.endswith(_INDEX)]
    if f"model{_INDEX}" in indices:
        indices = [f"model{_INDEX}"]
    if len(indices) == 1:
        listed = _listed(folder / indices[0])
        return [name for name in found if name in listed]
    if "model.safetensors" in found:
        return ["model.safetensors"]
    # Mistral's own files repeat the contents of the others, unless there are no others.
    own = [name for name in found if not name.startswith(("consolidated", "adapter_"))]
    return own or [name for name in found if name.startswith("consolidated")]


def _listed(index: Path) -> set[str]:
    try:
        return set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values())
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise CheckpointError(f"{index}: expected an index of shards: {error!r}") from None


def _models(names: Sequence[str]) -> dict[str, list[str]]:
    """Files by model; a model's name is its file name without part numbers."""
    models: dict[str, list[str]] = {}
    for name in sorted(names):
        if name.endswith(".gguf") and not _NO_MODEL.search(name):
            models.setdefault(_PART.sub("", name), []).append(name)
    return models


def _label(base: str) -> str:
    found = _LABEL.search(base.removesuffix(".gguf"))
    return "" if found is None else found[1]


def _named(models: dict[str, list[str]], names: Sequence[str], filename: str) -> list[str]:
    """Models with a file of this path, name or pattern (``*q4_k_m.gguf``)."""
    base = _PART.sub("", filename)
    if base in models:
        return [base]
    if filename in names:
        return [filename]
    return [
        base
        for base, parts in models.items()
        if any(fnmatchcase(part, filename) for part in parts)
        or any(fnmatchcase(part.rpartition("/")[2], filename) for part in parts)
    ]


def _how_to_name(repo: str, bases: list[str]) -> str:
    labels = [_label(base) for base in bases]
    if all(labels) and len(set(labels)) == len(labels):
        return f"name one, like {repo}:{labels[0]}; there are {', '.join(labels)}"
    return f"name one, like filename={bases[0]!r}; there are {', '.join(bases)}"


def _some(names: Sequence[str]) -> str:
    return ", ".join(names[:5]) + (", ..." if len(names) > 5 else "") or "nothing"
