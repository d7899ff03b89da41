"""Known-answer checks of the Triton kernels, under the interpreter.

Every operator passes, and every operator with a mistake in it is found, replaced and named.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from sdk.cli.doctor_gpu import usual
from sdk.kernels.backend import Problem
from sdk.kernels.errors import KernelError
from sdk.kernels.gpu import linear, norm
from sdk.kernels.known_answers import cases as answer_cases
from sdk.kernels.known_answers.check import NO_FALLBACK
from sdk.kernels.known_answers.file import FAILED
from sdk.kernels.operators.norm import Norm
from sdk.kernels.operators.ops import Ops
from sdk.kernels.operators.sampling import SampleBuffers
from sdk.kernels.reference.decode import decode
from tests.gpu.answer_cases import (
    CASES,
    F32,
    answers_of,
    card_ops,
    rows,
    tried,
)


@pytest.fixture
def ops() -> Iterator[Ops]:
    made = card_ops()
    yield made
    made.close()


#: Two seconds each; float16 and int4 are the quick ones.
SLOW = {
    f"attention-{name}" for name in ("float32", "bfloat16", "int8", "fp8", "both-ways", "biased")
}


@pytest.mark.quick_cases(12)
@pytest.mark.parametrize(
    "name", [pytest.param(x, marks=[pytest.mark.slow] * (x in SLOW)) for x in CASES]
)
def test_every_operator_passes(ops: Ops, name: str) -> None:
    answers = answers_of(ops)
    kernel, reason = tried(ops, name)
    assert kernel.name.startswith("gpu.") and reason is None
    (answer,) = answers._known.values()
    assert answer.distance < 0.004  # far below what a mistake causes
    assert answers.ran == 1


def tensors(x: Any) -> Iterator[Tensor]:
    """All tensors in the arguments of a kernel."""
    if isinstance(x, Tensor):
        yield x
    elif isinstance(x, SampleBuffers):
        yield from (torch.from_numpy(each) for each in (x.tokens, x.best, x.probabilities))
    elif isinstance(x, tuple | list):
        for one in x:
            yield from tensors(one)
    elif is_dataclass(x):
        for field in fields(x):
            yield from tensors(getattr(x, field.name))


def _is_float(x: Tensor) -> bool:
    return x.is_floating_point() and x.itemsize > 1


def wrong_scale(x: Tensor, before: Tensor) -> None:
    if _is_float(x):
        x.mul_(1.25)
    else:
        x.copy_((x.int() + 3).to(x.dtype))


def dropped_tail(x: Tensor, before: Tensor) -> None:
    """What the last columns of the last row that was written would be if nobody wrote them."""
    bits = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[x.itemsize]
    changed = (x.view(bits) != before.view(bits)).nonzero()
    row = changed[-1][:-1].tolist()
    width = max(1, x.shape[-1] // 4)
    x[(*row, slice(-width, None))] = before[(*row, slice(-width, None))]


def swapped_rows(x: Tensor, before: Tensor) -> None:
    bits = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[x.itemsize]
    changed = (x.view(bits) != before.view(bits)).flatten(1).any(1) if x.dim() > 1 else None
    rows = range(len(x)) if changed is None else changed.nonzero().flatten().tolist()
    a, b = next((i, j) for i in rows for j in rows if i < j and not torch.equal(x[i], x[j]))
    first = x[a].clone()
    x[a] = x[b]
    x[b] = first


def not_a_number(x: Tensor, before: Tensor) -> None:
    if _is_float(x):
        x[(-1,) * x.dim()] = torch.nan
    else:  # a number that belongs to nothing
        x[(0,) * x.dim()] = 97


MISTAKES = {f.__name__: f for f in (wrong_scale, dropped_tail, swapped_rows, not_a_number)}


class Sabotaged:
    """The reference with a mistake in what it writes, under the name of a kernel of the card."""

    rounds = False

    def __init__(self, inner: Any, mistake: Callable[[Tensor, Tensor], None]) -> None:
        self._inner, self._mistake = inner, mistake
        self.name = "gpu.sabotaged"

    def reject(self, problem: Problem) -> None:
        return None

    def _spoil(self, function: Callable[..., Any], *args: Any) -> None:
        known = [(x, x.clone()) for x in tensors(args)]
        function(*args)
        view = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
        written = [
            (x, old)
            for x, old in known
            if not torch.equal(x.view(view[x.itemsize]), old.view(view[old.itemsize]))
        ]
        assert written, "expected something to be written"
        # of pages the scales, which a mistake in a code would not change enough
        x, old = max(written, key=lambda pair: _is_float(pair[0]) + pair[0].dim() / 100)
        self._mistake(x, old)

    def run(self, *args: Any) -> None:
        self._spoil(self._inner.run, *args)

    def table(self, *args: Any) -> Any:
        made = self._inner.table(*args)
        add = made.add
        made.add = lambda x, y, slots: self._spoil(lambda *given: add(x, *given, slots), y)
        return made


#: One of each operator; zeros have neither a scale nor an order.
SABOTAGED = [
    (name, mistake)
    for name in CASES
    for mistake in MISTAKES
    if not (name == "zeros" and mistake in ("wrong_scale", "swapped_rows"))
]


@pytest.mark.quick_cases(50)
@pytest.mark.parametrize(("name", "mistake"), SABOTAGED)
def test_every_mistake_is_found_and_the_operator_is_replaced_and_named(
    ops: Ops, name: str, mistake: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    answers = answers_of(ops)
    op, like, about = CASES[name]()
    card, reference = ops.context.backends
    right = reference.implementations(op)[0]
    wrong = Sabotaged(right, MISTAKES[mistake])
    monkeypatch.setattr(card, "implementations", lambda asked: (wrong,) if asked == op else ())
    if op in NO_FALLBACK:
        with pytest.raises(KernelError, match=r"gpu\.sabotaged failed .* no other kernel") as error:
            ops.context.kernel(op, like, **about)
        assert "from the reference" in str(error.value)
        return
    assert ops.context.kernel(op, like, **about) is right
    (line,) = answers.failures()
    assert line.startswith(f"gpu.sabotaged {FAILED}: ") and line.endswith(f"{right.name} runs {op}")
    (answer,) = answers._known.values()
    assert "from the reference, allowed" in answer.reason
    # far above what is allowed; a share of integers may be small, but none may differ
    assert not answer.distance <= (0.1 if "allowed are 0\n" not in f"{answer.reason}\n" else 0.0)


def test_a_kernel_that_does_not_compile_is_replaced(
    ops: Ops, monkeypatch: pytest.MonkeyPatch
) -> None:
    def run(self: Any, *args: Any) -> None:
        raise ValueError("out of registers")

    monkeypatch.setattr(norm.Normalize, "run", run)
    answers = answers_of(ops)
    assert ops.norm(rows(70) + 1, Norm(torch.ones(70), 1e-6)).isfinite().all()
    (line,) = answers.failures()
    assert "ValueError: out of registers" in line and "reference.norm runs norm" in line


def right_product(self: Any, packed: Any, x: Tensor, out: Tensor, activation: str = "") -> None:
    """Without the interpreter, which takes a minute for 300 tokens."""
    out.copy_(x.float() @ decode(self.unpack(packed)).t())


@pytest.mark.slow
def test_products_of_many_tokens_are_right(cases: Any) -> None:
    """300: dequantized for the library."""
    ops = Ops("cpu", num_threads=1, backends=("gpu", "reference"))
    answers = answers_of(ops)
    bound = ops.linear(cases.affine(35, 96, 4, 32, "minus"))
    assert bound.choice.name == "gpu.linear" and answers.ran == 1
    ops.close()


def test_products_of_many_tokens_are_checked_once_for_each_kind(
    cases: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(linear.TritonLinear, "matmul", right_product)
    ops = Ops("cpu", num_threads=1, backends=("gpu", "reference"))
    answers = answers_of(ops, tmp_path)
    for width in (96, 64):
        ops.linear(cases.affine(35, width, 4, 32, "minus"))
    assert answers.ran == 1
    ops.linear(cases.blocks(19, 256, "q4_k"))
    assert answers.ran == 2
    again = answers_of(ops, tmp_path)
    ops.linear(cases.affine(35, 160, 4, 32, "minus"))
    assert again.ran == 0
    ops.close()


@pytest.mark.parametrize("tokens", [16, 64, 300])
def test_a_product_that_is_wrong_for_many_tokens_is_replaced(
    cases: Any, tokens: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    def matmul(self: Any, packed: Any, x: Tensor, out: Tensor) -> None:
        right_product(self, packed, x, out)
        if len(x) == tokens:
            out[-1] *= 3

    monkeypatch.setattr(linear.TritonLinear, "matmul", matmul)
    ops = Ops("cpu", num_threads=1, backends=("gpu", "reference"))
    answers_of(ops)
    bound = ops.linear(cases.affine(35, 96, 4, 32, "minus"))
    ops.close()
    assert bound.choice.name == "reference.linear"
    assert f"for {tokens} tokens" in dict(bound.choice.declined)["gpu.linear"]


def test_experts_that_are_wrong_together_run_one_by_one(
    cases: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(linear.TritonLinear, "matmul", right_product)
    ops = Ops("cpu", num_threads=1, backends=("gpu", "reference"))
    answers = answers_of(ops)
    each = [ops.linear(cases.affine(32, 64, 4, 32, "zeros", seed=i)) for i in range(20)]
    ran = answers.ran
    assert ops.moe.group(each) is not None and answers.ran == ran + 1
    assert ops.moe.group(each) is not None and answers.ran == ran + 1
    whole = linear.TritonLinear.matmul_routed

    def matmul_routed(self: Any, group: Any, x: Tensor, routes: Any, *rest: Any) -> None:
        whole(self, group, x, routes, *rest)
        rest[1][-1] = rest[1][0]  # the last row of the last expert

    monkeypatch.setattr(linear.TritonLinear, "matmul_routed", matmul_routed)
    answers = answers_of(ops)
    assert ops.moe.group(each) is None
    (line,) = answers.failures()
    assert line.startswith(f"gpu.linear of experts {FAILED}: ") and line.endswith("alone")
    ops.close()


def test_a_failure_is_remembered(ops: Ops, tmp_path: Path) -> None:
    answers_of(ops, tmp_path)
    right = ops.context.backends[1].implementations("combine")[0]
    wrong = Sabotaged(right, not_a_number)
    like = CASES["combine"]()[1]
    assert ops.context.answers is not None
    reason = ops.context.answers.reason(wrong, Problem("combine"), like)
    assert reason is not None
    again = answers_of(ops, tmp_path)
    assert again.reason(wrong, Problem("combine"), like) == reason and again.ran == 0


def test_doctor_checks_every_operator(ops: Ops) -> None:
    found = list(usual(ops))
    for op, like, about in found:
        assert ops.context.kernel(op, like, **about).name.startswith("gpu."), op
    assert {op for op, _, _ in found} == set(answer_cases.CASES)


def test_doctor_gives_every_check_what_it_runs_on(ops: Ops) -> None:
    """With the reference's kernels, which need a second where the interpreter needs a minute."""
    place = answer_cases.Place(torch.device("cpu"), F32, torch.bfloat16)
    _, reference = ops.context.backends
    for op, like, about in usual(ops):
        found = answer_cases.CASES[op](
            reference.implementations(op)[0], place, Problem(op, **about), like
        )
        assert found and all(not values.isnan().any() for _, values, _ in found), op


@pytest.mark.slow
def test_what_doctor_checks_is_right(ops: Ops) -> None:
    answers = answers_of(ops)
    for op, like, about in usual(ops):
        ops.context.kernel(op, like, **about)
    assert answers.failures() == [] and answers.ran > 20
