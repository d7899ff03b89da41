"""Says what a folder or GGUF file holds if it is not a causal language model."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from sdk.loaders.folders.folder_file import folder_file
from sdk.loaders.json_file import read_json
from sdk.models.architecture import gguf_names
from sdk.models.other_models import TOWER, refused_gguf
from sdk.quant.errors import CheckpointError, UnsupportedError

ADAPTER_CONFIG = "adapter_config.json"
PICKLES = (".bin", ".pt", ".pth", ".ckpt", ".pkl")
_CONVERT = (
    'python -c "from transformers import AutoModelForCausalLM as M; '
    "M.from_pretrained({folder!r}).save_pretrained('OUT')\""
)
#: A file that only one kind of folder has -> that kind. The first match decides.
_SIGNS = (
    ("model_index.json", "a diffusers pipeline (images, video or audio)"),
    ("modules.json", "a sentence-transformers model (an encoder for embeddings)"),
    ("openvino_model.xml", "an OpenVINO model"),
    ("*.onnx", "an ONNX model"),
    ("onnx/*.onnx", "an ONNX model"),
    ("*.engine", "a TensorRT engine"),
    ("*.mlmodel", "a Core ML model"),
    ("tf_model.h5", "a TensorFlow model"),
    ("flax_model.msgpack", "a Flax model"),
    ("mlc-chat-config.json", "an MLC model"),
    ("ggml-model-*.bin", "a GGML file, the format before GGUF"),
)
#: GGUF's general.type -> the kind of file.
_GGUF_TYPES = {
    "adapter": "a LoRA adapter for another model; open that model with enable_lora=True",
    "mmproj": str(TOWER),
    "imatrix": "an importance matrix, which llama.cpp's quantizer reads",
    "vocab": "a vocabulary without weights",
}
_EXPECTED = (
    "expected a causal language model: a GGUF file, or a folder with config.json and "
    "safetensors files"
)


def check_adapter(folder: Path) -> None:
    """Reject a PEFT folder, with the name of its base model.

    Raises:
        UnsupportedError: the folder holds an adapter and no model weights.
    """
    described = (folder / ADAPTER_CONFIG).is_file()
    weights = [path.name for path in folder.glob("*.safetensors")]
    if not described and not weights:
        return
    if any(not name.startswith("adapter_") for name in weights):
        return
    base = None
    if described:
        adapter = folder_file(folder, ADAPTER_CONFIG) or folder / ADAPTER_CONFIG
        base = read_json(adapter, 8 << 20).get("base_model_name_or_path")
    named = f" {base[:200]!r}" if isinstance(base, str) and base else ""
    raise UnsupportedError(
        f"{folder}: expected a model, found a LoRA (PEFT) adapter. Merge it into its base "
        f"model{named} (peft: merge_and_unload, save_pretrained) and open the result"
    )


def no_model(folder: Path) -> CheckpointError:
    """The error for a folder without readable weights: names what it holds instead."""
    if not folder.is_dir():
        return CheckpointError(f"{folder}: no such folder")
    if not any(folder.iterdir()):
        return CheckpointError(f"{folder}: the folder is empty; {_EXPECTED}")
    for sign, kind in _SIGNS:
        if any(folder.glob(sign)):
            return UnsupportedError(f"{folder}: {kind}; {_EXPECTED}")
    pickles = sorted(path.name for path in folder.iterdir() if path.suffix in PICKLES)
    if pickles:
        return UnsupportedError(
            f"{folder}: found only pickles ({', '.join(pickles[:3])}). Reading a pickle can run "
            "any code, so they are not opened. If you trust them, convert them: "
            + _CONVERT.format(folder=str(folder))
        )
    if any((folder / name).is_file() for name in ("tokenizer.json", "tokenizer_config.json")):
        return CheckpointError(f"{folder}: found a tokenizer without weights; {_EXPECTED}")
    if (folder / "config.json").is_file():
        return CheckpointError(
            f"{folder}: found a config but no .safetensors files; download the weights too"
        )
    names = ", ".join(sorted(path.name for path in folder.iterdir())[:3])
    return CheckpointError(f"{folder}: no model in the folder (found {names}); {_EXPECTED}")


def check_gguf_kind(path: Path, metadata: Mapping[str, Any]) -> None:
    """Reject a GGUF file that holds no model by its ``general.type``.

    Raises:
        UnsupportedError: names what the file is.
    """
    kind = metadata.get("general.type")
    found = _GGUF_TYPES.get(kind) if isinstance(kind, str) else None
    if found is not None:
        raise UnsupportedError(f"{path}: {found}; expected a causal language model")


def unknown_architecture(path: Path, name: str) -> UnsupportedError:
    """The error for a GGUF file whose ``general.architecture`` does not run."""
    found = refused_gguf(name)
    if found is not None:
        return UnsupportedError(f"{path}: {name}: {found}")
    return UnsupportedError(
        f"{path}: the architecture {name[:80]!r} is not known; expected one of "
        f"{', '.join(gguf_names())}. If transformers knows the model, open its folder of "
        "safetensors files instead"
    )
