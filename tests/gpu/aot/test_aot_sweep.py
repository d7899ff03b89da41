"""What the sweep compiles again after a change, and what it does not."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
import triton

from tests.gpu.aot import sweep
from tests.scripts import run_python

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
    assert [line["kernel"] for line in listed] == ["rope_kernel"]
    assert listed == [{"job": job, "kernel": "rope_kernel", "key": listed[0]["key"]}]
    (found,) = sweep.run("compile_attention.py", [job], wanted=[listed[0]["key"]])
    assert listed[0].items() < found.items()
    assert sweep.complaint("sm_90", found) is None


def line(key: str, **more: Any) -> dict[str, Any]:
    found = {"kernel": "rope_kernel", "registers": 24, "shared": 0, "stack": 0}
    return {"job": ["sm_80", "rope int8"], "key": key, **found, **more}


def test_what_is_right_is_found_again_and_what_is_wrong_tried_again(tmp_path: Path) -> None:
    record = sweep.Record(tmp_path, "sm_80")
    wrong = record.add([line("a"), line("b", error="no"), line("c", shared=164 << 10)])
    assert [text.partition(": ")[2] for text in wrong] == [
        "rope_kernel of ['sm_80', 'rope int8']: no",
        "rope_kernel of ['sm_80', 'rope int8']: 167936 bytes of shared memory",
    ]
    again = sweep.Record(tmp_path, "sm_80")
    assert again.kernels == {"a": sweep.Compiled("rope_kernel", 24, 0, 0)}
    again.keep(["d"])
    again.add([line("d", stack=8)])
    text = f"triton {triton.__version__}\nd rope_kernel 24 0 8\n"
    assert (tmp_path / "sm_80.txt").read_text() == text


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
    records = {card: sweep.Record(sweep.COMPILED, card) for card in sweep.CARDS}
    (version,) = {record.triton for record in records.values()}
    if version != triton.__version__:
        pytest.skip(f"they were compiled by Triton {version}, this is {triton.__version__}")
    missing = {
        card: f"{len(new)} kernels are new or changed: run `make aot-{card}`"
        for card, keys in sweep.kernels_of(cards).items()
        if (new := keys.keys() - records[card].kernels)
    }
    assert missing == {}
