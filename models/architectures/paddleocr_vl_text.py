"""PaddleOCR-VL, the text part, from GGUF files: ERNIE 4.5 that turns halves of a head, as Llama.

The rotation has one position for time, height and width each; for text all three are the same.
Baidu (2025), arXiv 2510.14528; transformers' modeling_paddleocr_vl.py.
"""

from __future__ import annotations

from sdk.models.architecture import Architecture, ConfigRules, GgufRules
from sdk.models.architectures.ernie4_5 import biases
from sdk.models.architectures.qwen2_vl_text import MEDIA_KEYS

ARCHITECTURE = Architecture(
    "paddleocr_vl_text",
    config=ConfigRules(
        keys=("use_bias",),
        ignored=MEDIA_KEYS,
        defaults={"head_dim": 128, "rope_theta": 500_000.0, "tie_word_embeddings": True},
        biases=biases,
    ),
    more_gguf=(GgufRules("paddleocr"),),
    folders=False,
)
