"""Compares an engine's logits with exact arithmetic on the same weights."""

from __future__ import annotations

from pathlib import Path
from pydoc_data.topics import topics
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING

from sdk.api.errors import RequestError
from sdk.bench.engines import OURS, Engines
from sdk.bench.report import Result
from sdk.bench.settings import Settings

if TYPE_CHECKING:
    from torch import Tensor

    from sdk.kernels.context import Compute

#: English text that every Python has: its own help pages.
TEXT = topics["assignment"][:2000]
TOKENS = 256
#: Tokens per forward pass of ours, as in chunked prefill.
_CHUNK = 64


def measure_accuracy(settings: Settings, engines: Engines) -> list[Result]:
    """Measures the arithmetic of the weights, so keys and values are float32 by default.

    :raises RequestError: the model has no tokenizer or too small a context.
    """
    import numpy
    import torch

    from sdk import __version__

    kv = "float32" if settings.kv == "auto" else settings.kv
    prompt = english(settings.model)
    exact = _model_logits(settings, prompt, "exact", "float32")
    ours = _model_logits(settings, prompt, "auto", kv)
    found = [compare(Result(OURS, f"{OURS} {__version__}", kv, {}), exact, ours)]
    peer = settings.peer("llama.cpp")  # the only one whose logits can be read
    if peer is None:
        return found
    with TemporaryDirectory() as folder, Engines(settings.failures) as one, one.sparing("accuracy"):
        worker = one.open(settings.opening(peer.engine, 1, TOKENS, kv=kv), peer.python)
        path = Path(folder) / "logits"
        worker.logits(prompt, path)
        rows = numpy.fromfile(path, numpy.float32).reshape(TOKENS, -1)
        theirs = torch.from_numpy(rows)[:, : exact.shape[1]]
        found.append(compare(Result(peer.engine, worker.name, worker.kv, {}), exact, theirs))
    return found


def english(model: str) -> list[int]:
    """The first tokens of :data:`TEXT`."""
    from sdk.loaders.open import open_checkpoint

    checkpoint = open_checkpoint(model)
    try:
        tokenizer = checkpoint.tokenizer
        if tokenizer is None:
            raise RequestError("--suite accuracy: expected a model with a tokenizer, found none")
        tokens: list[int] = tokenizer.encode(TEXT)[:TOKENS]
    finally:
        checkpoint.close()
    if len(tokens) < TOKENS:
        raise RequestError(f"--suite accuracy: expected {TOKENS} tokens, found {len(tokens)}")
    return tokens


def compare(result: Result, exact: Tensor, logits: Tensor) -> Result:
    """Add the relative error of the logits without their mean, in %, and KL(exact || engine)."""
    from sdk.evaluating.divergence import divergences

    centred = exact - exact.mean(-1, keepdim=True)
    difference = logits - logits.mean(-1, keepdim=True) - centred
    kl = float(divergences(exact, logits).mean())
    result.add(error=100 * float(difference.norm() / centred.norm()), kl=kl)
    return result


def _model_logits(settings: Settings, prompt: list[int], compute: Compute, kv: str) -> Tensor:
    """Float32 ``[TOKENS, vocab]``."""
    from sdk.evaluating.logits import logits_of

    options = {"compute": compute, "kv_cache_dtype": kv, "num_threads": settings.threads}
    return logits_of(settings.model, prompt, step=_CHUNK, **options)
