"""Quantize a model into a folder or a .gguf file that this and other engines read.

Works layer by layer, with little memory. If interrupted, finished layers stay in OUT.partial, and
the same command continues from there.
"""

from __future__ import annotations

import argparse

from sdk.api.input_files import read_text


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("file", help="a folder with safetensors, a .gguf file, or a hub id")
    parser.add_argument("out", help="the result: a folder, or a .gguf file; must not exist")
    parser.add_argument(
        "--scheme",
        help="gptq-w4g128 (default for a folder; -w2, -w3, -w8, s for symmetric, -act), awq, int8, "
        "w8a8, rtn-w4g64, fp8, fp8-block; for .gguf: q4_k_m (default), q4_0, q8_0, q6_k, ...",
    )
    parser.add_argument(
        "--calibration",
        metavar="FILE",
        help="calibration text (default: Python's help topics)",
    )
    parser.add_argument(
        "--with",
        dest="library",
        metavar="LIBRARY",
        help="quantize with auto-gptq or autoawq, if installed, instead of this package's code",
    )
    parser.add_argument(
        "--sequences", type=int, default=128, help="the most calibration sequences (default: 128)"
    )
    parser.add_argument(
        "--tokens", type=int, default=512, help="tokens per sequence (default: 512)"
    )
    parser.add_argument("--num-threads", type=int, help="default: the CPUs of this process")


def model_arguments(args: argparse.Namespace) -> list[str]:
    """The models of the command line."""
    return [args.file]


def run(args: argparse.Namespace) -> int:
    from sdk.quantizing import quantize

    text = None
    if args.calibration is not None:
        text = read_text("--calibration", args.calibration)
    print(
        quantize(
            args.file,
            args.out,
            args.scheme,
            calibration=text,
            sequences=args.sequences,
            tokens=args.tokens,
            num_threads=args.num_threads,
            library=args.library,
        )
    )
    return 0
