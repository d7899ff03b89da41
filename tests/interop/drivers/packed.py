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
        elif hasattr(module, "gate_up_proj") and module.gate_up_proj.ndim == 3:
            found |= experts(name, module)
    with torch.inference_mode():
        found["logits"] = model(torch.tensor([job["prompt"]])).logits[0]
    np.savez(job["out"], **{name: value.detach().float().numpy() for name, value in found.items()})


def experts(name: str, module: Any) -> dict[str, torch.Tensor]:
    """Every expert's matrices, of all experts joined."""
    found = {}
    for expert, both in enumerate(module.gate_up_proj):
        gate, up = both.chunk(2)
        parts = {"gate": gate, "up": up, "down": module.down_proj[expert]}
        found |= {f"{name}.{expert}.{part}_proj": weight for part, weight in parts.items()}
    return found
