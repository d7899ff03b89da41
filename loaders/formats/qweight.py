"""Which of four programs' orders the codes of a layer with ``qweight``, ``scales`` are in.

========== ======================== ==================== ============================
order      qweight                  scales
========== ======================== ==================== ============================
gptq       int32 ``[K b / 32, N]``  ``[G, N]``           words run along K
gemm       int32 ``[K, N / 8]``     ``[G, N]``           words run along N (AWQ)
gemv       int32 ``[N, K / 8]``     ``[N, G padded]``    words run along K (AWQ)
gemv_fast  int16 ``[N / 4, K]``     ``[G padded, N]``    four rows interleaved (AWQ)
========== ======================== ==================== ============================

What a config calls itself is not enough: the same three names of tensors are in all of them, and
codes read in the wrong order give a model that talks nonsense.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from sdk.loaders.formats.stored_layer import StoredLayer
from sdk.loaders.safetensors_reader import StoredTensor
from sdk.quant.errors import CheckpointError

SCALE_TYPES = ("F16", "BF16", "F32")


def order_of(
    qweight: StoredTensor, scales: StoredTensor, shape: tuple[int, int] | None = None
) -> str | None:
    """``gptq``, ``gemm``, ``gemv`` or ``gemv_fast``; None when the shapes fit none of them.

    ``shape``: ``(N, K)``, which decides between two that both fit a very small matrix.
    """
    if len(qweight.shape) != 2 or len(scales.shape) != 2:
        return None
    high, wide = qweight.shape
    if qweight.dtype == "I16":
        return "gemv_fast" if 4 * high == scales.shape[1] else None
    fitting = {
        "gptq": scales.shape[1] == wide and (shape is None or shape[0] == wide),
        "gemm": scales.shape[1] == 8 * wide and shape in (None, (8 * wide, high)),
        "gemv": scales.shape[0] == high and shape in (None, (high, 8 * wide)),
    }
    return next((order for order, fits in fitting.items() if fits), None)


def expect_order(layer: StoredLayer, orders: tuple[str, ...], method: str) -> str:
    """The order of a layer's codes, which must be one of ``orders``.

    Raises:
        CheckpointError: it is another method's, or none; ``method`` is what the config says.
    """
    qweight, scales = layer.stored(".qweight"), layer.stored(".scales")
    found = order_of(qweight, scales, layer.shape) or order_of(qweight, scales)
    if found in orders:
        return found
    known = {None: "no known format", "gptq": "GPTQ"}.get(found, f"AWQ ({found})")
    raise layer.fail(
        ".qweight",
        f"{qweight.dtype} {list(qweight.shape)} beside scales {list(scales.shape)} is the shape "
        f"of {known}, quantization_config says {method}",
    )


def integer(
    config: Mapping[str, Any], names: tuple[str, ...], source: str, low: int, high: int
) -> int | None:
    """The number under the first of ``names`` that is there.

    Raises:
        CheckpointError: it is no integer from ``low`` to ``high``; 0 is never allowed.
    """
    for name in names:
        value = config.get(name)
        if value is None:
            continue
        if type(value) is not int or not low <= value <= high or value == 0:
            raise CheckpointError(
                f"{source}: {name} of quantization_config is {str(value)[:40]!r}, "
                f"expected {low} to {high}{' but not 0' if low < 0 else ''}"
            )
        return value
    return None
