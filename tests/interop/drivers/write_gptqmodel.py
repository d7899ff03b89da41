"""gptqmodel quantizes a model into a folder."""

import torch
from each import each
from gptqmodel import GPTQModel
from gptqmodel.quantization.config import AWQConfig, GPTQConfig


def write(job: dict) -> None:
    kind = AWQConfig if job["method"] == "awq" else GPTQConfig
    config = kind(**job["options"], pack_impl="original")  # the other one is compiled for a minute
    model = GPTQModel.load(job["model"], config, device="cpu", dtype=torch.float32)
    examples = [{"input_ids": row, "attention_mask": [1] * len(row)} for row in job["ids"]]
    model.quantize(examples, batch_size=1)
    model.save(job["out"])


each(write)
