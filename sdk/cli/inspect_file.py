"""Show what is in a model file: architecture, formats, bits and bytes per part."""

from __future__ import annotations

import argparse
import json
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from sdk.api.load_progress import reporting
from sdk.api.sizes import format_bytes
from sdk.cli.table import format_table

if TYPE_CHECKING:
    from sdk.loading.quant_report import QuantReport
    from sdk.quant.checkpoint import TensorEntry

#: The parts of a model and pieces of their tensors' names; the first match wins. Names are those of
#: the file, so both GGUF's and Hugging Face's occur.
PARTS: tuple[tuple[str, tuple[str, ...]], ...] = (
    ("norms", ("norm", "layernorm")),
    ("head", ("lm_head", "output.weight")),
    ("embeddings", ("embed_tokens", "token_embd", "wte", "embed")),
    ("attention", ("attn", "attention")),
    ("mlp", ("mlp", "ffn", "experts")),
)


@dataclass(slots=True)
class PartTotals:
    """Totals over the tensors of one part."""

    tensors: int = 0
    parameters: int = 0
    nbytes: int = 0
    formats: Counter[str] = field(default_factory=Counter)

    @property
    def bits(self) -> float:
        return self.nbytes * 8 / max(self.parameters, 1)

    def add(self, entry: TensorEntry) -> None:
        self.tensors += 1
        self.parameters += entry.num_elements
        self.nbytes += entry.nbytes
        self.formats[entry.format] += entry.nbytes

    def to_json(self) -> dict[str, Any]:
        return {
            "tensors": self.tensors,
            "parameters": self.parameters,
            "bytes": self.nbytes,
            "bits_per_weight": round(self.bits, 4),
            "formats": dict(self.formats),
        }


def part_of(name: str) -> str:
    """``blk.0.attn_q.weight`` -> ``attention``; ``other`` if no part matches."""
    # "output.weight" is GGUF's head, but only as a whole name: "attn_output.weight" is not.
    for part, pieces in PARTS:
        for piece in pieces:
            if piece == name or (piece != "output.weight" and piece in name):
                return part
    return "other"


def sum_parts(entries: Iterable[TensorEntry]) -> dict[str, PartTotals]:
    """Totals per part, in the order of :data:`PARTS`, without the empty ones."""
    totals = {part: PartTotals() for part in [*(part for part, _ in PARTS), "other"]}
    for entry in entries:
        totals[part_of(entry.name)].add(entry)
    return {part: total for part, total in totals.items() if total.tensors}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("file", help="a .gguf file, a folder with safetensors, or a hub id")
    parser.add_argument("--tensors", action="store_true", help="list every tensor")
    parser.add_argument(
        "--kernels", action="store_true", help="load the model: every layer's kernel, and why"
    )
    parser.add_argument("--json", action="store_true", help="print JSON")


def model_arguments(args: argparse.Namespace) -> list[str]:
    """The models of the command line."""
    return [args.file]


def run(args: argparse.Namespace) -> int:
    from sdk.loaders.open import is_remote, read_headers

    with reporting("download", "B", None, bar=is_remote(args.file)) as progress:
        found = read_headers(args.file, progress)
    entries, config = list(found.entries), dict(found.config)
    facts = {"file": str(found.path), "format": found.format}
    if found.kv_scales:
        least, most = min(found.kv_scales.values()), max(found.kv_scales.values())
        facts["kv_scales"] = f"{len(found.kv_scales)}, {least:.3g} to {most:.3g}, not used"
    report = kernels(args.file) if args.kernels else None
    show = to_json if args.json else to_text
    print(show(facts, config, entries, report, tensors=args.tensors))
    return 0


def kernels(file: str) -> QuantReport:
    """Load the model with very little room for requests, and close it again."""
    from sdk.llm import LLM

    room: dict[str, Any] = {"max_model_len": 64, "max_num_seqs": 1, "max_num_batched_tokens": 64}
    with LLM(file, skip_tokenizer_init=True, **room) as llm:
        return llm.quant_report()


def to_json(
    facts: Mapping[str, str],
    config: Mapping[str, Any],
    entries: list[TensorEntry],
    kernels: QuantReport | None,
    *,
    tensors: bool,
) -> str:
    whole = PartTotals()
    for entry in entries:
        whole.add(entry)
    report: dict[str, Any] = {
        **facts,
        "config": config,
        "total": whole.to_json(),
        "parts": {part: total.to_json() for part, total in sum_parts(entries).items()},
    }
    if tensors:
        report["tensors"] = [
            {"name": e.name, "shape": list(e.shape), "format": e.format, "bytes": e.nbytes}
            for e in entries
        ]
    if kernels is not None:
        report["kernels"] = kernels.to_dict()
    return json.dumps(report, indent=2, default=str)


def to_text(
    facts: Mapping[str, str],
    config: Mapping[str, Any],
    entries: list[TensorEntry],
    kernels: QuantReport | None,
    *,
    tensors: bool,
) -> str:
    parts = sum_parts(entries)
    whole = PartTotals()
    for entry in entries:
        whole.add(entry)
    rows = [_part_row(part, total) for part, total in parts.items()]
    rows.append(_part_row("total", whole))
    head = ["part", "formats", "tensors", "parameters", "bytes", "bits/weight"]
    blocks = [_summary(facts, config), format_table(head, rows, left=2)]
    if tensors:
        listed = [
            [e.name, e.format, "x".join(map(str, e.shape)), format_bytes(e.nbytes)] for e in entries
        ]
        blocks.append(format_table(["tensor", "format", "shape", "bytes"], listed, left=2))
    if kernels is not None:
        blocks.append(_kernel_table(kernels))
    return "\n\n".join(blocks)


def _kernel_table(report: QuantReport) -> str:
    head = ["layer", "format", "kernel", "shape", "bits/weight", "bytes"]
    rows = [
        [
            layer.name,
            layer.format,
            layer.kernel,
            "x".join(map(str, layer.shape)),
            f"{layer.bits_per_weight:.2f}",
            format_bytes(layer.nbytes),
        ]
        for layer in report.layers
    ]
    reasons = dict.fromkeys(
        f"{layer.format}: not {name}: {why}"
        for layer in report.layers
        for name, why in layer.declined
    )
    return "\n".join([format_table(head, rows, left=3), *reasons])


def _part_row(part: str, total: PartTotals) -> list[str]:
    formats = " ".join(name for name, _ in total.formats.most_common())
    return [
        part,
        formats,
        str(total.tensors),
        f"{total.parameters / 1e6:.1f} M",
        format_bytes(total.nbytes),
        f"{total.bits:.2f}",
    ]


def _summary(facts: Mapping[str, str], config: Mapping[str, Any]) -> str:
    def get(name: str) -> str:
        return str(config.get(name, "unknown"))

    window = config.get("sliding_window")
    experts = config.get("num_experts") or config.get("num_local_experts")
    mixture = f"experts       {experts}, {get('num_experts_per_tok')} for each token"
    return "\n".join(
        [
            f"file          {facts['file']} ({facts['format']})",
            f"architecture  {get('model_type')}, {get('num_hidden_layers')} layers, "
            f"hidden size {get('hidden_size')}",
            f"attention     {get('num_attention_heads')} heads, "
            f"{get('num_key_value_heads')} for keys and values"
            + (f", sliding window {window}" if window else ""),
            *([mixture] if experts else []),
            f"context       {get('max_position_embeddings')} tokens",
            f"vocabulary    {get('vocab_size')} tokens",
            *([f"KV scales     {facts['kv_scales']}"] if "kv_scales" in facts else []),
        ]
    )
