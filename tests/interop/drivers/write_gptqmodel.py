"""gptqmodel quantizes a model into a folder."""

import torch
from each import each
from gptqmodel import GPTQModel
from gptqmodel.quantization.config import AWQConfig, GPTQConfig


def write(job: dict) -> None:
    awq = job["method"] == "awq"
    kind = AWQConfig if awq else GPTQConfig
    config = kind(**job["options"], pack_impl="original")  # the other one is compiled for a minute
    dtype = torch.float16 if awq else torch.float32  # its layers for AWQ take no other
    model = GPTQModel.load(job["model"], config, device="cpu", dtype=dtype)
    examples = [{"input_ids": row, "attention_mask": [1] * len(row)} for row in job["ids"]]
    model.quantize(examples, batch_size=1)
    model.save(job["out"])


each(write)
