"""The weights that auto-gptq finds in a folder: its layers run on the identity matrix."""

import json
from pathlib import Path

import numpy as np
import torch
from each import each
from safetensors.torch import load_file

from sdk.quantizing.library_process import restore_for_auto_gptq

restore_for_auto_gptq()
from auto_gptq.nn_modules.qlinear.qlinear_cuda import QuantLinear  # noqa: E402


def read(job: dict) -> None:
    settings = json.loads((Path(job["folder"]) / "config.json").read_text())["quantization_config"]
    tensors = {}
    for path in Path(job["folder"]).glob("*.safetensors"):
        tensors |= load_file(path)
    found = {}
    for name in tensors:
        layer, _, ending = name.rpartition(".")
        if ending != "qweight":
            continue
        columns, rows = tensors[f"{layer}.g_idx"].numel(), tensors[name].shape[1]
        linear = QuantLinear(settings["bits"], settings["group_size"], columns, rows, bias=False)
        for kind in ("qweight", "qzeros", "scales", "g_idx"):
            setattr(linear, kind, tensors[f"{layer}.{kind}"])
        linear.scales = linear.scales.float()
        found[layer] = linear(torch.eye(columns)).T.float().numpy()
    np.savez(job["out"], **found)


each(read)
