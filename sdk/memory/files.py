"""Opens the files of a model as its options say."""

from __future__ import annotations

from sdk.api.config import EngineConfig
from sdk.api.errors import CheckpointError
from sdk.api.load_progress import reporting
from sdk.loaders.open import is_remote, open_checkpoint
from sdk.quant.checkpoint import Checkpoint
from sdk.quant.online import online_quantized


def open_model(config: EngineConfig) -> Checkpoint:
    """The files of a model, with checked headers; quantized while loading if ``config`` says so."""
    remote = is_remote(config.model)
    with reporting("download", "B", config.on_progress, bar=remote) as report:
        checkpoint = open_checkpoint(
            config.model,
            filename=config.filename,
            revision=config.revision,
            local_files_only=config.local_files_only,
            download_dir=config.download_dir,
            on_download=report,
            pre_tokenizer=config.pre_tokenizer,
        )
    if config.load_format not in ("auto", checkpoint.format):
        checkpoint.close()
        raise CheckpointError(
            f"{checkpoint.path}: expected {config.load_format} (load_format), "
            f"found {checkpoint.format}"
        )
    return online_quantized(checkpoint, config.quantization)
