"""The weights that autoawq finds in a folder, by its own dequantization."""

import json
from pathlib import Path

import numpy as np
from awq.utils.packing_utils import dequantize_gemm
from each import each
from safetensors.torch import load_file


def read(job: dict) -> None:
    settings = json.loads((Path(job["folder"]) / "config.json").read_text())["quantization_config"]
    tensors = {}
    for path in Path(job["folder"]).glob("*.safetensors"):
        tensors |= load_file(path)
    found = {}
    for name in tensors:
        layer, _, ending = name.rpartition(".")
        if ending == "qweight":
            parts = [tensors[f"{layer}.{kind}"] for kind in ("qweight", "qzeros", "scales")]
            weight = dequantize_gemm(*parts, settings["bits"], settings["group_size"])
            found[layer] = weight.T.float().numpy()
    np.savez(job["out"], **found)


each(read)
