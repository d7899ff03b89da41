"""llm-compressor quantizes a model into a folder."""

import torch
from datasets import Dataset
from each import each
from llmcompressor import oneshot
from llmcompressor.modifiers.quantization import GPTQModifier, QuantizationModifier
from transformers import AutoModelForCausalLM

# GPTQ pins memory for a device that this machine may not have
torch.Tensor.pin_memory = lambda self, *args, **kwargs: self


def write(job: dict) -> None:
    model = AutoModelForCausalLM.from_pretrained(job["model"], dtype=getattr(torch, job["dtype"]))
    kind = GPTQModifier if job["method"] == "gptq" else QuantizationModifier
    recipe = kind(targets="Linear", ignore=["lm_head", "re:.*gate$"], **job["options"])
    rows = {"input_ids": job["ids"], "attention_mask": [[1] * len(row) for row in job["ids"]]}
    oneshot(
        model=model,
        recipe=recipe,
        dataset=Dataset.from_dict(rows),
        max_seq_length=len(job["ids"][0]),
        num_calibration_samples=len(job["ids"]),
    )
    model.save_pretrained(job["out"], save_compressed=True)


each(write)
