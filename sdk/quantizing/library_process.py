"""The process in which auto-gptq or autoawq quantizes one model; see ``libraries.py``.

auto-gptq 0.7.1 (2024) needs a CUDA device and transformers 4, autoawq 0.2.9 (2025) transformers
below 5.6. This process patches what has changed in their dependencies since. The model runs in
float32; tensors that are not quantized are saved in their original type.
"""

from __future__ import annotations

import importlib
import json
import logging
import os
import re
import threading
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers

Job = Mapping[str, Any]
Report = Callable[[int], None]


def main(path: str) -> None:
    """Do the job in the JSON file ``path``; print the number of each layer when it begins."""
    lines = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # the libraries' own prints go to stderr
    threading.Thread(target=_end_with_parent, daemon=True).start()
    job = json.loads(Path(path).read_text(encoding="utf-8"))
    model = transformers.AutoModelForCausalLM.from_pretrained(
        # eager: other attention may have None as its mask, which auto-gptq cannot pass on
        job["model"],
        attn_implementation="eager",
        dtype="auto",
    )
    model.eval()

    def begun(layer: int) -> None:
        lines.write(f"{layer}\n")

    {"auto-gptq": _auto_gptq, "autoawq": _autoawq}[job["library"]](job, model, begun)


def _end_with_parent() -> None:
    # returns when the parent closes its end, or dies; not sys.stdin, whose lock the waiting thread
    # would still hold when the interpreter ends
    os.read(0, 1)
    os._exit(1)


def _auto_gptq(job: Job, model: Any, report: Report) -> None:
    restore_for_auto_gptq()
    from auto_gptq import BaseQuantizeConfig
    from auto_gptq.modeling import _base
    from auto_gptq.modeling.auto import GPTQ_CAUSAL_LM_MODEL_MAP

    static = not job["sorted"] and job["group"] > 0
    config = BaseQuantizeConfig(
        bits=job["bits"],
        group_size=job["group"],
        sym=job["symmetric"],
        desc_act=job["sorted"] or static,
        static_groups=static,
    )
    quantizer = _known(GPTQ_CAUSAL_LM_MODEL_MAP, model)(model, False, config)
    _base.logger.addHandler(_Layers(report))
    _base.GPTQ = _rejecting_zeros(_base.GPTQ, job["symmetric"])
    stored = model.dtype
    model.float()
    # in transformers 5 a layer returns its output, not a tuple that begins with it
    hooks = [layer.register_forward_hook(_as_tuple) for layer in model.model.layers]
    rows = np.load(job["ids"]).tolist()
    examples = [{"input_ids": row, "attention_mask": [1] * len(row)} for row in rows]
    quantizer.quantize(examples, cache_examples_on_gpu=False)
    for hook in hooks:
        hook.remove()
    _store_in(model, stored)
    quantizer.save_quantized(job["out"], use_safetensors=True)


#: Names that auto-gptq imports, and where they are today. Quantizing uses only the first.
_MOVED = (
    ("transformers.modeling_utils", "no_init_weights", "transformers.initialization"),
    ("transformers.utils.hub", "create_commit", "huggingface_hub"),
    ("transformers.utils.hub", "create_repo", "huggingface_hub"),
    ("peft.peft_model", "PEFT_TYPE_TO_MODEL_MAPPING", "peft.mapping"),
)


def restore_for_auto_gptq() -> None:
    """Restore moved names; without a GPU, make auto-gptq use the CPU instead."""
    for module, name, today in _MOVED:
        old = importlib.import_module(module)
        if not hasattr(old, name):
            setattr(old, name, getattr(importlib.import_module(today), name, None))
    if torch.cuda.is_available():
        return
    from auto_gptq.modeling import _base, _utils

    _base.CUDA_0 = _utils.CUDA_0 = torch.device("cpu")
    torch.cuda.synchronize = lambda device=None: None


class _Layers(logging.Handler):
    """Reads the current layer from auto-gptq's log."""

    def __init__(self, report: Report) -> None:
        super().__init__()
        self._report = report

    def emit(self, record: logging.LogRecord) -> None:
        found = re.match(r"Start quantizing layer (\d+)/", record.getMessage())
        if found is not None:
            self._report(int(found[1]) - 1)


def _rejecting_zeros(base: Any, symmetric: bool) -> Any:
    """``GPTQ`` that rejects zero points which its files cannot store."""

    class Rejecting(base):  # type: ignore[misc]  # a class found at run time
        def fasterquant(self, **options: Any) -> Any:
            scale, zero, groups = super().fasterquant(**options)
            if not symmetric and bool((zero == 0).any()):
                # stored minus 1 without handling the borrow, which would corrupt its neighbours
                raise ValueError("a zero point is 0, which auto-gptq's files cannot store")
            return scale, zero, groups

    return Rejecting


def _as_tuple(module: Any, args: Any, output: Any) -> Any:
    return output if isinstance(output, tuple) else (output,)


def _autoawq(job: Job, model: Any, report: Report) -> None:
    from awq.models._config import AwqConfig
    from awq.models.auto import AWQ_CAUSAL_LM_MODEL_MAP
    from awq.quantize.quantizer import AwqQuantizer

    class Reporting(AwqQuantizer):  # type: ignore[misc]  # no types
        begun = 0

        def init_quant(self, *args: Any, **options: Any) -> Any:
            layers, others, inputs = super().init_quant(*args, **options)
            return layers, {k: _of_one(v, len(inputs)) for k, v in others.items()}, inputs

        def _get_input_feat(self, *args: Any) -> Any:
            report(self.begun)
            self.begun += 1
            return super()._get_input_feat(*args)

    kind = model.config.model_type
    quantizer = _known(AWQ_CAUSAL_LM_MODEL_MAP, model)(
        model, kind, False, model.config, AwqConfig(), None
    )
    stored = model.dtype
    model.float()
    model.config.use_cache = False
    rows = np.load(job["ids"]).tolist()
    quantizer.quantize(
        quant_config={
            "zero_point": True,
            "q_group_size": job["group"],
            "w_bit": job["bits"],
            "version": "GEMM",
        },
        calib_data=rows,
        max_calib_samples=len(rows),
        max_calib_seq_len=len(rows[0]),
        n_parallel_calib_samples=1,
        quantizer_cls=Reporting,
    )
    _store_in(model, stored)
    quantizer.save_quantized(job["out"])


def _of_one(value: Any, sequences: int) -> Any:
    """Positions and masks of one sequence: they are equal for all, which run one by one."""
    if isinstance(value, tuple):
        return tuple(_of_one(part, sequences) for part in value)
    if isinstance(value, torch.Tensor) and value.ndim > 1 and len(value) == sequences:
        return value[:1]
    return value


def _known(classes: Mapping[str, Any], model: Any) -> Any:
    kind = model.config.model_type
    if kind not in classes:
        raise ValueError(f"{kind} models are not supported; it knows {', '.join(classes)}")
    return classes[kind]


def _store_in(model: Any, dtype: torch.dtype) -> None:
    """Convert parameters to ``dtype``. Quantized layers have buffers, which do not change."""
    for parameter in model.parameters():
        parameter.data = parameter.data.to(dtype)
