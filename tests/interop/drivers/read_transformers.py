"""What transformers makes of a folder, with gptqmodel or compressed-tensors beside it: logits, and
the dequantized weights of every layer that is packed."""

import numpy as np
import torch
from each import each
from transformers import AutoModelForCausalLM


def read(job: dict) -> None:
    options = {}
    if job["method"] == "compressed-tensors":
        from transformers import CompressedTensorsConfig

        options["quantization_config"] = CompressedTensorsConfig(run_compressed=False)
    dtype = getattr(torch, job["dtype"])
    model = AutoModelForCausalLM.from_pretrained(job["folder"], dtype=dtype, **options).eval()
    found = {}
    for name, module in model.named_modules():
        if hasattr(module, "dequantize_weight"):
            found[name] = module.dequantize_weight().T
        elif isinstance(module, torch.nn.Linear):
            found[name] = module.weight
    with torch.inference_mode():
        found["logits"] = model(torch.tensor([job["prompt"]])).logits[0]
    np.savez(job["out"], **{name: value.detach().float().numpy() for name, value in found.items()})


each(read)
