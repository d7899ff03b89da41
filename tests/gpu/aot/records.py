"""What was found of the code of every kernel, ``compiled/<card>.txt``: one line for each variant.

    product/int4-g128-zeros/64/bfloat16 product 0e8d822ae2c2 ir=94c1f0a2b6de registers=110 ...

A variant is named by the job that makes it, and its line has the keys of what was compiled, of the
source and of Triton's IR (``Source.key``, ``Source.ir``), and numbers by name
(``machine_code.findings``). A variant whose IR differs, or whose line lacks a number that its card
needs, is compiled again; if only the source does, its line gets the new key. So a new number costs
a sweep of the cards that need it, and a change to what kernels share only those that it reaches.

A variant may not become worse than its line: see :func:`worse`. ``sweep.py --accept`` writes it
down all the same.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import triton

from sdk.bench.gpu.roofline import DEVICES, resident

#: KiB of shared memory a program may have.
LIMITS = {
    "sm_75": 64, "sm_80": 163, "sm_89": 99, "sm_90": 227, "sm_100": 227, "sm_120": 99,
    "gfx90a": 64, "gfx942": 64,
}  # fmt: skip
#: The exact sine of a large angle needs a table, on the stack.
ON_THE_STACK = {"angles_kernel"}
#: Bytes: one number that the compiler itself stores and loads again, so that more threads fit
#: (q2_k for one token: 168 registers, of 255 that it might take).
ONE_NUMBER = 8
#: Bytes of spilled registers known to be there, by card and kernel: of products, the most with q2_k
#: and 64 tokens, and of attention, on AMD's cards with prompts and fp8 pages. The four registers of
#: the latent kernel let three programs share a processor instead of two. These are the worst of the
#: records, which a test compares, so a repair lowers the number.
SPILLED = {
    ("sm_75", "prefill_kernel"): 24,
    ("sm_75", "decode_kernel"): 16,
    ("sm_80", "product"): 224,
    ("sm_80", "prefill_kernel"): 64,
    ("sm_80", "decode_kernel"): 16,
    ("sm_80", "latent_kernel"): 16,
    ("sm_89", "product"): 16,
    ("sm_89", "prefill_kernel"): 48,
    ("sm_89", "decode_kernel"): 24,
    ("sm_90", "decode_kernel"): 32,
    ("sm_100", "product"): 184,
    ("sm_100", "prefill_kernel"): 32,
    ("sm_100", "decode_kernel"): 32,
    ("sm_120", "product"): 16,
    ("sm_120", "prefill_kernel"): 48,
    ("sm_120", "shared_kernel"): 16,
    ("gfx90a", "product"): 516,
    ("gfx90a", "prefill_kernel"): 504,
    ("gfx90a", "shared_kernel"): 268,
    ("gfx942", "product"): 524,
    ("gfx942", "prefill_kernel"): 544,
    ("gfx942", "shared_kernel"): 284,
}
#: Numbers that a line of every card needs, and one of a card whose instructions are read.
NEEDED = ("registers", "shared", "stack", "warps")
READ = ("instructions", "early", "matrix", "wide", "loop", "loop_waits", "loop_bars", "lone_waits")
#: Number -> the share by which it may grow before it is worse. Registers count only where fewer
#: programs fit (:func:`together`).
MAY_GROW = {
    "stack": 0.0,
    "spills": 0.0,
    "lone_waits": 0.0,
    "loop_waits": 0.0,
    "loop_bars": 0.0,
    "per_number": 0.02,
    "loop": 0.05,
    "instructions": 0.10,
}
#: Numbers that may not fall, while their kernel does the same: loads of 16 bytes, products.
MAY_NOT_FALL = ("wide", "matrix")
#: A card of each target, for the programs that fit on its processors.
_CARDS = {device.target: device for device in DEVICES.values()}
_CARDS |= {"sm_100": _CARDS["sm_90"], "sm_120": _CARDS["sm_89"], "gfx90a": _CARDS["gfx942"]}
Numbers = Mapping[str, float]


@dataclass(frozen=True)
class Compiled:
    """A variant: its kernel, the keys of what was compiled (``Source.key``, ``Source.ir``), and
    what was found."""

    kernel: str
    key: str
    ir: str
    numbers: Numbers

    def named(self) -> list[str]:
        """Everything but the kernel and its first key, as it stands in a line."""
        return [
            *([f"ir={self.ir}"] * bool(self.ir)),
            *(f"{n}={x:g}" for n, x in self.numbers.items()),
        ]

    def lacks(self, card: str) -> bool:
        """Whether a number is missing that its card needs."""
        needed = (*NEEDED, *READ) if card == "sm_90" else NEEDED
        return any(name not in self.numbers for name in needed)


def together(card: str, numbers: Numbers) -> int:
    """Programs that run at once on a processor."""
    names = ("warps", "registers", "shared")
    return resident(_CARDS[card], *(int(numbers[name]) for name in names))


def complaint(card: str, found: Mapping[str, Any]) -> str | None:
    """What is wrong with the code of a kernel, whatever it was before."""
    if "error" in found:
        return str(found["error"])
    kernel = found["kernel"]
    if found["shared"] > LIMITS[card] * 1024:
        return f"{found['shared']} bytes of shared memory"
    allowed = SPILLED.get((card, kernel), ONE_NUMBER)
    if found["stack"] > allowed and kernel not in ON_THE_STACK:
        return f"{found['stack']} bytes on the stack"
    # product_one loads the words of its first turn, and in the loop those of the next
    waits = kernel != "product_one" or {"experts", "offloaded"} & {*found["job"][1].split()}
    if found.get("early", 0) > (0 if waits else found.get("wide", 0) // 2):
        return f"reaches memory {found['early']} times before launch.after_earlier() waits"
    if card != "sm_90" or not kernel.startswith("product"):
        return None
    name, _, _, dtype, *_ = found["job"]
    if not found["wide"]:
        return "no load of 16 bytes"
    plain = dtype == "float32" or kernel == "product_one"
    if not plain and not found["matrix"]:
        return f"no matrix instructions for {name}"
    return None


def worse(card: str, before: Numbers, now: Numbers) -> str | None:
    """What became worse, as ``5.81 -> 6.2 per_number, 110 -> 168 registers``; None: nothing did."""
    found = [
        name
        for name, share in MAY_GROW.items()
        if name in before and now.get(name, 0) > before[name] * (1 + share)
    ]
    found += [name for name in MAY_NOT_FALL if now.get(name, 0) < before.get(name, 0)]
    if all(name in before for name in NEEDED) and together(card, now) < together(card, before):
        found += ["registers", "shared", "warps"]
    changed = [name for name in found if now[name] != before[name]]
    return ", ".join(f"{before[n]:g} -> {now[n]:g} {n}" for n in changed) or None


class Record:
    """The variants of a card by name: ``FOLDER/<card>.txt``."""

    def __init__(self, folder: Path, card: str) -> None:
        self._card = card
        self._path = folder / f"{card}.txt"
        self.variants: dict[str, Compiled] = {}
        self.triton = triton.__version__
        if self._path.is_file():
            first, *lines = self._path.read_text().splitlines()
            self.triton = first.removeprefix("triton ")
            for line in lines:
                case, kernel, key, *numbers = line.split()
                if all("=" in number for number in numbers):  # else a line of the older format
                    values = dict(number.split("=") for number in numbers)
                    ir = values.pop("ir", "")
                    named = {name: float(value) for name, value in values.items()}
                    self.variants[case] = Compiled(kernel, key, ir, named)

    def keep(self, cases: Collection[str]) -> None:
        """Forget all others."""
        self.variants = {case: found for case, found in self.variants.items() if case in cases}

    def has(self, case: str, key: str) -> bool:
        """Whether nothing is to be found of this variant but maybe its IR."""
        found = self.variants.get(case)
        return found is not None and found.key == key and not found.lacks(self._card)

    def known(self, case: str, key: str) -> str | None:
        """The IR with which this variant needs no compiling, ``""`` for any; None: with none."""
        found = self.variants.get(case)
        if found is None or found.lacks(self._card):
            return None
        if found.key == key:
            return ""
        return found.ir or None

    def add(self, lines: Mapping[str, Mapping[str, Any]], *, accept: bool = False) -> list[str]:
        """Keep what is right of what was compiled, by variant; what is wrong or worse.

        That will be compiled again by the next run. ``accept`` keeps what is only worse. A line
        without numbers is that of a kernel whose IR was :meth:`known`.
        """
        wrong = []
        for case, line in lines.items():
            old = self.variants.get(case)
            if "error" not in line and "registers" not in line:
                assert old is not None and self.known(case, line["key"]) in ("", line["ir"]), case
                self.variants[case] = replace(old, key=line["key"], ir=line["ir"])
                continue
            numbers = {n: x for n, x in line.items() if isinstance(x, int | float)}
            if why := complaint(self._card, line):
                wrong.append(f"{self._card}: {line['kernel']} of {case}: {why}")
            elif old and not accept and (why := worse(self._card, old.numbers, numbers)):
                wrong.append(f"{self._card}: worse: {line['kernel']} of {case}: {why}")
            else:
                self.variants[case] = Compiled(line["kernel"], line["key"], line["ir"], numbers)
        self.write()
        return wrong

    def write(self) -> None:
        rows = sorted(self.variants.items(), key=lambda item: (item[1].kernel, item[0]))
        text = "".join(" ".join((case, v.kernel, v.key, *v.named())) + "\n" for case, v in rows)
        temporary = self._path.with_suffix(".new")
        temporary.write_text(f"triton {triton.__version__}\n{text}")
        temporary.replace(self._path)
        self.triton = triton.__version__
