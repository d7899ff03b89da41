"""What the sweep compiles again after a change, and what it does not."""

from __future__ import annotations

import ast
import json
import sys
from pathlib import Path
from typing import Any

import pytest
import triton

from tests.gpu.aot import records, sass, sweep
from tests.scripts import run_python

ROOT = Path(__file__).parents[3]
KERNELS = '''
"""Two kernels."""
import triton
import triton.language as tl

LANES = tl.constexpr(16)


@triton.jit
def twice(x):
    """Doubles."""
    return x + x


@triton.jit
def lanes(x):
    return x + tl.arange(0, LANES)


@triton.jit
def first(x, out):
    tl.store(lanes(out), twice(tl.load(lanes(x))))


@triton.jit
def second(x):
    tl.store(x, 1.0)
'''
CHANGES = {
    "nothing": ("", ""),
    "nothing, but others are looked at before": ("", ""),
    "comment": ("    return x + x", "    # why\n\n    return x + x  # and how"),
    "docstring": ('    """Doubles."""\n', ""),
    "callee": ("return x + x", "return x * 2"),
    "constant": ("tl.constexpr(16)", "tl.constexpr(32)"),
    "other kernel": ("tl.store(x, 1.0)", "tl.store(x, 2.0)"),
}


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    """What the kernels of each changed file do; in a process where Triton does not interpret."""
    folder = tmp_path_factory.mktemp("kernels")
    for i, (old, new) in enumerate(CHANGES.values()):
        (folder / f"kernels_{i}.py").write_text(KERNELS.replace(old, new) if old else KERNELS)
    code = """
        import importlib, json, os, sys
        del os.environ["TRITON_INTERPRET"]
        sys.path[:0] = [".", sys.argv[1], sys.argv[2]]
        from machine_code import written
        found = []
        for i in range(int(sys.argv[3])):
            module = importlib.import_module(f"kernels_{i}")
            if i == 1:
                written(module.lanes)
            named = {name: str(written(getattr(module, name))) for name in ("first", "second")}
            found.append({k: text.replace(f"kernels_{i}", "") for k, text in named.items()})
        print(json.dumps(found))
    """
    found = json.loads(run_python(code, folder, sweep.FOLDER, len(CHANGES)))
    return dict(zip(CHANGES, found, strict=True))


@pytest.mark.slow
def test_the_order_in_which_kernels_are_looked_at_changes_nothing(written: Any) -> None:
    assert written["nothing, but others are looked at before"] == written["nothing"]


@pytest.mark.parametrize("change", ["comment", "docstring"])
def test_words_about_a_kernel_compile_nothing_again(written: Any, change: str) -> None:
    assert written[change] == written["nothing"]


@pytest.mark.parametrize("change", ["callee", "constant"])
def test_what_a_kernel_calls_or_reads_compiles_it_again_and_no_other(
    written: Any, change: str
) -> None:
    assert written[change]["first"] != written["nothing"]["first"]
    assert written[change]["second"] == written["nothing"]["second"]


def test_a_change_to_a_kernel_leaves_its_neighbours(written: Any) -> None:
    assert written["other kernel"]["second"] != written["nothing"]["second"]
    assert written["other kernel"]["first"] == written["nothing"]["first"]


@pytest.mark.slow
def test_only_kernels_without_a_result_are_compiled() -> None:
    job = ["sm_90", "rope float16"]
    listed = sweep.run("compile_attention.py", [job], wanted=())
    assert [line["kernel"] for line in listed] == ["rope_kernel"] * 2  # with norms and without
    assert listed[0] == {"job": job, "kernel": "rope_kernel", "key": listed[0]["key"]}
    found, other = sweep.run("compile_attention.py", [job], wanted=[listed[0]["key"]])
    assert other == listed[1]
    assert listed[0].items() < found.items()
    assert records.complaint("sm_90", found) is None


@pytest.mark.slow
def test_a_kernel_whose_ir_is_known_is_not_compiled() -> None:
    job = ["sm_80", "rows"]  # angles_kernel: 0.2 s to compile
    (key,) = {
        found["key"]
        for found in sweep.run("compile_attention.py", [job], wanted=())
        if found["kernel"] == "angles_kernel"
    }

    def found(known: str) -> dict[str, Any]:
        lines = sweep.run("compile_attention.py", [job], wanted=[key], known={key: known})
        return next(one for one in lines if one["key"] == key)

    compiled = found("of another kernel")
    assert compiled["registers"] > 0 and len(compiled["ir"]) == 12
    for known in (compiled["ir"], ""):
        assert found(known) == {name: compiled[name] for name in ("job", "kernel", "key", "ir")}


def line(key: str, **more: Any) -> dict[str, Any]:
    found = {"kernel": "rope_kernel", "registers": 24, "shared": 0, "stack": 0, "warps": 4}
    return {"job": ["sm_80", "rope int8"], "key": key, "ir": f"ir-of-{key}", **found, **more}


def known(key: str, ir: str) -> dict[str, Any]:
    """The line of a kernel that was not compiled."""
    return {"job": ["sm_80", "rope int8"], "kernel": "rope_kernel", "key": key, "ir": ir}


def test_what_is_right_is_found_again_and_what_is_wrong_tried_again(tmp_path: Path) -> None:
    record = records.Record(tmp_path, "sm_80")
    wrong = record.add(
        {"one": line("a"), "two": line("b", error="no"), "three": line("c", shared=164 << 10)}
    )
    assert wrong == [
        "sm_80: rope_kernel of two: no",
        "sm_80: rope_kernel of three: 167936 bytes of shared memory",
    ]
    again = records.Record(tmp_path, "sm_80")
    assert again.has("one", "a") and not again.has("one", "z") and not again.has("two", "b")
    again.keep(["two"])
    again.add({"two": line("d", stack=8, ir="i")})
    text = "two rope_kernel d ir=i registers=24 shared=0 stack=8 warps=4"
    assert (tmp_path / "sm_80.txt").read_text() == f"triton {triton.__version__}\n{text}\n"


def test_a_source_that_changes_nothing_else_keeps_what_was_found(tmp_path: Path) -> None:
    record = records.Record(tmp_path, "sm_80")
    record.add({"one": line("a", ir="i")})
    assert (record.known("one", "b"), record.known("one", "a")) == ("i", "")
    assert record.known("two", "b") is None
    before = record.variants["one"]
    assert record.add({"one": known("b", "i")}) == []
    again = records.Record(tmp_path, "sm_80").variants["one"]
    assert (again.key, again.ir, again.numbers) == ("b", "i", before.numbers)
    with pytest.raises(AssertionError):  # numbers of another IR
        record.add({"one": known("c", "j")})


def test_lines_without_an_ir_get_it_and_are_compiled_if_their_source_changes(
    tmp_path: Path,
) -> None:
    path = tmp_path / "sm_80.txt"
    numbers = "registers=24 shared=0 stack=0 warps=4"
    path.write_text(f"triton {triton.__version__}\none rope_kernel a {numbers}\n")
    record = records.Record(tmp_path, "sm_80")
    assert record.has("one", "a") and record.known("one", "b") is None
    assert record.known("one", "a") == ""  # whatever IR it has, the numbers are its own
    record.add({"one": known("a", "i")})
    assert path.read_text().splitlines()[1] == f"one rope_kernel a ir=i {numbers}"
    assert record.known("one", "b") == "i"


def test_a_number_that_is_missing_is_not_taken_from_an_equal_ir(tmp_path: Path) -> None:
    record = records.Record(tmp_path, "sm_90")
    record.add({"one": line("a", ir="i")})
    assert record.known("one", "a") is None and record.known("one", "b") is None


@pytest.mark.parametrize(
    ("name", "early", "right"),
    [
        *(("product_one", early, early == 2) for early in (2, 3)),
        *(("product_one offloaded", early, not early) for early in (0, 1)),
        *(("product_one experts", early, not early) for early in (0, 1)),
    ],
)
def test_only_weights_that_nobody_writes_may_be_loaded_early(
    name: str, early: int, right: bool
) -> None:
    job = ["q4_0", name, 1, "bfloat16"]
    found = line("a", kernel="product_one", job=job, early=early, wide=4)
    assert (records.complaint("sm_90", found) is None) == right


def test_a_number_that_a_card_needs_and_a_line_lacks_is_found_again(tmp_path: Path) -> None:
    for card, done in (("sm_80", True), ("sm_90", False)):
        record = records.Record(tmp_path, card)
        record.add({"one": line("a")})
        assert record.has("one", "a") is done


@pytest.mark.parametrize(
    ("variants", "sizes"), [(7, [7]), (40, [20, 20]), (121, [60, 60, 1]), (0, [])]
)
def test_a_few_variants_are_divided_among_all_processes(
    monkeypatch: pytest.MonkeyPatch, variants: int, sizes: list[int]
) -> None:
    monkeypatch.setattr(sweep, "WORKERS", 2)
    left = {str(i): sweep.Variant("one.py", i, str(i)) for i in range(variants)}
    left |= {"other": sweep.Variant("two.py", 0, "other")}
    chunks = list(sweep._in_chunks(left))
    assert [len(chunk) for chunk in chunks] == [*sizes, 1]
    assert [case for chunk in chunks for case in chunk] == list(left)


def test_a_sample_has_every_kernel_with_every_format_in_changing_variants() -> None:
    def variants(program: str, jobs: dict[str, Any]) -> dict[str, sweep.Variant]:
        return {case: sweep.Variant(program, job, case) for case, job in jobs.items()}

    weights = ("q4_0", "q6_k", "nf4-g64")
    products = {
        f"product/{weight}/{tokens}/float16": (weight, "product", tokens, "float16", "cuda", 90)
        for weight in weights
        for tokens in (2, 64)
    }
    cases = {
        f"attention+int8+{width}/{kernel}": ("sm_90", f"attention int8 {width}")
        for width in (64, 128)
        for kernel in ("decode_kernel", "prefill_kernel")
    }
    found = sweep.sampled(variants("one.py", products) | variants("two.py", cases))
    assert list(found) == [
        *("product/q4_0/2/float16", "product/q6_k/64/float16", "product/nf4-g64/2/float16"),
        *("attention+int8+128/decode_kernel", "attention+int8+64/prefill_kernel"),
    ]


def test_a_sample_does_not_replace_the_records(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["sweep.py", "sm_90", "--sample"])
    monkeypatch.setattr(sweep, "sweep", lambda *_, **__: pytest.fail("it was begun"))
    with pytest.raises(SystemExit):
        sweep.main()
    assert "--sample: expected another folder (--out)" in capsys.readouterr().err


@pytest.mark.parametrize("card", records.LIMITS)
def test_spilled_registers_are_wrong_on_every_card(card: str) -> None:
    for kernel in ("rope_kernel", "product_one", "product"):
        most = records.SPILLED.get((card, kernel), records.ONE_NUMBER)
        found = line("a", kernel=kernel, job=["q4_0", kernel, 1, "float32"], wide=1)
        assert records.complaint(card, found | {"stack": most}) is None
        assert (
            records.complaint(card, found | {"stack": most + 1}) == f"{most + 1} bytes on the stack"
        )
    assert records.complaint(card, line("a", kernel="angles_kernel", stack=32)) is None


def test_no_kernel_may_spill_more_than_the_worst_of_the_records() -> None:
    most: dict[tuple[str, str], float] = {}
    for card in sweep.CARDS:
        for found in records.Record(sweep.COMPILED, card).variants.values():
            kernel = card, found.kernel
            most[kernel] = max(most.get(kernel, 0), found.numbers["stack"])
    assert {kernel: most[kernel] for kernel in records.SPILLED} == records.SPILLED
    assert min(records.SPILLED.values()) > records.ONE_NUMBER


BEFORE = {"registers": 110, "shared": 1024, "stack": 0, "warps": 4, "per_number": 2.1, "wide": 6}
CHANGED = {
    "instructions": ({"per_number": 2.6}, "2.1 -> 2.6 per_number"),
    "fewer programs": ({"registers": 168}, "110 -> 168 registers"),
    "spills": ({"stack": 8}, "0 -> 8 stack"),
    "narrow loads": ({"wide": 5}, "6 -> 5 wide"),
    "both": ({"per_number": 2.6, "registers": 168}, "2.1 -> 2.6 per_number, 110 -> 168 registers"),
    "noise": ({"per_number": 2.14}, None),
    "as many programs": ({"registers": 112}, None),
    "better": ({"registers": 64, "per_number": 1.5, "wide": 8}, None),
}


@pytest.mark.parametrize("name", CHANGED)
def test_what_became_worse_is_named_and_written_down_only_if_accepted(
    tmp_path: Path, name: str
) -> None:
    more, expected = CHANGED[name]
    record = records.Record(tmp_path, "sm_80")
    record.add({"product/int4-g128-zeros/64/bfloat16": line("a", **BEFORE)})
    again = records.Record(tmp_path, "sm_80")
    given = {"product/int4-g128-zeros/64/bfloat16": line("b", **{**BEFORE, **more})}
    wrong = again.add(given)
    kept = records.Record(tmp_path, "sm_80").has("product/int4-g128-zeros/64/bfloat16", "b")
    if expected is None:
        assert (wrong, kept) == ([], True)
        return
    case = "rope_kernel of product/int4-g128-zeros/64/bfloat16"
    assert (wrong, kept) == ([f"sm_80: worse: {case}: {expected}"], False)
    assert again.add(given, accept=True) == []
    assert records.Record(tmp_path, "sm_80").has("product/int4-g128-zeros/64/bfloat16", "b")


CODE = """
        /*0000*/                   MOV R1, c[0x0][0x28] ;
        /*0010*/              @!P1 BRA `(.L_x_2) ;
.L_x_0:
        /*0020*/                   LDG.E.128.CONSTANT R4, desc[UR4][R2.64] ;
.L_x_1:
        /*0030*/                   LDGSTS.E.BYPASS.128 [R5], desc[UR4][R2.64] ;
        /*0040*/                   HGMMA.64x64x16.F32.BF16 R24, R60, gdesc[UR16], RZ, !UPT, gsb0 ;
        /*0050*/                   WARPGROUP.DEPBAR.LE gsb0, 0x0 ;
        /*0060*/               @P0 FFMA R4, R5, R6, R7 ;
        /*0070*/                   BAR.SYNC.DEFER_BLOCKING 0x0 ;
        /*0080*/              @!P0 BRA `(.L_x_1) ;
        /*0090*/               @P2 BRA `(.L_x_0) ;
.L_x_2:
        /*00a0*/                   STL [R1], R4 ;
        /*00b0*/                   EXIT ;
.L_x_3:
        /*00c0*/                   BRA `(.L_x_3);
        /*00d0*/                   NOP;
"""


def test_the_main_loop_is_the_largest_with_none_inside() -> None:
    loop = sass.main_loop(sass.read_code(CODE))
    assert [x.name.partition(".")[0] for x in loop] == [
        *("LDGSTS", "HGMMA", "WARPGROUP", "FFMA", "BAR", "BRA")
    ]
    found = sass.facts(CODE)
    assert (found["instructions"], found["wide"], found["spills"]) == (13, 2, 1)
    assert (found["loop"], found["loop_matrix"], found["loop_waits"]) == (6, 1, 1)
    assert (found["lone_waits"], found["loop_bars"], found["loop_fma"]) == (1, 1, 1)


def test_code_without_a_loop_has_none() -> None:
    found = sass.facts(CODE.replace("BRA", "JMP"))
    assert (found["loop"], found["instructions"]) == (0, 13)


def test_every_kernel_that_is_launched_is_listed() -> None:
    """Launched is what waits for earlier kernels (launch.run_kernel)."""
    launched = {
        function.name
        for file in (ROOT / "kernels" / "gpu").glob("*.py")
        for function in ast.parse(file.read_text()).body
        if isinstance(function, ast.FunctionDef)
        and any("jit" in ast.unparse(decorator) for decorator in function.decorator_list)
        and any("after_earlier()" in ast.unparse(each) for each in function.body)
    }
    listed = {found.kernel for found in records.Record(sweep.COMPILED, "sm_90").variants.values()}
    assert listed == launched


@pytest.mark.skipif(
    sys.version_info < (3, 11), reason="ast.unparse of 3.10 writes tuples otherwise: other keys"
)
@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    "cards",
    [["sm_90"], pytest.param([x for x in sweep.CARDS if x != "sm_90"], marks=pytest.mark.slow)],
    ids=["sm_90", "the others"],
)
def test_every_kernel_of_every_card_was_compiled(cards: list[str]) -> None:
    known = {card: records.Record(sweep.COMPILED, card) for card in sweep.CARDS}
    (version,) = {record.triton for record in known.values()}
    if version != triton.__version__:
        pytest.skip(f"they were compiled by Triton {version}, this is {triton.__version__}")
    missing = {
        card: f"{len(new)} kernels are new or changed: run `make aot-{card}`"
        for card, variants in sweep.variants_of(cards).items()
        if (new := [case for case, v in variants.items() if not known[card].has(case, v.key)])
    }
    assert missing == {}
