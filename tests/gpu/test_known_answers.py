"""Known-answer checks of the Triton kernels, under the interpreter.

Every operator passes, and every operator with a mistake in it is found, replaced and named.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from sdk.cli.doctor_gpu import usual
from sdk.engine.rank.kv_cache import KVCache
from sdk.kernels.backend import Problem
from sdk.kernels.errors import KernelError
from sdk.kernels.gpu import linear, norm
from sdk.kernels.known_answers import cases as answer_cases
from sdk.kernels.known_answers.check import NO_FALLBACK, KnownAnswers
from sdk.kernels.known_answers.file import FAILED, Answer, AnswerFile
from sdk.kernels.kv.pages import KVPages
from sdk.kernels.operators.head_norms import HeadNorms, QueryScale
from sdk.kernels.operators.low_rank import Shape
from sdk.kernels.operators.norm import Norm
from sdk.kernels.operators.ops import Ops
from sdk.kernels.operators.rounding import Rounding
from sdk.kernels.operators.route_rule import SOFTMAX, RouteRule
from sdk.kernels.operators.sampling import SampleBuffers
from sdk.kernels.reference.decode import decode
from sdk.kernels.weights.layouts import ActivationScheme
from sdk.quant.caches import AttentionCache
from sdk.quant.spec import KVSpec

MACHINE = {"card": "a card that is not here", "driver": "1"}


@pytest.fixture
def ops() -> Iterator[Ops]:
    made = Ops("cpu", num_threads=1, backends=("gpu", "reference"), activations="bfloat16")
    yield made
    made.close()


def answers_of(ops: Ops, folder: Path | None = None) -> KnownAnswers:
    file = None if folder is None else AnswerFile(folder, MACHINE)
    ops.context.answers = KnownAnswers(ops.context, file)
    return ops.context.answers


def pages(dtype: str, head_dim: int = 64, kv_heads: int = 2, size: int = 16) -> KVPages:
    """The second of three layers' pages, as a card has them."""
    spec = KVSpec(num_layers=3, kv_heads=kv_heads, head_dim=head_dim, page_size=size, dtype=dtype)
    return KVCache(spec, 2, keys_transposed=False).layers[1]


def rows(width: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    return torch.zeros(2, width, dtype=dtype)


def heads(count: int, head_dim: int = 64, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    """Rows of a fused projection."""
    return torch.zeros(2, (count + 4) * head_dim, dtype=dtype)[:, : count * head_dim].view(
        2, count, head_dim
    )


def attention(
    dtype: str, both: bool = False, biased: bool = False, ahead: bool = False, **changed: Any
) -> tuple[str, Sequence[Any], dict[str, Any]]:
    own = pages(dtype, **changed)
    slopes = torch.zeros(4) if biased else None
    like = [heads(4, own.head_dim), own, 0.2, None, None, None, slopes, True, not both, False]
    like.append(ahead)
    return "attention", like, {"head_dim": own.head_dim, "kv_dtype": own.dtype}


def rope(
    dtype: str, norms: bool = False, more: bool = False
) -> tuple[str, Sequence[Any], dict[str, Any]]:
    """``more``: norms after the rotation, one of values, and a scale by position."""
    own, norm = pages(dtype), Norm(torch.ones(64), 1e-6)
    parts = heads(4), heads(2), heads(2)
    like = (
        *parts,
        torch.zeros(2, 32),
        own,
        HeadNorms(norm, norm, norm if more else None, more) if norms else None,
        QueryScale(0.1, 16384) if more else None,
    )
    return "rope_and_cache", like, {"head_dim": 64, "kv_dtype": own.dtype}


def latent_pages(dtype: str) -> KVPages:
    caches = (AttentionCache(1, 96, 64, latent=True),) * 3
    spec = KVSpec(3, 1, 96, 16, dtype, caches)
    return KVCache(spec, 2, keys_transposed=False).layers[1]


def latent(dtype: str, op: str) -> tuple[str, Sequence[Any], dict[str, Any]]:
    """Attention over latent pages, and their write."""
    own, q = latent_pages(dtype), heads(4, 96)
    fields = {"head_dim": 96, "value_dim": 64, "kv_dtype": own.dtype}
    if op == "attention":
        like = (q, own, 0.2, None, None, None, None, False, True, False, False)
        return op, like, {**fields, "format": "latent"}
    return op, (q, heads(1), torch.zeros(2, 16), own, QueryScale(0.1, 16384)), fields


def norm_of(*shape: int, biased: bool = False, centred: bool = False) -> Norm:
    weight = torch.ones(shape)
    return Norm(weight, 1e-5, weight.clone() if biased else None, centred)


def slots(*shape: int) -> Tensor:
    return torch.zeros(2, *shape)


def delta(
    decay: Tensor, eps: float | None = 1e-6, *, tiled: bool = False
) -> tuple[str, Sequence[Any], dict[str, Any]]:
    like = heads(2, 32), heads(2, 32), heads(4, 24), decay, slots(4, 32, 24), eps, tiled
    return "gated_delta", like, {"head_dim": 32, "format": "rows" if decay.dim() == 3 else ""}


def rwkv(first: tuple[Tensor, Tensor] | None) -> tuple[str, Sequence[Any], dict[str, Any]]:
    one, wide = heads(4, 24), slots(4, 24)
    like = one, one, one, wide, wide, first, slots(4, 24, 24)
    return "rwkv", like, {"head_dim": 24, "format": "first" * (first is not None)}


CODES = ActivationScheme("int")
F32, BF16 = torch.float32, torch.bfloat16
#: name -> operator, what it will run on, fields of its problem.
CASES: dict[str, Callable[[], tuple[str, Sequence[Any], dict[str, Any]]]] = {
    "norm": lambda: ("norm", (rows(200), norm_of(200), BF16, None), {}),
    "norm-wide": lambda: ("norm", (rows(96, F32), norm_of(96), F32, None), {}),
    "norm-heads": lambda: ("norm", (heads(3), norm_of(3, 64, centred=True), BF16, None), {}),
    "norm-unweighted": lambda: ("norm", (rows(96), Norm(None, 1e-5), BF16, None), {}),
    "add_norm": lambda: ("add_norm", (rows(200), norm_of(200), BF16, None), {}),
    "add_norm-layer": lambda: (
        "add_norm",
        (rows(200), norm_of(200, biased=True, centred=True), BF16, None),
        {},
    ),
    "add_norm-codes": lambda: (
        "add_norm",
        (rows(200), norm_of(200), BF16, Rounding(CODES, torch.int8, 256, 1)),
        {"inputs": str(CODES)},
    ),
    "gated_activation": lambda: ("gated_activation", (rows(300),), {"format": "silu"}),
    "gated_activation-gelu": lambda: ("gated_activation", (rows(300),), {"format": "gelu_tanh"}),
    "activation": lambda: ("activation", (rows(300),), {"format": "relu2"}),
    "activation-xielu": lambda: ("activation", (rows(300),), {"format": "xielu"}),
    "zeros": lambda: ("zeros", (rows(70, F32),), {}),
    "add": lambda: ("add", (rows(70),), {}),
    "add_bias": lambda: ("add_bias", (rows(70),), {}),
    "scale": lambda: ("scale", (rows(70, F32),), {}),
    "softcap": lambda: ("softcap", (rows(70, F32),), {}),
    "clamp": lambda: ("clamp", (rows(70),), {}),
    "select_rows": lambda: ("select_rows", (rows(70, F32),), {}),
    "take_columns": lambda: ("take_columns", (rows(70),), {}),
    "attention-latent": lambda: latent("float16", "attention"),
    "attention-latent-int8": lambda: latent("int8", "attention"),
    "latent_rope": lambda: latent("fp8", "latent_rope_and_cache"),
    "rope_angles": lambda: ("rope_angles", (torch.ones(32), None, None), {}),
    "rope_angles-axes": lambda: (
        "rope_angles",
        (torch.ones(32), torch.zeros(32, dtype=torch.int32), None),
        {},
    ),
    "rope_angles-shifts": lambda: (
        "rope_angles",
        (torch.ones(32), *torch.zeros(2, 32, dtype=torch.int32)),
        {},
    ),
    "place_rows": lambda: ("place_rows", (rows(70, F32),), {}),
    "find_places": lambda: ("find_places", (16,), {}),
    **{
        f"rope_and_cache-{t}": (lambda t=t: rope(t))
        for t in ("float16", "bfloat16", "int8", "fp8", "int4")
    },
    "rope_and_cache-norms": lambda: rope("float16", norms=True),
    "rope_and_cache-more": lambda: rope("bfloat16", norms=True, more=True),
    "gate": lambda: ("gate", (rows(96), rows(96)), {"format": "sigmoid"}),
    "gate-heads": lambda: ("gate", (rows(96), rows(3)), {"format": "softplus"}),
    **{
        f"attention-{t}": (lambda t=t: attention(t))
        for t in ("float32", "float16", "bfloat16", "int8", "fp8", "int4", "k8v4")
    },
    "attention-both-ways": lambda: attention("float16", both=True),
    "attention-ahead": lambda: attention("float16", ahead=True),
    "attention-biased": lambda: attention("float16", biased=True),
    "route": lambda: ("route", (rows(8, F32), 2, SOFTMAX, None), {}),
    "route-sigmoid": lambda: (
        "route",
        (rows(8, F32), 2, RouteRule("sigmoid", groups=2, scale=2.5), torch.ones(8)),
        {"format": "sigmoid bias groups"},
    ),
    "group": lambda: ("group", (torch.zeros(2, 2, dtype=torch.int32), 8), {}),
    "add_owners_bias": lambda: ("add_owners_bias", (rows(70), 8, 2), {}),
    "combine": lambda: ("combine", (rows(70), 8, 2, None, None), {}),
    "combine-gated": lambda: (
        "combine",
        (rows(70), 8, 2, rows(70, F32), rows(1, F32)),
        {"format": "gated"},
    ),
    "low_rank": lambda: ("low_rank", (Shape(4, 200, 132, 2, 16), torch.bfloat16), {}),
    "low_rank-ids": lambda: (
        "low_rank",
        (Shape(4, 50, 70, 1, 8, of_ids=True), torch.bfloat16),
        {},
    ),
    "sample": lambda: ("sample", (rows(9000, F32),), {}),
    "causal_conv": lambda: (
        "causal_conv",
        (rows(70), torch.zeros(70, 4), rows(70, F32)[0], slots(3, 70), "silu", None, None),
        {},
    ),
    "causal_conv-gated": lambda: (
        "causal_conv",
        (rows(70), torch.zeros(70, 3), None, slots(2, 70), None, rows(70), rows(70)),
        {"format": "before after"},
    ),
    "causal_conv-several": lambda: (
        "causal_conv",
        (rows(70), torch.zeros(3, 70, 2), None, slots(1, 70), None, None, None),
        {},
    ),
    "rwkv": lambda: rwkv(None),
    "rwkv-first": lambda: rwkv((heads(4, 24), slots(4, 24))),
    "gated_delta": lambda: delta(slots(4)),
    "gated_delta-rows": lambda: delta(slots(4, 32), eps=None, tiled=True),
    "ssd": lambda: (
        "ssd",
        (heads(4, 24), heads(2, 32), rows(4, F32)[0], slots(4, 24, 32)),
        {"head_dim": 32},
    ),
    "selective_scan": lambda: (
        "selective_scan",
        (rows(70), rows(16), rows(70, F32)[0], slots(70, 16)),
        {"head_dim": 16},
    ),
    "rates": lambda: (
        "rates",
        (rows(70), "softplus", rows(70, F32)[0], rows(7, F32)[0], (0.01, 8.0)),
        {"format": "softplus"},
    ),
    "rates-tanh": lambda: (
        "rates",
        (rows(70), "tanh", None, None, None),
        {"format": "tanh"},
    ),
    "rates-sigmoid": lambda: (
        "rates",
        (rows(70), "sigmoid", None, None, None),
        {"format": "sigmoid"},
    ),
    "gated_norm": lambda: (
        "gated_norm",
        (heads(3), heads(3), norm_of(64), "silu", False),
        {"format": "silu"},
    ),
    "gated_norm-first": lambda: (
        "gated_norm",
        (heads(3), heads(3), norm_of(3, 64), "silu", True),
        {"format": "silu first"},
    ),
}


def tried(ops: Ops, name: str) -> tuple[Any, str | None]:
    """The first kernel of the operator, and why it must not run."""
    op, like, about = CASES[name]()
    problem = Problem(op, **about)
    kernels = ops.context.backends[0].implementations(op)
    kernel = next(one for one in kernels if one.reject(problem) is None)
    answers = ops.context.answers
    assert answers is not None
    return kernel, answers.reason(kernel, problem, like)


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


# ---- mistakes ------------------------------------------------------------------------------------


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


def test_a_broken_card_is_an_error_that_is_remembered(
    ops: Ops, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def run(self: Any, *args: Any) -> None:
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

    monkeypatch.setattr(norm.Normalize, "run", run)
    answers_of(ops, tmp_path)
    with pytest.raises(KernelError, match=r"gpu\.norm .* cannot use the card any more"):
        ops.norm(rows(70), Norm(torch.ones(70), 1e-6))
    (answer,) = AnswerFile(tmp_path, MACHINE).read().values()
    assert "illegal memory access" in answer.reason


def in_a_child(body: Callable[[], None]) -> int:
    """The process that ran it; ``body`` ends it, or it returns."""
    child = os.fork()
    if child == 0:
        try:
            body()
        finally:
            os._exit(0)
    return child


@pytest.mark.parametrize("name", ["norm", "find_places"])
def test_a_check_that_ended_its_process_is_not_tried_again(
    ops: Ops, name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    op, like, about = CASES[name]()

    def dies() -> None:
        answers_of(ops, tmp_path)
        kind = type(ops.context.backends[0].implementations(op)[0])
        kind.run = lambda *given: os.kill(os.getpid(), signal.SIGKILL)
        ops.context.kernel(op, like, **about)

    child = in_a_child(dies)
    assert os.waitpid(child, 0)[1] == signal.SIGKILL
    answers = answers_of(ops, tmp_path)
    if op in NO_FALLBACK:
        with pytest.raises(KernelError, match=r"the process ended during it.* device='cpu'"):
            ops.context.kernel(op, like, **about)
        return
    assert ops.context.kernel(op, like, **about).name == f"reference.{op}"
    assert answers.ran == 0
    (line,) = answers.failures()
    assert "the process ended during it, or was ended because it hung (delete " in line
    (file,) = tmp_path.glob("*.json")
    assert str(file) in line and line.endswith(f"reference.{op} runs {op}")
    file.unlink()
    answers = answers_of(ops, tmp_path)
    tried(ops, name)
    assert answers.ran == 1  # by the kernel itself, and it is right
    assert [answer.reason for answer in AnswerFile(tmp_path, MACHINE).read().values()] == [""]


def test_what_another_process_checks_at_the_moment_is_checked_here_too(
    ops: Ops, tmp_path: Path
) -> None:
    file = AnswerFile(tmp_path, MACHINE)
    done = os.pipe()

    def waits() -> None:
        file.begin("another")
        os.write(done[1], b"x")
        time.sleep(60)

    child = in_a_child(waits)
    try:
        assert os.read(done[0], 1) == b"x"
        answers = answers_of(ops, tmp_path)
        assert file.read() == {}
        assert tried(ops, "combine")[1] is None and answers.ran == 1
        assert len(file.read()) == 1
    finally:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
    assert [bool(answer.reason) for answer in file.read().values()] == [True, False]


@pytest.mark.parametrize("error", [KeyboardInterrupt, torch.OutOfMemoryError])
def test_a_check_that_was_interrupted_is_tried_again(
    ops: Ops, tmp_path: Path, error: type[BaseException]
) -> None:
    def check() -> Any:
        raise error

    answers = answers_of(ops, tmp_path)
    with pytest.raises(error):
        answers.ask("name", "gpu.kernel", check)
    again = answers_of(ops, tmp_path)
    assert again.ask("name", "gpu.kernel", lambda: Answer(0.0)) is None and again.ran == 1


def test_a_process_of_another_host_is_not_known_to_have_ended(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = AnswerFile(tmp_path, MACHINE)
    with monkeypatch.context() as patch:
        patch.setattr("socket.gethostname", lambda: "another host")
        file.begin("name")
    assert file.read() == {}
    file.add({"name": Answer(0.0, "running")})  # written by nobody
    file.add({"other": Answer(0.0, "running x")})
    assert file.read() == {"name": Answer(0.0, "running")}


# ---- products ------------------------------------------------------------------------------------


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


# ---- what is written down ------------------------------------------------------------------------


def test_the_second_engine_launches_nothing(ops: Ops, tmp_path: Path) -> None:
    first = answers_of(ops, tmp_path)
    assert tried(ops, "norm")[1] is None and tried(ops, "combine")[1] is None
    assert first.ran == 2
    again = answers_of(ops, tmp_path)
    assert tried(ops, "norm")[1] is None and tried(ops, "combine")[1] is None
    assert again.ran == 0
    assert tried(ops, "group")[1] is None and again.ran == 1  # results add up
    assert len(AnswerFile(tmp_path, MACHINE).read()) == 3


def test_another_machine_or_width_or_type_is_checked_again(ops: Ops, tmp_path: Path) -> None:
    answers_of(ops, tmp_path)
    tried(ops, "combine")
    other = KnownAnswers(ops.context, AnswerFile(tmp_path, MACHINE | {"driver": "2"}))
    kernel = ops.context.backends[0].implementations("combine")[0]
    problem = Problem("combine")
    assert other.reason(kernel, problem, (rows(70), 8, 2, None, None)) is None and other.ran == 1
    again = answers_of(ops, tmp_path)
    assert again.reason(kernel, problem, (rows(70), 8, 2, None, None)) is None and again.ran == 0
    assert again.reason(kernel, problem, (rows(64), 8, 2, None, None)) is None and again.ran == 1
    ops.context._activations = "float16"
    assert again.reason(kernel, problem, (rows(70), 8, 2, None, None)) is None and again.ran == 2


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
