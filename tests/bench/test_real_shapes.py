"""Random files with the shapes of published models: what is in them, and where they are kept."""

from __future__ import annotations

import json
import shutil
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest

from sdk import LLM, RequestError, SamplingParams, UnsupportedError
from sdk.bench import models, random_blocks
from sdk.bench.phases import Phase, Rows, phases_of
from sdk.bench.random_blocks import cached_file, nbytes, write_shape
from sdk.bench.real_shapes import (
    REAL_SHAPES,
    DeltaNet,
    Dense,
    Experts,
    Latent,
    ResidualStreams,
    ShortConvolutions,
    StateSpaces,
    TwoGeometries,
    num_weights,
)
from sdk.bench.shape_parts import RealShape, Tensor, digest
from sdk.cli import main
from sdk.kernels.cpu.library import Count, OpKind, WeightView
from sdk.kernels.cpu.operator_times import OperatorTime, ProgramTimes
from sdk.loaders.formats.gguf_decode import decode_matrix
from sdk.loaders.gguf_files.reader import read_gguf
from sdk.models.architecture import gguf_names
from sdk.quant.weight import weight_of

#: The same kinds of layers with few of them.
TINY: dict[str, RealShape] = {
    "qwen35": DeltaNet(
        *(256, 8, 2, 1, 512), v_heads=4, k_heads=2, state=64, head_dim=64, vocab=320
    ),
    "lfm2": ShortConvolutions(256, 6, 4, 2, 512, (2, 4), vocab=320),
    "granitehybrid": StateSpaces(
        *(256, 4, 2, 1),
        expert=256,
        experts=4,
        used=2,
        shared=256,
        attention=(2,),
        ssm_heads=8,
        state=32,
        vocab=320,
    ),
    "gemma4": TwoGeometries(256, 10, 2, 1, 512, 5, per_layer=256, head_dim=64, vocab=320),
    "gemma3n": ResidualStreams(256, 10, 2, 1, 512, 5, 5, head_dim=64, vocab=320),
    "qwen3moe": Experts(
        256, 4, 2, 1, expert=256, experts=8, used=2, head_dim=64, vocab=320, skewed=True
    ),
    "qwen3moe-mxfp4": Experts(
        256, 2, 2, 1, expert=256, experts=4, used=2, head_dim=64, vocab=320, mixture="mxfp4_moe"
    ),
    "deepseek2": Latent(256, 27, 2, 320, 96, 4, 2, 2, 256, 16, 32, 32, 320),
    "llama": Dense(256, 2, 4, 1, 512, head_dim=64, vocab=320),
    "llama-iq4_xs": Dense(256, 8, 4, 1, 512, head_dim=64, vocab=320, mixture="iq4_xs"),
}


class Published(NamedTuple):
    """Billions of weights, and of bytes in the file."""

    weights: float
    file: float


#: The checkpoints have 0.75, 4.2, 1.17 and 6.9 billion. Of Gemma 4 E2B's 2.35 are the table of its
#: layers' embeddings. DeepSeek V2 Lite has 15.7 billion, with four times as many experts.
SIZES = {
    "random-qwen3.5-0.8b": Published(0.752, 0.518),
    "random-qwen3.5-4b": Published(4.206, 2.698),
    "random-lfm2-1.2b": Published(1.170, 0.729),
    "random-gemma4-e2b": Published(4.629, 2.795),
    "random-gemma3n-e2b": Published(4.456, 2.781),
    "random-granite4-h-tiny": Published(6.939, 4.227),
    "random-deepseek-v2-lite": Published(4.908, 3.208),
    "random-30b-a3b": Published(30.532, 18.551),
    "random-30b-a3b-12": Published(8.093, 4.960),
    "random-30b-a3b-6": Published(4.361, 2.643),
    "random-30b-a3b-6-skewed": Published(4.361, 2.643),
    "random-30b-a3b-6-mxfp4": Published(4.361, 2.713),
    "random-8b": Published(8.030, 4.913),
    "random-8b-8": Published(2.796, 1.773),
    "random-8b-8-q4_0": Published(2.796, 1.708),
    "random-8b-8-q8_0": Published(2.796, 2.971),
    "random-8b-8-iq4_xs": Published(2.796, 1.652),
}


@pytest.mark.parametrize("name", SIZES)
def test_a_model_has_as_many_weights_as_the_published_one(name: str) -> None:
    shape = REAL_SHAPES[name]
    stored = sum(nbytes(tensor, shape.mixture) for tensor in shape.tensors())
    assert num_weights(shape) / 1e9 == pytest.approx(SIZES[name].weights, rel=1e-3)
    assert stored / 1e9 == pytest.approx(SIZES[name].file, rel=1e-3)
    types = Counter(tensor.type(shape.mixture) for tensor in shape.tensors())
    if shape.mixture == "q4_k_m":
        assert types["q4_k"] > types["q6_k"] + types["q8_0"] > 0
    else:
        assert types[shape.mixture.removesuffix("_moe")] > 0
    assert list(SIZES) == list(REAL_SHAPES)


@pytest.fixture(params=TINY)
def tiny(request: pytest.FixtureRequest, tmp_path: Path) -> tuple[RealShape, Path]:
    shape, path = TINY[request.param], tmp_path / "m.gguf"
    write_shape(path, "tiny", shape)
    return shape, path


def test_a_file_has_the_tensors_of_its_shape(tiny: tuple[RealShape, Path], tmp_path: Path) -> None:
    """And blocks whose numbers have the variance of a layer's weights."""
    shape, path = tiny
    file = read_gguf(path)
    wanted = {tensor.name: tensor for tensor in shape.tensors()}
    assert set(file.tensors) == set(wanted)
    for name, tensor in wanted.items():
        stored = file.tensors[name]
        kind = tensor.type(shape.mixture)
        assert (stored.shape, stored.type.name.lower()) == (tensor.shape, kind)
        if kind in ("f16", "f32"):
            continue
        layout = decode_matrix(
            stored.type, file.data(name).reshape(-1, _row(stored)), stored.shape[-1], name
        )
        values = weight_of(layout).dequantize().numpy()
        spread = 1 if tensor.part.startswith("wide:") else stored.shape[-1] ** 0.5
        assert np.std(values) * spread == pytest.approx(1, rel=0.1)
        assert abs(np.mean(values)) < 0.1 * np.std(values)
    file.close()
    again = tmp_path / "again.gguf"
    write_shape(again, "tiny", shape)
    assert again.read_bytes() == path.read_bytes()


def _row(stored: Any) -> int:
    rows = int(np.prod(stored.shape[:-1]))
    return int(stored.nbytes) // rows


def test_a_file_runs_or_its_architecture_is_refused_by_name(tiny: tuple[RealShape, Path]) -> None:
    shape, path = tiny
    if shape.architecture not in gguf_names():
        with pytest.raises(UnsupportedError, match=shape.architecture):
            LLM.plan(path)
        return
    with LLM(path, max_model_len=64, num_threads=1, skip_tokenizer_init=True) as llm:
        [output] = llm.generate([[5, 6, 7]], SamplingParams(max_tokens=4, ignore_eos=True))
    assert len(output.outputs[0].token_ids) == 4


def test_a_token_reads_one_row_of_the_tables_of_its_layers(tmp_path: Path) -> None:
    shape = TINY["gemma4"]
    path = tmp_path / "m.gguf"
    write_shape(path, "tiny", shape)
    found = {tensor.name: nbytes(tensor, shape.mixture) for tensor in shape.tensors()}
    work = models.work_of(str(path))
    assert work.bytes_per_token == sum(found.values()) - found["per_layer_token_embd.weight"]
    head = next(t for t in shape.tensors() if t.name == "token_embd.weight")
    assert work.decode_weights - work.prompt_weights == np.prod(head.shape)


@pytest.mark.parametrize(
    ("name", "phases"),
    [
        ("qwen35", {"recurrence", "convolution"}),
        ("granitehybrid", {"recurrence", "convolution", "routing"}),
        ("deepseek2", {"routing"}),
    ],
)
def test_phases_name_recurrences_and_experts(
    name: str, phases: set[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "m.gguf"
    write_shape(path, "tiny", TINY[name])
    argv = ["bench", str(path), "--threads", "1", "--rounds", "1", "--suite", "phases"]
    argv += ["--streams", "1", "--prompt-len", "24", "--output-len", "4", "--json", "-"]
    assert main(argv) == 0
    rows = json.loads(capsys.readouterr().out)["results"]["phases"]
    decoding = {row["phase"]: row["median"] for row in rows if row["load"] == "1 requests"}
    assert phases <= decoding.keys()
    assert all(decoding[phase]["us"] > 0 for phase in phases)
    assert ("recurrence" in phases) == ("memory_us" in decoding.get("recurrence", {}))


def test_products_read_the_experts_and_heads_that_tokens_use() -> None:
    weight = WeightView(n=32, k=64, row_blocks=2, k_blocks=2, bits=4)
    kinds = {
        "one": OperatorTime(OpKind.LINEAR, Count.TOKENS, weight, 0.0, 1.0),
        "experts": OperatorTime(OpKind.EXPERTS, Count.TOKENS, weight, 0.0, 1.0, parts=8, per=2),
        "heads": OperatorTime(OpKind.HEADS, Count.TOKENS, weight, 0.0, 1.0, parts=3, per=3),
    }

    def products(name: str, tokens: int) -> Phase:
        times = ProgramTimes([kinds[name]], 1.0, 1)
        return phases_of(times, Rows(1, tokens, 1, 0.0, 1), 0.0, 0)["products"]

    one = products("one", 1)
    assert products("experts", 1).nbytes == pytest.approx(2 * one.nbytes)
    assert products("experts", 4).nbytes == pytest.approx(8 * (1 - 0.75**4) * one.nbytes)
    assert products("experts", 500).nbytes == pytest.approx(8 * one.nbytes)
    assert products("heads", 1).nbytes == products("heads", 9).nbytes == 3 * one.nbytes
    assert products("experts", 5).operations[4] == 10 * one.operations[4]
    assert products("heads", 5).operations[4] == 15 * one.operations[4]


# -- where files are kept ----------------------------------------------------------------------


def test_a_file_is_written_once_and_anew_when_its_shape_changes(tmp_path: Path) -> None:
    shape = TINY["lfm2"]
    path = cached_file("tiny", shape, tmp_path)
    written = path.stat().st_mtime_ns
    assert cached_file("tiny", shape, tmp_path) == path and path.stat().st_mtime_ns == written
    assert isinstance(shape, ShortConvolutions)
    other = replace(shape, kernel=4)
    assert digest(other) != digest(shape)
    assert cached_file("tiny", other, tmp_path) != path
    assert len(list(tmp_path.iterdir())) == 2


def test_an_unfinished_file_is_removed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def data(self: random_blocks.Blocks, tensor: Tensor) -> Iterator[Any]:
        raise OSError("the disk is full")

    monkeypatch.setattr(random_blocks.Blocks, "data", data)
    with pytest.raises(OSError, match="full"):
        cached_file("tiny", TINY["lfm2"], tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_too_little_room_is_said_before_anything_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    usage = shutil.disk_usage(tmp_path)._replace(free=2**20)
    monkeypatch.setattr(shutil, "disk_usage", lambda folder: usage)
    with pytest.raises(RequestError, match=r"random-qwen3.5-4b: expected 2\.5 GiB of free space"):
        cached_file("random-qwen3.5-4b", REAL_SHAPES["random-qwen3.5-4b"], tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_a_run_finds_the_file_in_the_users_cache(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(models, "REAL_SHAPES", {"random-lfm2-1.2b": TINY["lfm2"]})
    with models.ModelFiles("random-lfm2-1.2b") as files:
        path = Path(files.path)
    assert path.parent == tmp_path / "embedlm" / "bench" and path.is_file()
    assert models.files_of("random-lfm2-1.2b") == []
    assert models.files_of("other.gguf") == ["other.gguf"]
