"""What rounding alone leaves of weights: the second table of docs/quantization.md.

    python -m tests.accuracy.rounding_errors

Relative root mean square error on values of a normal distribution and of Student's t with 4 degrees
of freedom, 256 rows of 1024. Methods that look at inputs are not here: they trade this error for
one at the output.
"""

from __future__ import annotations

import torch
from torch import Tensor

from sdk.quant.quantize import quantize_without_data, to_blocks
from sdk.quant.scheme import Scheme
from sdk.quant.weight import weight_of

SCHEMES = (
    *("rtn-w8s", "rtn-w4g32", "rtn-w4g64", "rtn-w4g64s", "rtn-w4g128", "rtn-w3g64", "rtn-w2g32"),
    *("hqq-w4g64", "hqq-w3g64", "fp8-tensor", "fp8-channel", "fp8-block", "mxfp4", "nvfp4"),
    *("q8_0", "q6_k", "q5_k", "q5_1", "q5_0", "q4_k", "q4_1", "q4_0", "iq4_nl", "q3_k", "q2_k"),
)
HEAD = "| scheme | bits | normal | Student's t, 4 |\n|---|---:|---:|---:|"


def weights() -> tuple[Tensor, Tensor]:
    """Normal and heavy-tailed values, float32 ``[256, 1024]`` each."""
    generator = torch.Generator().manual_seed(0)
    normal = torch.randn(256, 1024, generator=generator) * 0.05
    parts = torch.randn(5, 256, 1024, generator=generator)
    return normal, 0.02 * parts[0] / parts[1:].square().mean(0).sqrt()


def errors(name: str) -> tuple[float, float, float]:
    """Bits per weight, and the relative errors on both."""
    found = []
    bits = 0.0
    for values in weights():
        if name.startswith(("q", "iq")):
            layout = to_blocks(name, values, name)
        else:
            layout = quantize_without_data(name, values, Scheme.parse(name))
        bits = layout.nbytes * 8 / values.numel()
        found.append(float((weight_of(layout).dequantize() - values).norm() / values.norm()))
    return bits, found[0], found[1]


def table() -> str:
    rows = [HEAD]
    for name in SCHEMES:
        bits, normal, heavy = errors(name)
        rows.append(f"| {name} | {bits:.2f} | {normal:.4f} | {heavy:.4f} |")
    return "\n".join(rows)


if __name__ == "__main__":
    print(table())
