"""The operators of recurrent layers: as in transformers, and the same bits in every step."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from sdk.kernels.errors import CaptureError, KernelError
from sdk.kernels.operators.batch import AttentionBatch
from sdk.kernels.operators.ops import Ops
from sdk.kernels.operators.states import RwkvKeys
from tests.kernels.plain_kernels import FUSED, SEVERAL_FUSED
from tests.recurrent import (
    OPERATORS,
    SLOTS,
    Operator,
    Row,
    batch_of,
    conv,
    delta,
    exact_delta,
    exact_rwkv,
    exact_scan,
    exact_space,
    rwkv,
    scan,
    several,
    space,
)


@pytest.fixture
def ops(each_ops: Ops) -> Ops:
    return each_ops


def part(inputs: dict[str, Tensor], begin: int, end: int) -> dict[str, Tensor]:
    return {name: x[begin:end] for name, x in inputs.items()}


def close(found: Tensor, expected: Tensor) -> None:
    """Of sums of some hundred products of numbers around 1, in another order."""
    limit = 3e-5 * max(1.0, float(expected.abs().max()))
    torch.testing.assert_close(found, expected, rtol=0, atol=limit)


@pytest.mark.parametrize("case", OPERATORS, ids=lambda case: case.name)
def test_a_request_has_the_same_bits_however_its_tokens_are_divided(
    ops: Ops, case: Operator
) -> None:
    """In chunks, beside other requests, in other slots, with states saved in the middle."""
    inputs = case.inputs(23, 1)
    out, states = case.plain(ops, inputs)
    others = [case.inputs(n, 10 + n) for n in (5, 1)]
    expected = [case.plain(ops, other)[0] for other in others]
    for sizes in ([1] * 23, [2, 3, 1, 7, 10], [16, 7], [22, 1]):
        state, begin, current = case.slots(), 0, -1
        found = []
        for i, size in enumerate(sizes):
            middle = [(size // 2, 8)] if size > 1 else []
            into = 3 + i % 2  # back and forth between two slots
            row = Row(part(inputs, begin, begin + size), current, [*middle, (size, into)])
            alone = Row(others[0], -1, [(5, 9)]), Row(others[1], -1, [(1, 10)])
            results = case.step(ops, state, [alone[0], row, alone[1]])
            found.append(results[1])
            assert torch.equal(results[0], expected[0])
            assert torch.equal(results[2], expected[1])
            if middle:
                assert torch.equal(state[8], states[begin + size // 2 - 1])
            begin, current = begin + size, into
            assert torch.equal(state[into], states[begin - 1])
        assert torch.equal(torch.cat(found), out)
        assert state[[0, 1, 2, 5, 6, 7, 11]].eq(7.5).all()  # nobody asked for a write


@pytest.mark.parametrize("case", OPERATORS, ids=lambda case: case.name)
def test_a_state_may_replace_the_one_that_it_began_with(ops: Ops, case: Operator) -> None:
    """Also before its last token, and in several slots at once."""
    inputs, begin = case.inputs(9, 2), case.plain(ops, case.inputs(4, 3))[1][-1]
    out, states = case.plain(ops, inputs, begin)
    state = case.slots()
    state[5] = begin
    found = case.step(ops, state, [Row(inputs, 5, [(1, 5), (4, 6), (4, 7), (9, 5)])])[0]
    assert torch.equal(found, out)
    assert torch.equal(state[5], states[8])
    assert torch.equal(state[6], states[3])
    assert torch.equal(state[7], states[3])


@pytest.mark.parametrize("case", OPERATORS, ids=lambda case: case.name)
def test_each_draft_has_a_state(ops: Ops, case: Operator) -> None:
    inputs = case.inputs(4, 5)
    out, states = case.plain(ops, inputs)
    state = case.slots()
    found = case.step(ops, state, [Row(inputs, -1, [(1, 4), (2, 5), (3, 6), (4, 7)])])[0]
    assert torch.equal(found, out)
    assert torch.equal(state[4:8], states)


@pytest.mark.parametrize("case", OPERATORS, ids=lambda case: case.name)
def test_a_nan_stays_in_its_request(ops: Ops, case: Operator) -> None:
    inputs = case.inputs(3, 6)
    out, states = case.plain(ops, inputs)
    state = case.slots()
    state[2] = float("nan")
    bad = {name: x.clone() for name, x in case.inputs(2, 7).items()}
    next(iter(bad.values()))[1] = float("nan")
    rows = [Row(bad, -1, [(2, 3)]), Row(inputs, -1, [(3, 4)]), Row(inputs, 2, [(3, 5)])]
    found = case.step(ops, state, rows)
    assert torch.equal(found[1], out) and torch.equal(state[4], states[2])
    assert found[0][1].isnan().all() and not found[0][0].isnan().any()
    assert found[2][0].isnan().all()


@pytest.mark.parametrize(
    "case", [conv(), delta(), rwkv(), space(), scan()], ids=lambda case: case.name
)
def test_steps_and_requests_may_be_empty(ops: Ops, case: Operator) -> None:
    inputs, nothing = case.inputs(2, 8), case.inputs(0, 8)
    state = case.slots()
    assert case.step(ops, state, [Row(nothing, -1, [])])[0].shape[0] == 0
    assert case.run(ops, nothing, state, batch_of([], [], [])).shape[0] == 0
    rows = [Row(nothing, 4, []), Row(inputs, -1, []), Row(nothing, -1, [])]
    assert torch.equal(case.step(ops, state, rows)[1], case.plain(ops, inputs)[0])
    assert state.eq(7.5).all()


# ---- against float64 -----------------------------------------------------------------------------


def nmse(found: Tensor, expected: Tensor) -> float:
    return float((found.double() - expected).square().mean() / expected.square().mean())


@pytest.mark.parametrize("rows", [False, True], ids=["delta", "kda"])
@pytest.mark.parametrize("tiled", [False, True])
def test_the_delta_rule_is_as_exact_as_float32_is(ops: Ops, rows: bool, tiled: bool) -> None:
    """Rounding errors of 300 tokens stay those of some: the decay forgets them."""
    inputs = delta(2, 4, 128, 48, rows=rows, tiled=tiled).inputs(300, 21)
    q, k, v = inputs["qkv"].split([256, 256, 192], 1)
    q, k, v = q.unflatten(1, (2, 128)), k.unflatten(1, (2, 128)), v.unflatten(1, (4, 48))
    decay, beta = inputs["decay"] * 0.05, inputs["beta"] * 1.5
    expected, last = exact_delta(q, k, v, decay, beta, 0.25, tiled=tiled)
    state = torch.zeros(1, 4, 128, 48)
    batch = batch_of([300], [-1], [[(300, 0)]])
    how = {"eps": 1e-6, "tiled": tiled}
    out = ops.states.gated_delta(q, k, v, decay, beta, state, batch, 0.25, **how)
    assert nmse(out, expected) < 1e-12 and nmse(state[0], last) < 1e-12


def test_the_state_space_is_as_exact_as_float32_is(ops: Ops) -> None:
    random = torch.Generator().manual_seed(22)
    x, b, c = (torch.randn(300, *shape, generator=random) for shape in ((4, 20), (2, 96), (2, 96)))
    dt = torch.rand(300, 4, generator=random) * 0.2
    a, d = -torch.rand(4, generator=random), torch.randn(4, generator=random)
    expected, last = exact_space(x, dt, a, b, c, d)
    state = torch.zeros(1, 4, 20, 96)
    out = ops.states.ssd(x, dt, a, b, c, d, state, batch_of([300], [-1], [[(300, 0)]]))
    assert nmse(out, expected) < 1e-12 and nmse(state[0], last) < 1e-12


def test_the_selective_scan_is_as_exact_as_float32_is(ops: Ops) -> None:
    random = torch.Generator().manual_seed(23)
    x, b, c = (torch.randn(300, n, generator=random) for n in (50, 24, 24))
    dt = torch.rand(300, 50, generator=random) * 0.2
    a, d = -torch.rand(50, 24, generator=random), torch.randn(50, generator=random)
    expected, last = exact_scan(x, dt, a, b, c, d)
    state = torch.zeros(1, 50, 24)
    batch = batch_of([300], [-1], [[(300, 0)]])
    out = ops.states.selective_scan(x, dt, a, b, c, d, state, batch)
    assert nmse(out, expected) < 1e-12 and nmse(state[0], last) < 1e-12


def test_rwkv_is_as_exact_as_float32_is(ops: Ops) -> None:
    case = rwkv(2, 64, first=True)
    inputs = case.inputs(300, 24)
    expected, last = exact_rwkv(inputs, 2, 64)
    state = torch.zeros(1, 2, 64, 64)
    out = case.run(ops, inputs, state, batch_of([300], [-1], [[(300, 0)]]))
    assert nmse(out, expected) < 1e-12 and nmse(state[0], last) < 1e-12


# ---- recorded steps, threads and levels ----------------------------------------------------------

_RECORDED = [conv(600, 4), several(600), delta(), rwkv(), rwkv(2, 64, first=True), space(), scan()]


@pytest.mark.parametrize("case", _RECORDED, ids=lambda case: case.name)
def test_a_recorded_step_reads_its_states_when_it_runs(ops: Ops, case: Operator) -> None:
    most = case.inputs(40, 30)
    batch = batch_of([20, 20], [-1, -1], [[(20, 1)] * 4, [(20, 2)] * 4])
    state = case.slots()
    limits = {"tokens": 40, "outputs": 2, "requests": 2}
    if ops.context.backends[0].name == "reference":
        with pytest.raises(CaptureError):
            ops.recording.capture(lambda: case.run(ops, most, state, batch), **limits)
        return
    graph = ops.recording.capture(lambda: case.run(ops, most, state, batch), **limits)
    assert state.eq(7.5).all()
    assert batch.states is not None
    for counts in ([3, 30], [1], [1, 1], [40], [0, 5]):
        rows = [
            Row(case.inputs(n, 31 + n), i - 1, [(n, 4 + i)] * (n > 0)) for i, n in enumerate(counts)
        ]
        fresh = case.slots()
        state.copy_(fresh)
        state[0] = fresh[0] = 0.25
        expected = torch.cat(case.step(ops, fresh, rows))
        total = sum(counts)
        for name, x in most.items():
            x[:total] = torch.cat([row.inputs[name] for row in rows])
        step = batch_of(counts, [row.initial for row in rows], [row.saves for row in rows])
        assert step.states is not None
        batch.query_start[: len(counts) + 1] = step.query_start
        batch.states.initial[: len(counts)] = step.states.initial
        batch.states.save_start[: len(counts) + 1] = step.states.save_start
        batch.states.save_token[: len(step.states.save_token)] = step.states.save_token
        batch.states.save_slot[: len(step.states.save_slot)] = step.states.save_slot
        graph.replay(tokens=total, outputs=1, requests=len(counts))
        assert torch.equal(graph.result[:total], expected)
        assert torch.equal(state, fresh)


@pytest.mark.parametrize(
    "case",
    [delta(), rwkv(2, 96, first=True), space(), scan(), conv(1100, 4), several(1100)],
    ids=lambda case: case.name,
)
def test_threads_change_no_bit(case: Operator) -> None:
    """Heads are divided where threads are more than they are, and channels and tokens are."""
    inputs, found = case.inputs(150, 40), []
    for threads in (1, 2, 7):
        opened = Ops("cpu", num_threads=threads, backends=["cpu"])
        state = case.slots()
        rows = [Row(inputs, -1, [(77, 3), (150, 4)]), Row(part(inputs, 0, 9), -1, [(9, 5)])]
        found.append((torch.cat(case.step(opened, state, rows)), state))
        opened.close()
    for out, state in found[1:]:
        assert torch.equal(out, found[0][0]) and torch.equal(state, found[0][1])


@SEVERAL_FUSED
def test_the_levels_with_a_fused_multiply_add_agree_about_delta_rules() -> None:
    """Columns are vectors or parts of them: only the sums that make unit keys have another order,
    and here they are given."""
    from sdk.kernels.cpu import open_backend

    case = delta(2, 4, 24, 48, eps=None)
    inputs, found = case.inputs(20, 41), []
    for level in FUSED:
        opened = Ops("cpu", num_threads=1, backends=["cpu"])
        opened.close()
        opened.context.backends[:] = [open_backend("cpu", 1, level)]
        found.append(case.plain(opened, inputs))
        opened.close()
    for out, states in found[1:]:
        assert torch.equal(out, found[0][0]) and torch.equal(states, found[0][1])


# ---- against transformers ------------------------------------------------------------------------


@pytest.mark.parametrize("rows", [False, True], ids=["delta", "kda"])
@pytest.mark.parametrize("split", [0, 70])
def test_the_delta_rule_is_that_of_transformers(ops: Ops, rows: bool, split: int) -> None:
    from transformers.models.kimi_linear import modeling_kimi_linear as kimi
    from transformers.models.qwen3_next import modeling_qwen3_next as qwen

    key_heads = 4 if rows else 2
    case = delta(key_heads, 4, 32, 48, rows=rows)
    inputs = case.inputs(100, 11)
    q, k, v = inputs["qkv"].split([key_heads * 32, key_heads * 32, 4 * 48], 1)
    q, k = (x.view(1, 100, key_heads, 32) for x in (q, k))
    given = (q, k, v.view(1, 100, 4, 48), inputs["decay"][None], inputs["beta"][None])
    rules = (
        [kimi.recurrent_kimi_delta_attention]
        if rows
        else [
            qwen.torch_chunk_gated_delta_rule,
            qwen.torch_recurrent_gated_delta_rule,
        ]
    )
    out, state = _in_two(ops, case, inputs, split)
    for rule in rules:
        how = {"initial_state": None, "output_final_state": True}
        expected, last = rule(*given, **how, use_qk_l2norm_in_kernel=True)
        close(out, expected[0])
        close(state, last[0])


@pytest.mark.parametrize("split", [0, 70])
def test_the_state_space_is_that_of_transformers(ops: Ops, split: int) -> None:
    from transformers.models.mamba2 import modeling_mamba2 as mamba2

    case = space(6, 20, 2, 40)
    random = torch.Generator().manual_seed(6)
    a = -torch.rand(6, generator=random) * 4 - 0.1
    d = torch.randn(6, generator=random)
    inputs = case.inputs(100, 12)
    x, b, c = inputs["xbc"].split([120, 80, 80], 1)
    b, c = (part.view(1, 100, 2, 40) for part in (b, c))
    expected, last = mamba2.mamba2_chunk_scan(
        x.view(1, 100, 6, 20), inputs["dt"][None], a, b, c, 32, D=d, return_final_states=True
    )
    out, state = _in_two(ops, case, inputs, split)
    close(out, expected[0])
    close(state, last[0])


@pytest.mark.parametrize("split", [0, 70])
def test_the_selective_scan_is_that_of_transformers(ops: Ops, split: int) -> None:
    from transformers.models.mamba import modeling_mamba as mamba

    case = scan(42, 16)
    random = torch.Generator().manual_seed(7)
    a = -torch.rand(42, 16, generator=random) * 4 - 0.1
    d = torch.randn(42, generator=random)
    inputs = case.inputs(100, 14)
    x, b, c = (one.t()[None] for one in inputs["xbc"].split([42, 16, 16], 1))
    expected, last = mamba.mamba_selective_scan(
        x, inputs["dt"].t()[None], a, b, c, D=d, return_last_state=True
    )
    out, state = _in_two(ops, case, inputs, split)
    close(out, expected[0].t())
    close(state, last[0])


@pytest.mark.parametrize("split", [0, 2, 70])
def test_the_convolution_is_that_of_transformers(ops: Ops, split: int) -> None:
    from transformers.models.lfm2 import modeling_lfm2 as lfm2
    from transformers.models.mamba2 import modeling_mamba2 as mamba2

    random = torch.Generator().manual_seed(5)
    weight, bias = torch.randn(40, 4, generator=random), torch.randn(40, generator=random)
    inputs = conv().inputs(100, 13)
    x = inputs["x"][:, 40:80].t()[None]
    expected = mamba2.causal_conv1d_fn(x, weight, bias, activation="silu")
    out, state = _in_two(ops, conv(), inputs, split)
    close(out, expected[0].t())
    assert torch.equal(state, inputs["x"][97:, 40:80])

    case = conv(gated=True)
    before, after, x = inputs["x"].t()[None].chunk(3, dim=1)
    expected = after * lfm2.causal_conv1d_fn(before * x, weight, None)
    out, state = _in_two(ops, case, inputs, split)
    close(out, expected[0].t())
    assert torch.equal(state, (before * x)[0, :, 97:].t())


def _in_two(
    ops: Ops, case: Operator, inputs: dict[str, Tensor], split: int
) -> tuple[Tensor, Tensor]:
    """The result and the last state of one request whose step ends after ``split`` tokens."""
    state, current, found = case.slots(), -1, []
    total = len(next(iter(inputs.values())))
    for begin, end in ((0, split), (split, total)):
        if end > begin:
            row = Row(part(inputs, begin, end), current, [(end - begin, 3)])
            found += case.step(ops, state, [row])
            current = 3
    return torch.cat(found), state[3]


# ---- refusals ------------------------------------------------------------------------------------


@pytest.mark.parametrize("case", [conv(), delta(), space(), scan()], ids=lambda case: case.name)
@pytest.mark.parametrize(
    ("initial", "saves"),
    [(SLOTS, [(2, 3)]), (-2, [(2, 3)]), (-1, [(2, SLOTS)]), (-1, [(2, -1)]), (-1, [(3, 3)])],
    ids=["initial", "below", "slot", "negative", "token"],
)
def test_slots_and_tokens_outside_are_an_error(
    ops: Ops, case: Operator, initial: int, saves: list[tuple[int, int]]
) -> None:
    with pytest.raises(KernelError, match="slot"):
        case.step(ops, case.slots(), [Row(case.inputs(2, 9), initial, saves)])


def _batch() -> AttentionBatch:
    return batch_of([2], [-1], [[(2, 1)]])


def test_what_does_not_fit_is_named(ops: Ops) -> None:
    from dataclasses import replace

    batch, x = _batch(), torch.zeros(2, 8)
    none = replace(batch, states=None)
    states = batch.states
    assert states is not None
    weight, state = torch.zeros(8, 4), torch.zeros(3, 3, 8)
    run = ops.states.causal_conv
    odd = torch.zeros(4, dtype=torch.int32)[::2]
    for what, call in {
        "causal_conv: expected a step with states": lambda: run(x, weight, None, state, none),
        "causal_conv x: expected .*found .*int32": lambda: run(x.int(), weight, None, state, batch),
        "causal_conv x: expected contiguous rows": lambda: run(
            torch.zeros(8, 2).t(), weight, None, state, batch
        ),
        "causal_conv weight: expected 2 to 16 taps, found 1": lambda: run(
            x, weight[:, :1], None, state, batch
        ),
        "activation: expected None or 'silu', found 'gelu'": lambda: run(
            x, weight, None, state, batch, activation="gelu"
        ),
        "causal_conv bias": lambda: run(x, weight, torch.zeros(7), state, batch),
        "causal_conv before": lambda: run(x, weight, None, state, batch, before=x[:1]),
        "causal_conv after": lambda: run(x, weight, None, state, batch, after=x[:, :4]),
        "causal_conv before: expected none with several weights": lambda: run(
            x, weight.expand(2, 8, 4), None, state, batch, before=x
        ),
        r"causal_conv state: expected torch.float32 \[any, 3, 8\]": lambda: run(
            x, weight, None, torch.zeros(3, 4, 8), batch
        ),
        "causal_conv state: expected contiguous slots of 24": lambda: run(
            x, weight, None, torch.zeros(3, 8, 3).transpose(1, 2), batch
        ),
        "causal_conv state: .*strides .0, 8, 1": lambda: run(
            x, weight, None, state[:1].expand(3, 3, 8), batch
        ),
        "states initial": lambda: run(
            x, weight, None, state, replace(batch, states=replace(states, initial=odd))
        ),
        "states: expected contiguous rows": lambda: run(
            x, weight, None, state, replace(batch, states=replace(states, save_start=odd))
        ),
    }.items():
        with pytest.raises(KernelError, match=what):
            call()


def test_what_does_not_fit_the_delta_rule_is_named(ops: Ops) -> None:
    batch, state = _batch(), torch.zeros(3, 4, 8, 6)
    q, v = torch.zeros(2, 2, 8), torch.zeros(2, 4, 6)
    gate = torch.zeros(2, 4)
    run = ops.states.gated_delta
    wide = torch.zeros(2, 1, 513)
    for what, call in {
        "gated_delta k": lambda: run(q, q[:, :1], v, gate, gate, state, batch, 1.0),
        "gated_delta v": lambda: run(q, q, v[:1], gate, gate, state, batch, 1.0),
        "gated_delta decay": lambda: run(q, q, v, gate[:, :3], gate, state, batch, 1.0),
        "gated_delta decay: expected contiguous": lambda: run(
            q, q, v, torch.zeros(4, 2).t(), gate, state, batch, 1.0
        ),
        "gated_delta beta": lambda: run(q, q, v, gate, gate[:, :3], state, batch, 1.0),
        "multiple of 2 heads of k, found 3": lambda: run(
            q, q, v[:, :3], gate[:, :3], gate[:, :3], state, batch, 1.0
        ),
        "keys of 1 to 512 numbers, found 513": lambda: run(
            wide, wide, v, gate, gate, state, batch, 1.0
        ),
        "gated_delta state": lambda: run(q, q, v, gate, gate, state[:, :3], batch, 1.0),
    }.items():
        with pytest.raises(KernelError, match=what):
            call()


def test_what_does_not_fit_rwkv_is_named(ops: Ops) -> None:
    batch, state = _batch(), torch.zeros(3, 2, 6, 6)
    x, keys = torch.zeros(2, 2, 6), RwkvKeys(*torch.zeros(3, 2, 6))
    run = ops.states.rwkv
    wide = torch.zeros(2, 1, 513)
    for what, call in {
        "rwkv r": lambda: run(x[:1], x, x, x, x, keys, state, batch),
        "rwkv k": lambda: run(x, x[:, :1], x, x, x, keys, state, batch),
        "rwkv v": lambda: run(x, x, x[:, :1], x, x, keys, state, batch),
        "rwkv decay": lambda: run(x, x, x, x[:1], x, keys, state, batch),
        "rwkv rate: expected contiguous": lambda: run(
            x, x, x, x, torch.zeros(6, 2, 2).permute(1, 2, 0), keys, state, batch
        ),
        "rwkv first": lambda: run(x, x, x, x, x, keys, state, batch, first=(x[:1], x)),
        "rwkv mix": lambda: run(x, x, x, x, x, keys, state, batch, first=(x, x[:1])),
        "rwkv mix of keys": lambda: run(
            x, x, x, x, x, RwkvKeys(x[0], x[0, :1], x[0]), state, batch
        ),
        "heads of 1 to 512 numbers, found 513": lambda: run(
            *[wide] * 5, RwkvKeys(*[wide[0]] * 3), state, batch
        ),
        "rwkv state": lambda: run(x, x, x, x, x, keys, state[:, :1], batch),
    }.items():
        with pytest.raises(KernelError, match=what):
            call()


def test_what_does_not_fit_the_state_space_is_named(ops: Ops) -> None:
    batch, state = _batch(), torch.zeros(3, 4, 6, 8)
    x, dt, a, b = torch.zeros(2, 4, 6), torch.zeros(2, 4), torch.zeros(4), torch.zeros(2, 2, 8)
    run = ops.states.ssd
    wide = torch.zeros(2, 1, 513)
    for what, call in {
        "ssd dt": lambda: run(x, dt[:, :3], a, b, b, None, state, batch),
        "ssd a": lambda: run(x, dt, a[:3], b, b, None, state, batch),
        "ssd c": lambda: run(x, dt, a, b, b[:, :1], None, state, batch),
        "ssd d": lambda: run(x, dt, a, b, b, a[:3], state, batch),
        "b of 1 to 512 numbers, found 513": lambda: run(x, dt, a, wide, wide, None, state, batch),
        "multiple of 2 groups, found 3": lambda: run(
            x[:, :3], dt[:, :3], a[:3], b, b, None, state, batch
        ),
        "ssd state": lambda: run(x, dt, a, b, b, None, state[:, :3], batch),
    }.items():
        with pytest.raises(KernelError, match=what):
            call()


def test_what_does_not_fit_the_selective_scan_is_named(ops: Ops) -> None:
    batch, state = _batch(), torch.zeros(3, 6, 8)
    x, a, b = torch.zeros(2, 6), torch.zeros(6, 8), torch.zeros(2, 8)
    run = ops.states.selective_scan
    wide = torch.zeros(2, 513)
    for what, call in {
        "selective_scan dt": lambda: run(x, x[:, :3], a, b, b, None, state, batch),
        "selective_scan dt: expected contiguous": lambda: run(
            x, torch.zeros(6, 2).t(), a, b, b, None, state, batch
        ),
        "selective_scan a": lambda: run(x, x, a[:3], b, b, None, state, batch),
        "selective_scan c": lambda: run(x, x, a, b, b[:1], None, state, batch),
        "selective_scan d": lambda: run(x, x, a, b, b, x[0, :3], state, batch),
        "b of 1 to 512 numbers, found 513": lambda: run(
            x, x, torch.zeros(6, 513), wide, wide, None, state, batch
        ),
        "selective_scan state": lambda: run(x, x, a, b, b, None, state[:, :3], batch),
    }.items():
        with pytest.raises(KernelError, match=what):
            call()
