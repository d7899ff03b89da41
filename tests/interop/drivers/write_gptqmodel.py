"""gptqmodel quantizes a model into a folder, and says what it makes of its own file."""

import json
import sys
from pathlib import Path

import torch
from gptqmodel import GPTQModel
from gptqmodel.quantization.config import AWQConfig, GPTQConfig

job = json.loads(Path(sys.argv[1]).read_text())
kind = AWQConfig if job["method"] == "awq" else GPTQConfig
model = GPTQModel.load(job["model"], kind(**job["options"]), device="cpu", dtype=torch.float32)
examples = [{"input_ids": row, "attention_mask": [1] * len(row)} for row in job["ids"]]
model.quantize(examples, batch_size=1)
model.save(job["out"])
