"""Vectors per second: many texts in one call, and one text at a time, tokenizing included."""

from __future__ import annotations

import random
from collections.abc import Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from sdk.api.errors import RequestError
from sdk.bench.engines import EMBEDDING, OURS, OURS_INT8, Engines, Peer, Worker
from sdk.bench.peers.opening import Opening
from sdk.bench.report import Result
from sdk.bench.settings import Settings, in_rounds

#: The fewest and most words of a text: 10 to 400 tokens.
SHORTEST, LONGEST = 8, 330
#: Texts of the second case, one call for each.
SINGLE = 50
#: The engine whose vectors are the reference.
_REFERENCE = "sentence-transformers"
_WORDS = (
    "the of and to in is that for it as was with be by on not he his but at are this have from or "
    "had an they which one you were all her she there would their we him been has when who will "
    "more no if out so what time up go about than into could state only new year some take come "
    "these know see use get like then first any work now may such give over think most even find "
    "day also after way many must look before great back through long where much should well "
    "people down own just because good each those feel seem how high too place little world very "
    "still nation hand old life tell write become here show house both between need mean call "
    "develop under last right move thing general school never same another begin while number "
    "part turn real leave might want point form off child few small since against ask late home "
    "interest large person end open public follow during present without again hold govern around"
)


def texts_of(count: int, seed: int) -> list[str]:
    """Texts of common words, the same every time; short and long ones are equally frequent."""
    draw = random.Random(seed)
    words = _WORDS.split()
    sizes = [draw.randint(SHORTEST, LONGEST) for _ in range(count)]
    return [" ".join(draw.choices(words, k=size)) + "." for size in sizes]


def measure_embedding(settings: Settings, engines: Engines) -> list[Result]:
    """Opens its own engines, ours with the model's weights and with weights in 8 bits: the peers of
    other suites cannot embed.

    :raises RequestError: llama.cpp has no GGUF file.
    """
    ours = [Peer(OURS), Peer(OURS_INT8)]
    peers = [*ours, *(peer for peer in settings.peers if peer.engine in EMBEDDING)]
    openings = [_opening(settings, peer.engine) for peer in peers]
    with Engines(settings.failures) as opened, TemporaryDirectory() as folder:
        for peer, opening in zip(peers, openings, strict=True):
            settings.progress(f"opening {peer.engine}")
            with opened.sparing():
                opened.open(opening, peer.python)
        count = settings.texts
        many, single = texts_of(count, 1), texts_of(SINGLE, 2)
        cosines = _cosines(opened, single, Path(folder))

        def batch(engine: Worker, number: int) -> dict[str, float]:
            return {"texts_s": count / engine.embed(many), **cosines[id(engine)]}

        def one_by_one(engine: Worker, number: int) -> dict[str, float]:
            took = sum(engine.embed([text]) for text in single)
            return {"texts_s": SINGLE / took, **cosines[id(engine)]}

        found = in_rounds(settings, opened, {"texts at once": count}, batch)
        return found + in_rounds(settings, opened, {"texts at once": 1}, one_by_one)


def _opening(settings: Settings, engine: str) -> Opening:
    model = settings.model
    if engine == "llama.cpp" and not model.endswith(".gguf"):
        if settings.gguf is None:
            raise RequestError(
                "--against llama.cpp: expected --gguf FILE, the same model as a GGUF file, which "
                "the embed suite needs for llama.cpp, found none"
            )
        model = settings.gguf
    return Opening(engine, model, settings.threads, 1, 0, embeds=True)


def _cosines(engines: Engines, texts: Sequence[str], folder: Path) -> dict[int, dict[str, float]]:
    """The smallest cosine of each engine's vectors with the reference's; also warms up."""
    import numpy as np  # parsing a command line must not

    vectors: dict[int, Any] = {}
    for index, engine in enumerate([*engines.opened]):
        with engines.sparing("warm-up"):
            engine.embed(texts, folder / str(index))
            rows = np.fromfile(folder / str(index), np.float32).reshape(len(texts), -1)
            vectors[id(engine)] = rows / np.linalg.norm(rows, axis=1, keepdims=True)
    reference = next((id(one) for one in engines.opened if one.engine == _REFERENCE), None)
    if reference is None:
        return {engine: {} for engine in vectors}
    return {
        engine: {"cosine": float((rows * vectors[reference]).sum(1).min())}
        for engine, rows in vectors.items()
    }
