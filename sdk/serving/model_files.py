"""What the files of a served model are: size, family, parameters and quantization."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Any

#: llama.cpp's names of ``general.file_type`` (include/llama.h, ``llama_ftype``).
_FILE_TYPES: Mapping[int, str] = MappingProxyType(
    {
        **dict(enumerate(("F32", "F16", "Q4_0", "Q4_1"))),
        **dict(enumerate(("Q8_0", "Q5_0", "Q5_1", "Q2_K"), 7)),
        **dict(enumerate(("Q3_K_S", "Q3_K_M", "Q3_K_L", "Q4_K_S", "Q4_K_M", "Q5_K_S"), 11)),
        **dict(enumerate(("Q5_K_M", "Q6_K", "IQ2_XXS", "IQ2_XS", "Q2_K_S", "IQ3_XS"), 17)),
        **dict(enumerate(("IQ3_XXS", "IQ1_S", "IQ4_NL", "IQ3_S", "IQ3_M", "IQ2_S"), 23)),
        **dict(enumerate(("IQ2_M", "IQ4_XS", "IQ1_M", "BF16"), 29)),
        **dict(enumerate(("TQ1_0", "TQ2_0", "MXFP4_MOE", "NVFP4"), 36)),
    }
)
_PART = re.compile(r"-\d{5}-of-\d{5}\.gguf")


@dataclass(frozen=True, slots=True)
class ModelFiles:
    """``size``: bytes on disk. ``modified``: when they were written, seconds since 1970.
    ``family``: the architecture. ``quantization``: the mixture of a GGUF file, else the type of
    most bytes. ``config``: with Hugging Face's names."""

    size: int = 0
    modified: float | None = None
    format: str = ""
    family: str = ""
    parameters: int = 0
    quantization: str = ""
    config: Mapping[str, Any] = field(default_factory=dict)


def files_of(llm: Any) -> ModelFiles:
    """Those of an LLM; empty for one without weights (:class:`sdk.testing.FakeLLM`)."""
    facts = getattr(getattr(llm, "_served", None), "facts", None)
    if facts is None:
        return ModelFiles()
    entries, formats = facts.headers.entries(), Counter[str]()
    for entry in entries:
        formats[entry.format] += entry.nbytes
    found = weight_files(Path(facts.path))
    kind = facts.headers.file_type
    most = formats.most_common(1)[0][0] if formats else ""
    return ModelFiles(
        sum(path.stat().st_size for path in found) or sum(entry.nbytes for entry in entries),
        max((path.stat().st_mtime for path in found), default=None),
        facts.headers.format,
        facts.model_config.model_type,
        sum(entry.num_elements for entry in entries),
        _FILE_TYPES.get(kind, most) if isinstance(kind, int) else most,
        facts.values,
    )


def weight_files(path: Path) -> list[Path]:
    """The files with weights; none if they have been moved since the model was loaded."""
    if path.is_dir():
        return sorted(path.glob("*.safetensors"))
    if (part := _PART.search(path.name)) is not None:
        return sorted(path.parent.glob(f"{path.name[: part.start()]}-*-of-*.gguf"))
    return [path] if path.exists() else []


def number_text(count: int) -> str:
    """A number of parameters: ``134.52M``, ``8.0B``."""
    for power, unit, places in (
        (10**12, "T", 1),
        (10**9, "B", 1),
        (10**6, "M", 2),
        (10**3, "K", 0),
    ):
        if count >= power:
            return f"{count / power:.{places}f}{unit}"
    return str(count)
