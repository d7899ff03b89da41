"""Runs an engine under the bench's load in its own process: JSON lines in, JSON lines out.

Each line gets one reply. On failure the reply is ``{"error"}``, and it is the last one.

- First the fields of an ``Opening`` -> ``{"name", "kv", "vocab_size", "open_s"}``. ``open_s``
  excludes Python's imports.
- ``{"prompts": [[id, ...], ...], "output_len"}`` -> ``{"prefill_s", "decode_s", "decode_tokens"}``:
  greedy, end-of-text ignored, all requests concurrently.
- ``{"logits_of": [id, ...], "path"}`` -> ``{}``; writes float32 ``[ids, vocab_size]`` to ``path``.
- ``{"one": [id, ...], "output_len", "temperature", "schema", "drafts"}`` -> ``{"seconds",
  "tokens"}``: one request through the engine's own class, as an application would run it.
  ``schema``: a JSON schema or null; ``drafts``: whether it drafts from the prompt. ``seconds``:
  after the first token.
- ``{"texts": [text, ...], "path"}`` -> ``{"seconds"}``, of an engine that was opened to embed. The
  vectors are written to ``path``, if there is one: float32 ``[texts, width]``.
"""

from __future__ import annotations

import json
import os
import sys
import time
from array import array
from collections.abc import Callable, Iterable, Iterator
from importlib import import_module
from typing import Any

from .opening import Opening, without_type

#: Engine -> its module here and its class. Engines are imported when they are opened: an
#: environment has one of them.
ENGINES = {
    "embedlm": ("embedlm", "Embedlm"),
    "embedlm-other": ("embedlm", "Embedlm"),
    "llama.cpp": ("llama_cpp", "LlamaCpp"),
    "mistral.rs": ("mistralrs", "MistralRs"),
    "openvino": ("openvino", "OpenVino"),
    "transformers": ("transformers", "Transformers"),
    "vllm": ("vllm", "Vllm"),
}
#: Those that embed texts, in ``embedding``.
EMBEDDING = {
    "embedlm": "Embedlm",
    "embedlm-int8": "Embedlm",
    "embedlm-other": "Embedlm",
    "fastembed": "FastEmbed",
    "llama.cpp": "LlamaCpp",
    "sentence-transformers": "SentenceTransformers",
}


def open_peer(opening: Opening) -> Any:
    """The engine of that name. ``KV`` of its module has the types of keys and values; without it
    the engine checks them."""
    if opening.embeds:
        return getattr(import_module(".embedding", __package__), EMBEDDING[opening.engine])(opening)
    name, kind = ENGINES[without_type(opening.engine)]
    module = import_module(f".{name}", __package__)
    known = getattr(module, "KV", (opening.kv,))
    if opening.kv not in known:
        raise ValueError(f"--kv-dtype: expected one of {', '.join(known)}, found {opening.kv!r}")
    return getattr(module, kind)(opening)


def answers(lines: Iterable[str], open_engine: Callable[..., Any]) -> Iterator[dict[str, Any]]:
    """One reply per line, errors included; the first error is the last reply."""
    questions = (json.loads(line) for line in lines)
    try:
        engine = open_engine(Opening(**next(questions)))
        yield engine.hello
        for question in questions:
            if "logits_of" in question:
                with open(question["path"], "wb") as file:
                    for row in engine.logits(question["logits_of"]):
                        file.write(row.tobytes())
                yield {}
            elif "texts" in question:
                yield embedded(engine, **question)
            elif "one" in question:
                yield engine.run_one(**question)
            else:
                yield engine.measure(**question)
    except ModuleNotFoundError as error:
        yield {"error": f"{error.name} is not installed for {sys.executable}"}
    except Exception as error:
        yield {"error": f"{type(error).__name__}: {error}"}


def embedded(engine: Any, texts: list[str], path: str | None) -> dict[str, float]:
    """The seconds that the vectors of texts took."""
    start = time.perf_counter()
    rows = engine.embed(texts)
    took = time.perf_counter() - start
    if path is not None:
        with open(path, "wb") as file:
            for row in rows:
                file.write(array("f", map(float, row)).tobytes())
    return {"seconds": took}


def serve(open_engine: Callable[..., Any]) -> None:
    """Answer standard input until it ends."""
    # Engines log to standard output, some from C code: redirect it to standard error.
    with os.fdopen(os.dup(1), "w") as out:
        os.dup2(2, 1)
        for answer in answers(iter(sys.stdin.readline, ""), open_engine):
            print(json.dumps(answer), file=out, flush=True)
