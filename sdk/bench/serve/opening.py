"""From options to what is measured: an engine in this process, a URL, or servers to start."""

from __future__ import annotations

import argparse
import contextlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from sdk import __version__
from sdk.api.errors import RequestError
from sdk.bench.engines import OURS
from sdk.bench.models import ModelFiles, write_tokenizer
from sdk.bench.serve.http_connection import Address
from sdk.bench.serve.servers import OWN, Launch, server_at, start
from sdk.bench.serve.subjects import OwnEngine, Subject, request_headers
from sdk.cli.engine_arguments import engine_options
from sdk.cli.text_file import read_options
from sdk.kernels.system import SYSTEM

#: Tokens of a request that started servers have room for, without --max-model-len.
_CONTEXT = 2048
#: Requests at a time that they are started for, without --max-num-seqs: embedlm's own default.
_REQUESTS = 64


@contextlib.contextmanager
def opened_subjects(
    args: argparse.Namespace, progress: Callable[[str], None]
) -> Iterator[list[Subject]]:
    """What the options name; closed at the end.

    :raises RequestError: options do not fit together.
    :raises SdkError: a server does not start or answer.
    """
    options = engine_options(args, "max_num_seqs")
    if args.threads:
        options["num_threads"] = args.threads
    if args.url is not None:
        if args.http or args.against or args.options or options:
            raise RequestError("--url measures a server that runs: leave out options of engines")
        yield [_behind_url(args)]
        return
    if args.header or args.body:
        raise RequestError("--header and --body need --url")
    with contextlib.ExitStack() as stack:
        files = stack.enter_context(ModelFiles(args.model))
        if args.http or args.against:
            yield _started(args, options, files, stack, progress)
            return
        progress("loading the model")
        options = {**read_options(args.options), **options}
        yield [stack.enter_context(own_engine(files.path, options, not args.stop_at_eos))]


@contextlib.contextmanager
def own_engine(model: str, options: dict[str, Any], ignore_eos: bool = True) -> Iterator[OwnEngine]:
    """An ``LLM`` in this process.

    :raises RequestError: an unknown or invalid option.
    """
    from sdk.llm import LLM

    try:
        llm = LLM(model, **options)
    except TypeError as error:
        raise RequestError(str(error)) from None
    with llm:
        yield OwnEngine(f"{OURS} {__version__}", llm, ignore_eos)


def _behind_url(args: argparse.Namespace) -> Subject:
    try:
        headers = request_headers(args.header)
    except ValueError as error:
        raise RequestError(f"--header: expected 'Name: value', found {str(error)!r}") from None
    address = Address.parse(args.url)
    return server_at(
        args.url, address, args.model, headers, args.body, ignore_eos=not args.stop_at_eos
    )


def _started(
    args: argparse.Namespace,
    options: dict[str, Any],
    files: ModelFiles,
    stack: contextlib.ExitStack,
    progress: Callable[[str], None],
) -> list[Subject]:
    """Our server, then those of ``--against``."""
    own = options.keys() - {"num_threads", "max_num_seqs", "max_model_len"}
    if own or args.options:
        raise RequestError(
            "--http and --against start servers for comparisons: of the options of engines only "
            "--threads, --max-num-seqs and --max-model-len apply"
        )
    subjects: list[Subject] = []
    for peer in (OWN, *args.against):
        launch = Launch(
            files.path if peer.engine in (OURS, "llama.cpp") else _unpacked(files),
            args.threads or SYSTEM.num_cpus(),
            args.max_num_seqs or _REQUESTS,
            args.max_model_len or _CONTEXT,
        )
        process, server = start(peer, launch, progress, ignore_eos=not args.stop_at_eos)
        stack.enter_context(process)
        subjects.append(server)
    return subjects


def _unpacked(files: ModelFiles) -> str:
    """The model with its tokenizer as a folder that vLLM reads."""
    folder = files.unpacked()
    if folder != files.path and not (Path(folder) / "tokenizer_config.json").exists():
        write_tokenizer(Path(files.path), Path(folder))
    return folder
