"""What crosses the network: all of it comes back equal, and nothing else can come out of bytes."""

from __future__ import annotations

import ast
import contextlib
import struct
from dataclasses import fields, replace
from enum import IntEnum
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings, strategies as st
from hypothesis.extra import numpy as numbers

import sdk
from sdk.api.errors import CheckpointError, OutOfMemoryError
from sdk.api.params import SamplingParams
from sdk.cluster.executors.remote.engine_codec import engine_codec
from sdk.cluster.wire.codec import Codec, CodecError, Record
from sdk.engine.executor import RankCall
from sdk.engine.pages import elastic
from sdk.engine.plan import (
    Duplicate,
    EncodedImage,
    Encoding,
    Frames,
    Move,
    Pooling,
    RequestStart,
    SequenceSpec,
    StateSave,
    StepPlan,
    StepRow,
    Swap,
)
from sdk.engine.rank.adapters import add_parts, write_slot
from sdk.engine.rank.kv_transfer import LayerKV, read_layer
from sdk.engine.rank.runner_config import DraftingWeights, RunnerConfig
from sdk.models.vision.image import ImageInput, PromptImage
from sdk.quant.adapter import LowRank
from sdk.quant.spec import KVSpec
from sdk.sampling.resolved import ResolvedParams

CODEC = engine_codec()
SDK = Path(sdk.__file__).parent

ids = st.text(max_size=8)
small = st.integers(0, 2**31 - 1)
many = st.lists(small, max_size=6).map(tuple)
rows = st.builds(StepRow, ids, small, small, st.lists(st.integers(-1, 9)).map(tuple), small)
poolings = st.builds(Pooling, st.sampled_from(["last", "mean"]), st.booleans(), token_ids=many)
specs = st.builds(
    SequenceSpec,
    request_id=ids,
    params=st.builds(SamplingParams, prompt_logprobs=st.none() | st.integers(0, 5)),
    kind=st.sampled_from(["generate", "embed"]),
    pooling=st.none() | poolings,
    negative_of=st.none() | ids,
)
starts = st.builds(
    RequestStart,
    spec=specs,
    token_ids=many,
    num_prompt_tokens=small,
    num_computed=small,
    pages=many,
    max_len=small,
    mirostat_mu=st.none() | st.floats(allow_nan=False),
    forbidden=many,
    frames=st.lists(st.builds(Frames, small, small, many), max_size=2).map(tuple),
    state_slots=many,
    initial_state=st.integers(-1, 9),
)
copies = st.one_of(
    st.builds(Swap, small, small, st.booleans()),
    st.builds(Move, small, small),
    st.builds(Duplicate, small, small),
)


def tuples(items: Any) -> Any:
    return st.lists(items, max_size=3).map(tuple)


plans = st.builds(
    StepPlan,
    small,
    tuples(rows),
    tuples(starts),
    tuples(st.tuples(ids, many)),
    tuples(ids),
    tuples(copies),
    tuples(st.tuples(ids, many)),
    tuples(st.tuples(ids, st.builds(Frames, small, small, many))),
    tuples(st.builds(StateSave, ids, small, small)),
    tuples(many),
    st.none() | st.builds(Encoding, st.just(()), small),
)
values = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False)
    | st.text()
    | st.binary()
    | st.sampled_from([torch.float32, torch.int8]),
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.lists(inner, max_size=4).map(tuple)
        | st.dictionaries(
            st.text() | st.integers() | st.tuples(st.integers(0, 5)), inner, max_size=4
        )
    ),
    max_leaves=12,
)


@pytest.mark.slow
@settings(deadline=None)
@given(plans)
def test_every_plan_comes_back_equal(plan: StepPlan) -> None:
    found = CODEC.decode(CODEC.encode(plan))
    assert found == plan and type(found) is StepPlan
    assert [type(copy) for copy in found.copies] == [type(copy) for copy in plan.copies]


@settings(deadline=None)
@given(values)
def test_every_plain_value_comes_back_equal_and_of_its_type(value: Any) -> None:
    try:
        data = CODEC.encode(value)
    except CodecError as error:
        assert "a number of" in str(error)  # in a tuple of numbers, beyond 64 bits
        return
    found = CODEC.decode(data)
    assert found == value and repr(found) == repr(value)


@settings(deadline=None, max_examples=60)
@given(
    numbers.arrays(
        st.sampled_from(["uint8", "int32", "float16", "float32"]),
        numbers.array_shapes(min_dims=0, max_dims=3, min_side=0, max_side=4),
    )
)
def test_every_array_and_tensor_comes_back_with_its_bits(array: Any) -> None:
    found = CODEC.decode(CODEC.encode(array))
    assert found.dtype == array.dtype and found.shape == array.shape
    assert found.tobytes() == array.tobytes()
    tensor = torch.from_numpy(np.array(array))
    found = CODEC.decode(CODEC.encode(tensor))
    assert found.dtype == tensor.dtype and found.shape == tensor.shape
    assert found.numpy().tobytes() == array.tobytes()


@settings(deadline=None, max_examples=300)
@given(st.binary(max_size=300))
def test_random_bytes_never_do_anything_but_raise_the_error(data: bytes) -> None:
    try:
        CODEC.decode(data)
    except CodecError as error:
        assert str(error).startswith("message: ")


@settings(deadline=None, max_examples=300)
@given(plans, st.data())
def test_a_damaged_plan_is_a_value_or_an_error(plan: StepPlan, data: st.DataObject) -> None:
    encoded = bytearray(CODEC.encode((plan, np.ones(3, "float32"), OutOfMemoryError("x"))))
    for _ in range(data.draw(st.integers(1, 3))):
        encoded[data.draw(st.integers(0, len(encoded) - 1))] = data.draw(st.integers(0, 255))
    with contextlib.suppress(CodecError):
        CODEC.decode(encoded[: data.draw(st.integers(0, len(encoded)))])


def test_a_bfloat16_tensor_and_types_of_records_come_back() -> None:
    matrices = {"q": LowRank(torch.ones(2, 3, dtype=torch.bfloat16), torch.zeros(0, 2))}
    call = CODEC.decode(CODEC.encode(RankCall(add_parts, (matrices,))))
    assert call.function is add_parts
    found = call.args[0]["q"]
    assert torch.equal(found.a, matrices["q"].a) and found.b.shape == (0, 2) and found.bias is None
    stored = LayerKV(np.arange(6, dtype="uint8").reshape(1, 2, 3), None)
    spec = KVSpec(2, 1, 64, 16, "float16")
    _, (_, back, kept) = CODEC.decode(CODEC.encode((read_layer, (3, stored, spec))))
    assert (back.rows == stored.rows).all() and kept == spec


def test_images_come_back_with_their_pixels() -> None:
    pixels = np.arange(2 * 4 * 3, dtype="uint8").reshape(2, 4, 3)
    image = ImageInput((pixels,), ((1, 2),), 2, b"digest", (20, 40))
    spec = SequenceSpec("a", SamplingParams(), images=(PromptImage(image, ((3, 2),)),))
    plan = StepPlan(1, encoding=Encoding((EncodedImage(image, (4, 5)),), 7))
    own, found = CODEC.decode(CODEC.encode((spec, plan)))
    [encoded], [placed] = found.encoding.begin, own.images
    assert encoded.blocks == (4, 5) and found.encoding.units == 7 and placed.spans == ((3, 2),)
    for one in (encoded.image, placed.image):
        assert type(one) is ImageInput and one[1:] == image[1:]
        assert one.tiles[0].dtype == np.uint8 and (one.tiles[0] == pixels).all()


def test_a_config_comes_back_and_its_drafting_weights_without_those_of_a_head() -> None:
    config = RunnerConfig(
        *("model.gguf", 17, 16, "float16", 128, 8, 128, 2),
        hf_overrides={"rope_theta": 1e4, "list": [1, 2.5, None]},
        drafting=DraftingWeights("small.gguf", "q4_0", 64, has_pages=True, head=None),
        adapter_dtype="int8",
    )
    assert CODEC.decode(CODEC.encode(config)) == config
    with_head = replace(config, drafting=replace(config.drafting, head=object()))
    assert CODEC.decode(CODEC.encode(with_head)).drafting.head is None


def test_sampling_parameters_keep_only_what_the_other_ranks_need() -> None:
    params = SamplingParams(temperature=0.3, stop=["x"], prompt_logprobs=2)
    found = CODEC.decode(CODEC.encode(params))
    assert found == SamplingParams(prompt_logprobs=2)
    spec = SequenceSpec("a", SamplingParams(), resolved=ResolvedParams(end_ids=(1,)))
    assert CODEC.decode(CODEC.encode(spec)).resolved == ResolvedParams()


def test_our_exceptions_come_back_and_others_are_not_sent() -> None:
    found = CODEC.decode(CODEC.encode(CheckpointError("model.gguf: damaged")))
    assert type(found) is CheckpointError and str(found) == "model.gguf: damaged"
    with pytest.raises(CodecError, match="a ValueError is not sent"):
        CODEC.encode(ValueError("x"))


class _Id(str):
    __slots__ = ()


class _Number(IntEnum):
    SEED = 2**70
    PAGE = 7


def test_subclasses_of_str_and_int_come_back_as_str_and_int() -> None:
    value = [_Id("a"), np.str_("b"), _Number.SEED, _Number.PAGE, (3, _Number.PAGE), {_Id("c"): 1}]
    found = CODEC.decode(CODEC.encode(value))
    assert found == ["a", "b", 2**70, 7, (3, 7), {"c": 1}]
    assert [type(item) for item in found[:4]] == [str, str, int, int]


@pytest.mark.parametrize(
    ("value", "why"),
    [
        (object(), "a object is not sent"),
        (print, "a builtin_function_or_method is not sent"),
        (lambda: None, "a function is not sent"),
        (np.array(["text"]), "a ndarray is not sent"),
        (torch.ones(2, dtype=torch.complex64), "tensors of torch.complex64 are not sent"),
        (torch.ones(2, device="meta"), "a Tensor is not sent"),
        ((1, 2**64), "a number of 18446744073709551616 is not sent"),
        (frozenset((1,)), "a frozenset is not sent"),
    ],
)
def test_what_is_not_known_is_not_sent(value: object, why: str) -> None:
    with pytest.raises(CodecError, match=why):
        CODEC.encode(value)


def u32(*numbers: int) -> bytes:
    return struct.pack(f"<{len(numbers)}I", *numbers)


@pytest.mark.parametrize(
    ("data", "why"),
    [
        (b"", "expected 1 more bytes, found 0"),
        (b"NN", "1 bytes follow its end"),
        (b"?", "unknown kind b'\\?'"),
        (b"l" + u32(2**32 - 1), "expected 4294967295 values of 1 bytes, found 0 bytes"),
        (b"I" + u32(2**31) + bytes(8), "expected 2147483648 values of 8 bytes"),
        (b"s" + u32(2) + b"\xff\xff", "is not valid"),
        (b"r" + u32(5) + b"Popen", "'Popen' is not known on this host"),
        (b"c" + u32(9) + b"os.system", "'os.system' is not known on this host"),
        (b"e" + u32(10) + b"SystemExit", "'SystemExit' is not known on this host"),
        (b"a" + u32(6) + b"object" + u32(1, 1), "arrays of 'object' are not known"),
        (b"a" + u32(5) + b"uint8" + u32(9) + bytes(36), "an array of 9 dimensions"),
        (b"x" + u32(7) + b"float32" + u32(2, 2**31, 2**31), "expected 18446744073709551616 more"),
        (b"l" + u32(1) + b"d" + u32(1) + b"l" + u32(0) + b"N", "a value is not valid: unhashable"),
        ((b"l" + u32(1)) * 40 + b"N", "expected at most 16 levels"),
        (b"d" + u32(1) + (b"t" + u32(1)) * 3 + b"NN", "expected at most 16 levels"),
    ],
)
def test_bad_bytes_are_named(data: bytes, why: str) -> None:
    with pytest.raises(CodecError, match=why):
        CODEC.decode(data)


def test_a_constructor_that_rejects_its_values_is_the_same_error() -> None:
    data = CODEC.encode(SamplingParams(prompt_logprobs=3)).replace(
        struct.pack("<q", 3), struct.pack("<q", -7)
    )
    with pytest.raises(CodecError, match="a value is not valid: prompt_logprobs"):
        CODEC.decode(data)
    mesh = Codec([Record(KVSpec, ("num_layers",))])
    with pytest.raises(CodecError, match="a value is not valid"):
        mesh.decode(mesh.encode(KVSpec(1, 1, 64, 16)))


def test_every_field_of_a_plan_and_of_a_config_is_sent() -> None:
    records = CODEC._records
    assert records["RunnerConfig"].fields == tuple(field.name for field in fields(RunnerConfig))
    not_sampled = {field.name for field in fields(SequenceSpec)} - {"resolved"}
    assert set(records["SequenceSpec"].fields) == not_sampled
    for kind in (StepPlan, StepRow, RequestStart, RankCall):
        assert records[kind.__name__].fields == kind._fields


def called_on_ranks(path: Path) -> set[str]:
    """The names of functions that a module gives to ``on_ranks``."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Call) and node.args:
            call = ast.unparse(node.func)
            if call.endswith("executor.on_ranks") or call == "ranks":
                found.add(ast.unparse(node.args[0]))
    return found


def test_every_function_that_an_engine_calls_on_its_ranks_is_known_by_name() -> None:
    known = {name.rpartition(".")[2] for name in CODEC._functions}
    modules = ("adapter_loader", "pages/prefix_store", "pages/elastic")
    found = [called_on_ranks(SDK / "engine" / f"{name}.py") for name in modules]
    assert all(found)
    assert set().union(*found) == known
    assert CODEC.decode(CODEC.encode(write_slot)) is write_slot
    assert len(elastic.ON_RANKS) == 7
