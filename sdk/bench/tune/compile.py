"""Compiles the kernels that `embedlm tune` will try, in processes beside the one that measures.

A kernel takes a second to compile, and an entry tries eleven: one process would spend nine tenths
of its time on that. The processes share the kernels, in the order in which they are measured, and
leave them in Triton's cache on the disk. They launch nothing, so they do not disturb the timings.
"""

from __future__ import annotations

import itertools
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from sdk.kernels.system import SYSTEM

if TYPE_CHECKING:
    from sdk.bench.gpu.card import Card
    from sdk.bench.tune.cases import Case
    from sdk.kernels.gpu.launch import Launch
    from sdk.kernels.gpu.tuning import Tiles

#: Processes at most; each has a context on the card (0.5 GiB).
_MOST = 15
#: A weight of each format is enough: others have the same kernels, unless the number of units in
#: a row (of 128 columns) is not a multiple of 16, which Triton treats as another case.
SHAPES = ((2048, 2048), (2048, 1024))


@contextmanager
def compiling(card: Card, model: str | None) -> Iterator[None]:
    """Compile in the background; the processes end with the context. Only for the default layers:
    a model's own are too few kernels, and the interpreter compiles none."""
    count = min(SYSTEM.num_cpus() - 1, _MOST)
    workers = []
    if model is None and not card.tiny:
        command = [sys.executable, "-m", "sdk.bench.tune.compile"]
        for number in range(count):
            arguments = [*command, str(number), str(count)]
            workers.append(subprocess.Popen(arguments, stdout=subprocess.DEVNULL))
    try:
        yield
    finally:
        for worker in workers:
            worker.kill()
            worker.wait()


def candidates(case: Case, begin: Tiles, tokens: int) -> Iterator[Tiles]:
    """The rule's choice and its nearest neighbours, which every search tries; of ``split`` only
    whether K is shared at all, because kernels depend on nothing else of it."""
    from sdk.bench.tune.cases import neighbours

    for split in (min(begin.split, 2), 3 - min(begin.split, 2)):
        middle = begin._replace(split=split)
        yield middle
        for name in ("block_n", "warps", "stages"):
            for side in neighbours(case, tokens, middle, name):
                yield from side[:1]


def kernels_to_compile(card: Card) -> Iterator[tuple[Case, int, Tiles]]:
    """What is to be compiled, in the order in which it is measured: all formats at the first
    numbers of tokens, then at the others."""
    from sdk.bench.tune.cases import default_makes, first_tokens, single_case

    known: set[tuple[int, tuple[int, int], bool, Tiles]] = set()
    for few, shape in itertools.product((True, False), SHAPES):
        for number, make in enumerate(default_makes(card)):
            case = single_case(card, make, *shape)
            for tokens in first_tokens(case.tokens) if few else case.tokens:
                for begin in case.begins(card, tokens):
                    for tiles in candidates(case, begin, tokens):
                        # others: the same kernels as for fewer tokens
                        key = number, shape, tokens == 1, tiles
                        if key not in known:
                            known.add(key)
                            yield case, tokens, tiles


def compile_share(card: Card, number: int, count: int) -> int:
    """Compile every ``count``-th kernel from ``number`` on; returns how many."""
    import torch

    from sdk.bench.tune.cases import kernel_with

    done = 0
    for case, tokens, tiles in itertools.islice(kernels_to_compile(card), number, None, count):
        multiply, rows = case.product(card, tokens)
        out = torch.empty(rows, case.shape[0], dtype=case.outputs, device=card.device)
        try:
            multiply(kernel_with(case, tokens, tiles), case.packed[0], out)
        except Exception as error:  # tiles that do not compile; the search passes over them
            print(f"{case.type}, {tokens} tokens, {tiles}: {error}", file=sys.stderr)
        done += 1
    return done


def compile_launch(launch: Launch) -> None:
    """In place of :meth:`Launch.run`: compile the kernel, and leave it at that."""
    given = {**launch.arguments, **launch.constants, **launch.options}
    launch.kernel.warmup(grid=launch.grid, **given)


def main(arguments: list[str]) -> None:
    from sdk.bench.gpu.card import Card
    from sdk.kernels.gpu.launch import Launch

    Launch.run = compile_launch  # type: ignore[method-assign, assignment]  # this process does nothing else
    number, count = map(int, arguments)
    compile_share(Card({}, rehearsing=True), number, count)


if __name__ == "__main__":
    main(sys.argv[1:])
