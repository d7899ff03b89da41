"""How far an engine's logits are from exact arithmetic on the same weights."""

from __future__ import annotations

from pathlib import Path
from pydoc_data.topics import topics
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING

from sdk.cli.bench.engines import OURS, Engines
from sdk.cli.bench.report import Result
from sdk.cli.bench.settings import Settings
from sdk.errors import RequestError

if TYPE_CHECKING:
    from torch import Tensor

    from sdk.kernels.ops import Compute

#: English that every Python has: the text of its own help pages.
TEXT = topics["assignment"][:2000]
TOKENS = 256
_PAGE = 16
#: Tokens per forward pass of ours: like a prompt that comes in chunks.
_CHUNK = 64


def measure_accuracy(settings: Settings, engines: Engines) -> list[Result]:
    """Keys and values in float32 unless asked otherwise: the weights' arithmetic is the question.

    :raises RequestError: for a model without a tokenizer or with too small a context.
    """
    import numpy
    import torch

    from sdk import __version__

    kv = "float32" if settings.kv == "auto" else settings.kv
    prompt = english(settings.model)
    exact = _model_logits(settings, prompt, "exact", "float32")
    ours = _model_logits(settings, prompt, "auto", kv)
    found = [compare(Result(OURS, f"{OURS} {__version__}", kv, {}), exact, ours)]
    with TemporaryDirectory() as folder, Engines() as readers:
        for peer in settings.engines(without=["vllm", "transformers"])[1:]:
            opening = settings.opening(peer.engine, 1, TOKENS, kv=kv)
            worker = readers.open(opening, peer.python)
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
    """Relative error of the logits without their mean, in percent, and KL(exact || engine)."""
    centred = exact - exact.mean(-1, keepdim=True)
    difference = logits - logits.mean(-1, keepdim=True) - centred
    expected, found = exact.log_softmax(-1), logits.log_softmax(-1)
    kl = (expected.exp() * (expected - found)).sum(-1).mean()
    result.add(error=100 * float(difference.norm() / centred.norm()), kl=float(kl))
    return result


def _model_logits(settings: Settings, prompt: list[int], compute: Compute, kv: str) -> Tensor:
    """Float32 ``[TOKENS, vocab]`` straight from the model, without an engine around it."""
    import torch

    from sdk.engine.key_centres import centre_keys
    from sdk.engine.kv_cache import KVCache, kv_spec
    from sdk.kernels.batch import AttentionBatch
    from sdk.kernels.ops import Ops
    from sdk.loaders.open import open_checkpoint
    from sdk.models.auto import build_model
    from sdk.models.parallel import Mesh

    checkpoint = open_checkpoint(settings.model)
    ops = Ops(compute=compute, num_threads=settings.threads)
    rows = []
    try:
        model = build_model(checkpoint, Mesh(), ops, max_model_len=TOKENS)
        spec = kv_spec(model.config, model.config.num_kv_heads, _PAGE, kv)
        cache = KVCache(spec, TOKENS // _PAGE)
        centre_keys(cache, model)
        pages = torch.arange(TOKENS // _PAGE, dtype=torch.int32)
        with torch.inference_mode():
            for begin in range(0, TOKENS, _CHUNK):
                positions = torch.arange(begin, begin + _CHUNK)
                batch = AttentionBatch(
                    positions=positions,
                    query_start=torch.tensor([0, _CHUNK], dtype=torch.int32),
                    context_len=torch.tensor([begin + _CHUNK], dtype=torch.int32),
                    page_table=pages[None],
                    slots=positions,
                    page_size=_PAGE,
                    max_query_len=_CHUNK,
                    max_context_len=begin + _CHUNK,
                )
                ids = torch.tensor(prompt[begin : begin + _CHUNK])
                # The model may keep its result in memory it uses again.
                rows.append(model.logits(model(ids, batch, cache.layers)).clone())
    finally:
        checkpoint.close()
        ops.close()
    return torch.cat(rows)
