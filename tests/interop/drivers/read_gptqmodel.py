"""What gptqmodel makes of a folder, transformers' check of the bits left out."""

import torch
from each import each
from gptqmodel import BACKEND, GPTQModel
from packed import dump


def read(job: dict) -> None:
    backend = BACKEND.AWQ_TORCH if job["method"] == "awq" else BACKEND.GPTQ_TORCH
    options = {"device": "cpu", "backend": backend, "dtype": getattr(torch, job["dtype"])}
    dump(GPTQModel.load(job["folder"], **options).model.eval(), job)


each(read)
