"""The comparison of records that two versions of Triton made."""

from __future__ import annotations

from pathlib import Path

from tests.gpu.aot import other_triton
from tests.gpu.aot.records import Record
from tests.gpu.aot.sweep import COMPILED

LINE = "{case} {kernel} 0123 registers={registers} stack={stack} shared=1024 warps=4 {more}\n"


def _record(folder: Path, version: str, *lines: dict[str, object]) -> Record:
    folder.mkdir()
    text = "".join(LINE.format(**{"stack": 0, "registers": 64, "more": ""} | x) for x in lines)
    (folder / "sm_90.txt").write_text(f"triton {version}\n{text}")
    return Record(folder, "sm_90")


def test_a_variant_that_spills_or_fits_less_is_named_and_others_are_not(tmp_path: Path) -> None:
    names = [{"case": f"case/{i}", "kernel": "product"} for i in range(4)]
    ours = _record(tmp_path / "a", "3.6.0", *(x | {"more": "loop=100"} for x in names))
    changes = ({"stack": 24}, {"registers": 250}, {"registers": 60}, {})
    other = _record(
        tmp_path / "b",
        "3.7.1",
        *(x | {"more": "loop=150"} | change for x, change in zip(names, changes, strict=True)),
    )
    found = other_triton.pairs(ours, other, "sm_90")
    assert list(other_triton.worse(found)) == [
        "case/0: 64 -> 64 registers, 0 -> 24 stack, 1024 -> 1024 shared",
        "case/1: 64 -> 250 registers, 0 -> 0 stack, 1024 -> 1024 shared",
    ]
    assert (
        other_triton.table(found).splitlines()[-1] == "| product | 4 | 1.50 | 1.50 | 1.50 | 1 | 1 |"
    )


def test_only_variants_of_both_are_compared_loops_with_loops(tmp_path: Path) -> None:
    row = {"case": "row", "kernel": "norm_kernel"}
    ours = _record(
        tmp_path / "a",
        "3.6.0",
        row | {"more": "loop=10 instructions=90"},
        {"case": "only", "kernel": "norm_kernel"},
    )
    other = _record(tmp_path / "b", "3.9.0", row | {"more": "loop=0 instructions=45"})
    (pair,) = other_triton.pairs(ours, other, "sm_90")
    assert pair.case == "row" and pair.share is None


def test_records_beside_themselves_have_nothing_worse() -> None:
    record = Record(COMPILED, "sm_90")
    found = other_triton.pairs(record, record, "sm_90")
    assert len(found) == len(record.variants) and not list(other_triton.worse(found))
    assert {pair.share for pair in found} <= {1.0, None}
