"""One row of the frontier: make the weights where they are not packed at load, and compare."""

from __future__ import annotations

import contextlib
import hashlib
from pathlib import Path

import sdk
from sdk.api.errors import QuantizationError
from sdk.loaders.open import open_checkpoint
from sdk.models.auto import read_config
from sdk.quant.online import is_in_block, online_quantized, online_scheme
from sdk.quant.scheme import Scheme
from sdk.text.token_sequences import calibration_text, token_sequences
from tests.accuracy.baselines import Row
from tests.accuracy.float_folder import write_float_folder
from tests.accuracy.points import CALIBRATION_TOKENS, FEWEST_SEQUENCES, SEQUENCES, Point, Text

ROOT = Path(__file__).parents[2]
#: What decides what a scheme makes of weights.
_MAKERS = ("quant", "sdk/quantizing", "loaders/writers")


def made_by_this_code(folder: Path) -> Path:
    """A folder of ``folder`` for what the quantizers of this checkout make, and no others."""
    digest = hashlib.sha256()
    for part in _MAKERS:
        for path in sorted((ROOT / part).rglob("*.py")):
            digest.update(path.read_bytes())
    return folder / digest.hexdigest()[:12]


def float_base(file: Path, folder: Path, container: str) -> Path:
    """The values of ``file`` in float16: a GGUF file for GGUF files, a folder for folders."""
    path = folder / ("base.gguf" if container == "gguf" else "base")
    if not path.exists() and container == "gguf":
        sdk.quantize(file, path, "f16")
    elif not path.exists():
        write_float_folder(file, path)
    return path


def calibration_ids(file: Path, sequences: int) -> list[list[int]]:
    """Windows of the text that nobody is asked about; folders of ours have no tokenizer."""
    with contextlib.closing(open_checkpoint(file)) as checkpoint:
        facts = read_config(checkpoint.config)
        text, tokenizer = calibration_text(), checkpoint.tokenizer
        ids: list[list[int]] = token_sequences(
            "calibration", text, tokenizer, facts, sequences, CALIBRATION_TOKENS
        ).tolist()
    return ids


def is_online(scheme: str) -> bool:
    """Whether ``LLM(quantization=scheme)`` takes it."""
    try:
        online_scheme(scheme)
    except QuantizationError:
        return False
    return True


def measure(point: Point, file: Path, text: Text, folder: Path) -> Row:
    """``file``: the base; ``folder``: for what is made from it, and stays there."""
    model, packed = _model(point, file, folder)
    found = sdk.evaluate(
        model,
        file,
        windows=text.windows,
        tokens=text.tokens,
        compute=point.compute,
        kv_cache_dtype=point.kv,
        quantization=packed,
    )
    return Row(
        kld=round(found.kl_mean, 6),
        p99=round(found.kl_p99, 5),
        top1=round(found.top1, 4),
        perplexity=round(found.perplexity, 3),
        bits=round(found.bits_per_weight, 3),
        layer_bits=round(_layer_bits(model, packed), 3),
        weight_bytes=found.weight_bytes,
        kv_bytes=found.kv_bytes_per_token,
        prompt=round(found.prompt_tokens_per_second),
        decode=round(found.decode_tokens_per_second),
    )


def _model(point: Point, file: Path, folder: Path) -> tuple[Path, str | None]:
    """The model of a point, and what ``quantization=`` is."""
    if point.weights == "base":
        return file, None
    if is_online(point.scheme):
        return float_base(file, folder, "gguf"), point.scheme
    scheme = Scheme.parse(point.scheme)
    path = folder / (point.weights + (".gguf" if scheme.container == "gguf" else ""))
    if not path.exists():
        base = float_base(file, folder, scheme.container)
        ids = None
        if scheme.needs_data or point.weights.endswith("+text"):
            ids = calibration_ids(file, SEQUENCES.get(point.scheme, FEWEST_SEQUENCES))
        tokens = CALIBRATION_TOKENS
        sdk.quantize(
            base, path, point.scheme, calibration=ids, sequences=len(ids or ()) or 1, tokens=tokens
        )
    return path, None


def _layer_bits(model: Path, packed: str | None) -> float:
    """Bits in memory of a weight of the layers' matrices, on average."""
    with contextlib.closing(online_quantized(open_checkpoint(model), packed)) as checkpoint:
        inside = [entry for entry in checkpoint.entries() if is_in_block(entry)]
        held = sum(entry.nbytes if entry.held is None else entry.held for entry in inside)
        return held * 8 / sum(entry.num_elements for entry in inside)
