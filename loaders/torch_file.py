"""Reads the header of a file of ``torch.save``: its tensors become ranges of the file.

Heads for speculative decoding are often published as such files (``medusa_lm_head.pt``). They are
zip archives of a pickle and of one uncompressed entry per tensor. A pickle can run any code, so
only torch's own restricted unpickler reads it (``weights_only=True``), and it allocates no tensor:
the data are read like those of safetensors files, when they are pulled.
"""

from __future__ import annotations

import pickle
import zipfile
from pathlib import Path

from sdk.kernels.lazy_torch import Tensor, torch, type_name
from sdk.kernels.packages import check_installed
from sdk.loaders.folders.safetensors_reader import DTYPES, StoredTensor
from sdk.loaders.model_file import ModelFile
from sdk.quant.errors import CheckpointError, UnsupportedError

#: The pickle of a head with a few hundred tensors has less than 100 KB.
_MAX_PICKLE = 8 << 20
_MAX_ENTRIES = 100_000
_DTYPES = {name: own for own, (_, name) in DTYPES.items() if name is not None}


def torch_header(file: ModelFile) -> tuple[list[StoredTensor], dict[str, str]]:
    """The tensors of a file of ``torch.save``, which must hold a dict of them.

    Raises:
        CheckpointError: the file is damaged, or a tensor lies outside of it.
        UnsupportedError: it holds something other than a dict of contiguous tensors.
    """
    _check_archive(file.path)
    check_installed("torch", f"{file.path}: to read it needs")
    try:
        loaded = torch.load(file.path, map_location="meta", weights_only=True)
    except pickle.UnpicklingError as error:
        raise UnsupportedError(
            f"{file.path}: expected only tensors, found other objects, which could run any code; "
            f"save the weights as safetensors ({str(error).splitlines()[0][:200]})"
        ) from None
    except Exception as error:  # torch raises many types for a damaged file
        raise CheckpointError(f"{file.path}: not a readable file of torch.save: {error}") from None
    if not isinstance(loaded, dict) or not all(
        isinstance(name, str) and isinstance(value, Tensor) for name, value in loaded.items()
    ):
        raise UnsupportedError(
            f"{file.path}: expected a dict of tensors, found {type(loaded).__name__}; save the "
            "state_dict, or safetensors"
        )
    return [_stored(file, name, tensor) for name, tensor in loaded.items()], {}


def _check_archive(path: Path) -> None:
    """Reject archives that would be larger in memory than on disk."""
    try:
        with zipfile.ZipFile(path) as archive:
            entries = archive.infolist()
    except (zipfile.BadZipFile, OSError, ValueError, NotImplementedError) as error:
        raise CheckpointError(
            f"{path}: expected a file of torch.save (PyTorch 1.6 or newer): {error}"
        ) from None
    if len(entries) > _MAX_ENTRIES:
        raise CheckpointError(f"{path}: {len(entries)} entries, expected at most {_MAX_ENTRIES}")
    for entry in entries:
        if entry.compress_type != zipfile.ZIP_STORED:
            raise CheckpointError(
                f"{path}: {entry.filename[:80]!r} is compressed; torch.save does not compress"
            )
        if entry.filename.endswith(".pkl") and entry.file_size > _MAX_PICKLE:
            raise CheckpointError(
                f"{path}: {entry.filename[:80]!r} has {entry.file_size} bytes, expected at most "
                f"{_MAX_PICKLE}"
            )


def _stored(file: ModelFile, name: str, tensor: Tensor) -> StoredTensor:
    dtype = _DTYPES.get(type_name(tensor.dtype))
    if dtype is None or not tensor.is_contiguous() or tensor.layout != torch.strided:
        raise UnsupportedError(
            f"{file.path}: tensor {name!r}: expected a contiguous tensor of a common type, found "
            f"{tensor.dtype} {list(tensor.shape)}; save the weights as safetensors"
        )
    nbytes = tensor.numel() * tensor.element_size()
    begin = getattr(tensor.untyped_storage(), "_checkpoint_offset", None)
    if not isinstance(begin, int):
        raise CheckpointError(f"{file.path}: tensor {name!r} has no data in the file")
    start = begin + int(tensor.storage_offset()) * tensor.element_size()
    if start < 0 or start + nbytes > file.size:
        raise CheckpointError(
            f"{file.path}: tensor {name!r} ends at byte {start + nbytes}, the file has {file.size}"
        )
    return StoredTensor(name, dtype, tuple(tensor.shape), file, start, nbytes)
