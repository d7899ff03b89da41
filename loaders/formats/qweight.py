"""Which of four orders the codes of a layer with ``qweight`` and ``scales`` have.

========== ======================== ==================== ============================
order      qweight                  scales
========== ======================== ==================== ============================
gptq       int32 ``[K b / 32, N]``  ``[G, N]``           words run along K
gemm       int32 ``[K, N / 8]``     ``[G, N]``           words run along N (AWQ)
gemv       int32 ``[N, K / 8]``     ``[N, G padded]``    words run along K (AWQ)
gemv_fast  int16 ``[N / 4, K]``     ``[G padded, N]``    four rows interleaved (AWQ)
========== ======================== ==================== ============================

The config's claim is not enough: all four use the same three tensor names, and with codes read in
the wrong order a model outputs nonsense.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from sdk.loaders.folders.safetensors_reader import StoredTensor
from sdk.loaders.formats.stored_layer import StoredLayer
from sdk.quant.errors import CheckpointError

SCALE_TYPES = ("F16", "BF16", "F32")


def order_of(
    qweight: StoredTensor, scales: StoredTensor, shape: tuple[int, int] | None = None
) -> str | None:
    """``gptq``, ``gemm``, ``gemv`` or ``gemv_fast``; None if the shapes fit none of them.

    ``shape``: ``(N, K)``, which decides if two orders fit a very small matrix.
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
        CheckpointError: the shapes fit none of ``orders``; ``method`` is the config's name for it.
    """
    qweight, scales = layer.stored(".qweight"), layer.stored(".scales")
    found = order_of(qweight, scales, layer.shape) or order_of(qweight, scales)
    if found in orders:
        return found
    known = {None: "no known format", "gptq": "GPTQ"}.get(found, f"AWQ ({found})")
    raise layer.fail(
        ".qweight",
        f"{qweight.dtype} {list(qweight.shape)} with scales {list(scales.shape)} is the shape of "
        f"{known}, but quantization_config says {method}",
    )


def integer(
    config: Mapping[str, Any], names: tuple[str, ...], source: str, low: int, high: int
) -> int | None:
    """The value of the first of ``names`` that is present.

    Raises:
        CheckpointError: it is not an integer from ``low`` to ``high``; 0 is never allowed.
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
