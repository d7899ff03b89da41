"""A LoRA adapter as llama.cpp's ``convert_lora_to_gguf.py`` writes it.

``general.type`` is ``adapter``, ``adapter.type`` is ``lora``, and ``adapter.lora.alpha`` divided by
the rank is the scale (0: the scale is 1). A matrix ``blk.0.attn_q.weight`` has ``….lora_a``
``[r, in]`` and ``….lora_b`` ``[out, r]``. For ``token_embd.weight`` they are ``[vocab, r]`` and
``[hidden, r]``. Rows of q and k are interleaved as in GGUF files of the model, see
:mod:`sdk.loaders.gguf_checkpoint`.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from sdk.loaders.adapters.adapter_file import AdapterFile, MatrixShape, StoredMatrix, low_rank
from sdk.loaders.gguf_header import GgufTensor
from sdk.loaders.gguf_names import layer_parts
from sdk.loaders.gguf_reader import GgufFile, read_gguf
from sdk.loaders.model_shapes import expected_shape
from sdk.models.architecture import GgufRules, architecture
from sdk.quant.adapter import LowRank
from sdk.quant.errors import CheckpointError, UnsupportedError

_TYPES: dict[str, Any] = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
_FACTOR = re.compile(r"(.+)\.weight\.lora_([ab])")
_LAYER = re.compile(r"blk\.(\d{1,4})\.(.+)")
