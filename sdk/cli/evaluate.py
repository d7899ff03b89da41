"""Measure what quantization costs: divergence from a reference on the same text, bytes and speed.

Without --reference a model is compared with itself in exact arithmetic. Both are in memory at once.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from sdk.api.input_files import read_text
from sdk.cli.table import format_table
from sdk.cli.text_file import check_writable

if TYPE_CHECKING:
    from sdk.evaluating import Evaluation
    from sdk.evaluating.plot import Placed

#: Options of the engine that is evaluated.
OPTIONS = (
    "compute",
    "kv_cache_dtype",
    "kv_policy",
    "kv_keep",
    "quantization",
    "num_threads",
    "memory",
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("file", nargs="+", help="one or more .gguf files, folders or hub ids")
    parser.add_argument("--reference", help="the model to compare with (default: FILE itself)")
    parser.add_argument(
        "--text",
        metavar="FILE",
        help="the text that both read (default: the first 64 KiB of Python's help topics)",
    )
    parser.add_argument(
        "--windows", type=int, default=8, help="the most sequences of the text (default: 8)"
    )
    parser.add_argument(
        "--tokens", type=int, default=512, help="tokens per sequence (default: 512)"
    )
    parser.add_argument("--compute", help="auto (default), or exact: activations are not quantized")
    parser.add_argument("--kv-cache-dtype", help="auto (default), float32, float16, int8, ...")
    parser.add_argument(
        "--kv-policy", help="fp16>int8>int4, ...; every page moves to its lowest tier"
    )
    parser.add_argument(
        "--kv-keep",
        type=int,
        nargs=2,
        metavar=("FIRST", "LAST"),
        help="pages at both ends that stay in the first tier",
    )
    parser.add_argument(
        "--quantization", help="quantize FILE while it is loaded: int4, int8, fp8, ..."
    )
    parser.add_argument("--memory", help="hard budget of FILE's engine, such as 1GiB")
    parser.add_argument("--num-threads", type=int, help="default: the CPUs of this process")
    parser.add_argument(
        "--json", metavar="FILE", help="write all numbers; - for stdout instead of the table"
    )
    parser.add_argument("--markdown", metavar="FILE", help="write the table")
    parser.add_argument(
        "--plot", metavar="FILE", help="plot bytes, loss and speed; needs embedlm[bench]"
    )


def model_arguments(args: argparse.Namespace) -> list[str]:
    """The models of the command line."""
    return [*args.file, *([] if args.reference is None else [args.reference])]


def run(args: argparse.Namespace) -> int:
    text = None if args.text is None else read_text("--text", args.text)
    given = {name: getattr(args, name) for name in OPTIONS if getattr(args, name) is not None}
    from sdk.evaluating import evaluate
    from sdk.evaluating.plot import check_matplotlib

    if args.plot:
        check_matplotlib("--plot")
    for option in ("json", "markdown", "plot"):
        path = getattr(args, option)
        check_writable(f"--{option}", None if path == "-" else path)
    given |= {"text": text, "windows": args.windows, "tokens": args.tokens}
    found: list[Evaluation] = []
    try:
        for file in args.file:
            found.append(evaluate(file, args.reference, **given))
    finally:  # if one fails, report those before it, which took minutes
        if found:
            _tell(found, args)
    return 0


def _tell(found: Sequence[Evaluation], args: argparse.Namespace) -> None:
    """Print and write the results as requested."""
    from sdk.evaluating.plot import write_plot

    data = json.dumps([one.to_dict() for one in found], indent=2)
    head, rows = cells(found)
    if args.json and args.json != "-":
        Path(args.json).write_text(data + "\n", encoding="utf-8")
    if args.markdown:
        Path(args.markdown).write_text(to_markdown(found), encoding="utf-8")
    if args.plot:
        write_plot(args.plot, placed(found), heading(found[0]))
    print(data if args.json == "-" else f"{heading(found[0])}\n\n{format_table(head, rows)}")


def heading(one: Evaluation) -> str:
    """The text that was read, and the reference."""
    return (
        f"{one.windows} sequences of {one.tokens} tokens; perplexity of {_name(one.reference)} "
        f"{one.reference_perplexity:.3f}"
    )


def cells(found: Sequence[Evaluation]) -> tuple[list[str], list[list[str]]]:
    """Headings, and one row per model."""
    head = ["model", "compute", "KV", "bits", "weights MB", "KV B/token", "KLD", "KLD p99"]
    head += ["top-1 %", "perplexity", "prompt tok/s", "decode tok/s"]
    return head, [
        [
            _name(one.model),
            one.compute,
            one.kv_dtype,
            f"{one.bits_per_weight:.3f}",
            f"{one.weight_bytes / 1e6:.1f}",
            str(one.kv_bytes_per_token),
            f"{one.kl_mean:.4f}",
            f"{one.kl_p99:.3f}",
            f"{100 * one.top1:.1f}",
            f"{one.perplexity:.3f}",
            f"{one.prompt_tokens_per_second:.0f}",
            f"{one.decode_tokens_per_second:.1f}",
        ]
        for one in found
    ]


def to_markdown(found: Sequence[Evaluation]) -> str:
    """The heading and the table."""
    head, rows = cells(found)
    marks = ["---" if i < 3 else "---:" for i in range(len(head))]
    table = "\n".join(f"| {' | '.join(row)} |" for row in [head, marks, *rows])
    return f"{heading(found[0])}.\n\n{table}\n"


def placed(found: Sequence[Evaluation]) -> list[Placed]:
    """The models for a plot, with the keys and values of one sequence."""
    from sdk.evaluating.plot import Placed

    return [
        Placed(
            _name(one.model),
            one.weight_bytes + one.kv_bytes_per_token * one.tokens,
            one.kl_mean,
            one.decode_tokens_per_second,
        )
        for one in found
    ]


def _name(model: str) -> str:
    """The model's name without its folder."""
    return Path(model).name or model
