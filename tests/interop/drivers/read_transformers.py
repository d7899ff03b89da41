"""What transformers makes of a folder, with gptqmodel or compressed-tensors beside it."""

import torch
from each import each
from packed import dump
from transformers import AutoModelForCausalLM, AwqConfig, CompressedTensorsConfig, GPTQConfig

#: gptqmodel's plain torch kernels: the others compile C++ for a minute first.
CONFIGS = {
    "gptq": lambda: GPTQConfig(bits=4, backend="gptq_torch"),  # bits are those of the folder
    "awq": lambda: AwqConfig(backend="torch_awq"),
    "compressed-tensors": lambda: CompressedTensorsConfig(run_compressed=False),
}


def read(job: dict) -> None:
    config = CONFIGS[job["method"]]()
    options = {"dtype": getattr(torch, job["dtype"]), "quantization_config": config}
    dump(AutoModelForCausalLM.from_pretrained(job["folder"], **options).eval(), job)


each(read)
