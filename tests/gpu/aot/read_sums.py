"""How long the sums of matrix instructions are in compiled code: a program, see ``sweep.run``.

    echo '{"jobs": [["fp8-channel", "product_bytes", 16, "bfloat16", "cuda", 90]]}' |
        python read_sums.py

A job is one of ``compile_kernels.py``, for a card with QGMMA, QMMA, IGMMA or IMMA instructions of
32 columns. A line has the number of those instructions (``matrix``), of those that start a sum
(``fresh``: they add to the register of zeros), of results of one of them that a thread has
(``results``), and of multiplications with an addition (``ffma``).
"""

from __future__ import annotations

import json
import re
import sys
import tempfile
from typing import Any

import triton
from compile_kernels import sources
from machine_code import _tool


def sums(job: list[Any]) -> dict[str, int]:
    (source,) = sources(job)
    made = triton.compile(source.code, target=source.target, options=source.options)
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(made.asm["cubin"])
        file.flush()
        code = _tool("nvdisasm", file.name)
    found = re.findall(r"\b[QI]G?MMA\.(\w+?)\.\S+ (R[^;]*);", code)
    (shape,) = {shape for shape, _ in found}
    # rows and tokens of an instruction: over 32 threads, of a QGMMA or IGMMA over 128
    results = 16 * 8 // 32 if shape == "16832" else 64 * int(shape.split("x")[1]) // 128
    fresh = sum(bool(re.search(r"\bRZ\b", operands)) for _, operands in found)
    ffma = len(re.findall(r"\bFFMA\b", code))
    return {"matrix": len(found), "fresh": fresh, "results": results, "ffma": ffma}


if __name__ == "__main__":
    for job in json.load(sys.stdin)["jobs"]:
        print(json.dumps({"job": job, **sums(job)}), flush=True)
