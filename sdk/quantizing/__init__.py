"""Quantizes models into files that this and other engines read."""

from __future__ import annotations

import hashlib
from contextlib import closing
from os import PathLike
from pathlib import Path

from torch import Tensor

from sdk.api.config import ProgressCallback
from sdk.api.errors import QuantizationError, UnsupportedError
from sdk.api.load_progress import reporting
from sdk.loaders.model_shapes import num_experts
from sdk.loaders.open import open_checkpoint
from sdk.loaders.writers.gguf_writer import GgufWriter
from sdk.loaders.writers.hf_writer import HfWriter
from sdk.models.auto import read_config
from sdk.quant.checkpoint import Checkpoint
from sdk.quant.online import is_in_block
from sdk.quant.scheme import Scheme
from sdk.quantizing.job import Job
from sdk.quantizing.layers import check_run, decoder_config
from sdk.quantizing.libraries import library_for, quantize_with
from sdk.text.token_sequences import Text, calibration_text, token_sequences

#: Default schemes.
_GGUF, _FOLDER = "q4_k_m", "gptq-w4g128"


def quantize(
    model: str | PathLike[str],
    out: str | PathLike[str],
    scheme: str | None = None,
    *,
    calibration: Text | None = None,
    sequences: int = 128,
    tokens: int = 512,
    num_threads: int | None = None,
    on_progress: ProgressCallback | None = None,
    library: str | None = None,
) -> Path:
    """Quantize ``model`` into ``out`` and return its path.

    Works layer by layer: memory holds two layers in float32 and little else. If the job is
    stopped, finished layers stay in ``OUT.partial``, and the same call continues from there.

    Args:
        model: a GGUF file, a folder with safetensors, or a hub id.
        out: the result: a folder, or a ``.gguf`` file. It must not exist.
        scheme: see :class:`sdk.quant.scheme.Scheme`: ``gptq-w4g128``, ``awq``, ``int8``, ``fp8``,
            ``q4_k_m``, ... Default: ``q4_k_m`` for a ``.gguf`` file, ``gptq-w4g128`` for a folder.
        calibration: one or more texts, or lists of token ids, for methods that use activations.
            Default: Python's help topics without the first 64 KiB. GGUF types use it only if it
            is given.
        sequences: the most sequences to take from the text.
        tokens: tokens per sequence.
        num_threads: default: the CPUs this process may run on.
        on_progress: called with ``("quantize", layers done, layers)``; returns False to stop.
        library: ``"auto-gptq"`` or ``"autoawq"``: that package quantizes with a ``gptq`` or ``awq``
            scheme, in a separate process that holds the whole model in float32.

    Raises:
        CheckpointError: the model is missing or damaged.
        QuantizationError: the scheme is unknown or does not suit the model; ``out`` exists or
            cannot be written; the library is not installed, does not support the scheme, or failed.
        RequestError: too little calibration text.
        LoadCancelled: ``on_progress`` returned False.
    """
    target = Path(out).expanduser()
    parsed = _scheme(scheme, target)
    _check_name(target)
    other = None if library is None else library_for(library, parsed)
    with closing(open_checkpoint(str(model))) as checkpoint:
        _check_place(target, Path(model).expanduser(), checkpoint.path)
        if other is None:
            decoder_config(checkpoint)  # what cannot be written is refused first
        _check(checkpoint, parsed)
        ids = None
        if parsed.needs_data or (calibration is not None and parsed.container == "gguf"):
            config = read_config(checkpoint.config)
            check_run(checkpoint, config, parsed.text)
            text = calibration_text() if calibration is None else calibration
            tokenizer = checkpoint.tokenizer
            ids = token_sequences("calibration", text, tokenizer, config, sequences, tokens)
        with reporting("quantize", "layer", on_progress) as report:
            if other is not None and ids is not None:
                quantize_with(other, checkpoint, parsed, ids, target, num_threads, report)
            else:
                with closing(_job(checkpoint, parsed, ids, target, num_threads)) as job:
                    job.run(report)
    return target


def _scheme(name: str | None, target: Path) -> Scheme:
    """The scheme with that name, or the default for ``target``.

    :raises QuantizationError: the scheme does not go with a target of this kind.
    """
    in_gguf = target.suffix == ".gguf"
    scheme = Scheme.parse((_GGUF if in_gguf else _FOLDER) if name is None else name)
    if in_gguf != (scheme.container == "gguf"):
        expected = "a .gguf file" if scheme.container == "gguf" else "a folder"
        raise QuantizationError(
            f"{target}: {scheme.text} is written as {expected}; name one, or choose another scheme"
        )
    return scheme


def _check_name(out: Path) -> None:
    if out.name in ("", "..") or "\0" in str(out):
        raise QuantizationError(f"{str(out)!r}: expected the name of a new file or folder")


def _check_place(out: Path, *models: Path) -> None:
    """:raises QuantizationError: ``out``, or its unfinished parts, would be inside a model."""
    made = out.absolute().resolve()
    unfinished = made.with_name(made.name + ".partial")
    for model in (path.resolve() for path in models):
        if model.is_dir() and made.is_relative_to(model) and made != model:
            raise QuantizationError(
                f"{out}: is inside the model's folder, {model}; name a path outside of it"
            )
        if model.is_relative_to(unfinished):
            raise QuantizationError(
                f"{out}: its unfinished parts would be in {unfinished}, where the model is; name "
                "another path"
            )


def _check(checkpoint: Checkpoint, scheme: Scheme) -> None:
    """:raises QuantizationError: the scheme does not suit the model.

    :raises UnsupportedError: the model is a GGUF file, and the scheme makes a folder.
    """
    if checkpoint.format == "gguf" and scheme.container != "gguf":
        raise UnsupportedError(
            f"{checkpoint.path}: {scheme.text} makes a folder, which needs the config and the "
            "tokenizer of an original folder; a GGUF file can only become another GGUF file: name "
            f"a .gguf file as the result, with scheme {_GGUF} or another of GGUF's"
        )
    matrices = [entry for entry in checkpoint.entries() if is_in_block(entry)]
    widths = {entry.shape[1] for entry in matrices}
    for entry in matrices:
        scheme.check(entry.name, entry.shape[1], widths)
    if scheme.method in ("awq", "smoothquant") and num_experts(checkpoint.config):
        raise QuantizationError(
            f"{checkpoint.path}: {scheme.text} scales the norm before a matrix, but in a mixture "
            "of experts all experts share one norm: use a gptq, rtn, hqq or fp8 scheme"
        )


def _job(
    checkpoint: Checkpoint, scheme: Scheme, ids: Tensor | None, out: Path, num_threads: int | None
) -> Job:
    """The job, with the facts that identify it in the folder of its unfinished parts."""
    facts = {
        "model": str(checkpoint.path.resolve()),
        "tensors": _digest(repr([(e.name, e.shape, e.format) for e in checkpoint.entries()])),
        "scheme": scheme.text,
        "calibration": None if ids is None else _digest(repr(ids.tolist())),
    }
    if scheme.container == "gguf":
        writer = GgufWriter(checkpoint, scheme)
        return Job(checkpoint, scheme, writer, writer.kind, ids, out, facts, num_threads)
    folder = HfWriter(checkpoint, scheme)
    return Job(checkpoint, scheme, folder, None, ids, out, facts, num_threads)


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:16]
