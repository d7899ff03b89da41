"""What a model that transformers runs holds: the drivers' reading half."""

from typing import Any

import numpy as np
import torch


def dump(model: Any, job: dict[str, Any]) -> None:
    """The logits of the prompt and the weights of every Linear, dequantized, into an .npz file.

    A packed layer's weights are what it makes of the identity matrix.
    """
    found = {}
    for name, module in model.named_modules():
        if hasattr(module, "qweight"):
            columns = torch.eye(module.in_features, dtype=getattr(torch, job["dtype"]))
            with torch.inference_mode():
                found[name] = module(columns).T
        elif isinstance(module, torch.nn.Linear):
            found[name] = module.weight
    with torch.inference_mode():
        found["logits"] = model(torch.tensor([job["prompt"]])).logits[0]
    np.savez(job["out"], **{name: value.detach().float().numpy() for name, value in found.items()})
