"""The tables of docs/formats.md, made from what the code does; a test compares.

``python tests/accuracy/support_matrix.py`` writes them anew.

A row of the first table is a tensor of that type as a file would hold it, one of the second a layer
of a checkpoint in tests/golden: read, bound to its kernels, measured.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "formats.md"
GOLDEN = ROOT / "tests" / "golden"
ROWS, COLUMNS = 64, 1024
#: The layer looked at in a folder: a plain one, whatever the model.
LAYER = "model.layers.0.mlp.down_proj"


def gguf_table() -> str:
    """Every tensor type of a GGUF file."""
    from sdk.kernels.operators.ops import Ops
    from sdk.loaders.formats.gguf_decode import decode_matrix
    from sdk.loaders.formats.gguf_types import GGUF_TYPES
    from sdk.quant.weight import weight_of

    rows = []
    with_auto, exact = Ops(num_threads=1), Ops(num_threads=1, compute="exact")
    for kind in GGUF_TYPES.values():
        size = COLUMNS // kind.elements * kind.nbytes
        cells = [kind.name, f"{kind.nbytes * 8 / kind.elements:.4g}"]
        for ops in (with_auto, exact):
            zeros = np.zeros((ROWS, size), dtype=np.uint8)
            weight = weight_of(decode_matrix(kind, zeros, COLUMNS, kind.name, factor=1.0))
            weight.bind(ops)
            if ops is with_auto:
                cells += [str(weight.spec), f"{weight.nbytes * 8 / (ROWS * COLUMNS):.4g}"]
            cells.append(weight.choices()[0].name)
        rows.append(cells)
    with_auto.close()
    exact.close()
    head = ["type", "bits in the file", "runs as", "bits in memory", "kernel", "kernel, exact"]
    return _markdown(head, rows)


def folder_table() -> str:
    """Every quantized safetensors folder among the goldens."""
    head = ["method", "written by", "layer", "bits in the file", "runs as", "bits in memory"]
    return _markdown([*head, "kernel", "kernel, exact"], list(_folders()))


def _folders() -> Iterator[list[str]]:
    from sdk import LLM
    from sdk.loaders.open import open_checkpoint

    for folder in sorted(GOLDEN.iterdir()):
        if not (folder / "config.json").is_file():
            continue
        origin = json.loads((folder / "origin.json").read_text())
        checkpoint = open_checkpoint(folder)
        try:
            method = checkpoint.config.get("quantization_config", {}).get("quant_method", "")
            entries = {entry.name.removesuffix(".weight"): entry for entry in checkpoint.entries()}
        finally:
            checkpoint.close()
        layers = {}
        for compute in ("auto", "exact"):
            room = {"max_model_len": 32, "max_num_seqs": 1, "max_num_batched_tokens": 32}
            with LLM(folder, compute=compute, skip_tokenizer_init=True, **room) as llm:
                layers[compute] = {layer.name: layer for layer in llm.quant_report().layers}
        if LAYER not in layers["auto"]:
            continue
        found = layers["auto"][LAYER]
        writer = f"{origin['generator']} {str(origin['generator_version']).split()[0].rstrip(';')}"
        yield [
            method or "-",
            writer,
            entries[LAYER].format,
            f"{entries[LAYER].bits_per_weight:.4g}",
            found.format,
            f"{found.bits_per_weight:.4g}",
            found.kernel,
            layers["exact"][LAYER].kernel,
        ]


def refused_list() -> str:
    """Methods that are refused by name."""
    from sdk.loaders.formats.quantized import REFUSED

    return "\n".join(f"- {words}" for words in REFUSED.values())


TABLES = {"gguf": gguf_table, "folders": folder_table, "refused": refused_list}


def filled(page: str) -> str:
    """The page with every table made anew, between its marks ``<!-- name -->``."""
    for name, table in TABLES.items():
        begin, end = f"<!-- {name} -->\n", f"\n<!-- /{name} -->"
        before, rest = page.split(begin)
        _, after = rest.split(end)
        page = before + begin + table() + end + after
    return page


def _markdown(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


if __name__ == "__main__":
    sys.path.insert(0, str(ROOT))
    PAGE.write_text(filled(PAGE.read_text()))
