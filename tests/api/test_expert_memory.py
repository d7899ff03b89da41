"""Models larger than memory: experts that do not fit are read from the cache of weights."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from sdk import (
    LLM,
    EngineDeadError,
    MemoryPool,
    OutOfMemoryError,
    RequestError,
    SamplingParams,
)
from sdk.bench.random_blocks import write_shape
from sdk.bench.real_shapes import Experts
from sdk.bench.shape_parts import Tensor
from sdk.cli import main
from sdk.engine.weight_cache.store import WeightStore
from sdk.kernels.cpu.expert_cache import ExpertCache
from sdk.kernels.errors import KernelError
from sdk.kernels.weights.expert_slots import slot_bytes, slots_within
from sdk.memory.disk_speed import disk_bandwidth
from sdk.memory.plan import DECODE_SHARE

#: 4 layers of 32 experts, 16 MB in all; half of the matrices back have more bits than the others.
SHAPE = Experts(256, 4, 4, 2, expert=256, experts=32, used=4, head_dim=64, vocab=320, skewed=True)
LIMITS: dict[str, Any] = {
    "max_model_len": 256,
    "max_num_seqs": 3,
    "max_num_batched_tokens": 64,
    "num_threads": 2,
    "skip_tokenizer_init": True,
}
PROMPTS = [
    {"prompt_token_ids": [(7 * i + 31 * j) % 320 for i in range(count)]}
    for j, count in enumerate((5, 90, 17))
]
PARAMS = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True, logprobs=1)


@pytest.fixture(autouse=True)
def weights(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of the cache, of this test alone."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache" / "embedlm" / "weights"


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("experts") / "model.gguf"
    write_shape(path, "tiny", SHAPE)
    return path


@pytest.fixture(scope="module")
def expected(model: Path) -> list[Any]:
    with LLM(model, **LIMITS) as llm:
        return answers(llm)


def answers(llm: LLM) -> list[Any]:
    """Tokens and their log-probabilities, which differ if a bit of a logit does."""
    found = llm.generate(PROMPTS, PARAMS, use_tqdm=False)
    return [
        (one.outputs[0].token_ids, [list(row.items()) for row in one.outputs[0].logprobs or []])
        for one in found
    ]


def least(model: Path, **options: Any) -> int:
    """MiB, of the message."""
    plan = LLM.plan(model, memory="1MiB", weight_cache=True, **LIMITS | options)
    assert not plan.fits
    (line,) = [one for one in plan.problem.splitlines() if "is the least" in one]
    return int(line.split("'")[1].removesuffix("MiB"))


def memory_for(model: Path, share: float) -> str:
    """A budget in which that share of the experts stays."""
    whole = LLM.plan(model, memory="1GiB", weight_cache=True, **LIMITS)
    assert whole.fits and whole.experts is None
    full = LLM.plan(model, kv_cache_memory_bytes=1 << 20, **LIMITS)
    some = LLM.plan(model, memory="1MiB", weight_cache=True, **LIMITS).experts
    assert some is not None
    needed = full.total - full.kv_cache - int((1 - share) * some.total)
    one = LLM.plan(model, memory=f"{least(model)}MiB", weight_cache=True, **LIMITS)
    return f"{max((needed + one.kv_cache >> 20) + 1, least(model))}MiB"


def cache(llm: LLM) -> ExpertCache:
    store = llm._runner().weights.weight_store
    assert isinstance(store, WeightStore) and store.experts is not None
    return store.experts


def test_answers_have_the_bits_of_the_model_in_memory(model: Path, expected: list[Any]) -> None:
    """Of requests together, of a prompt in chunks that needs all experts at once, packed now and
    mapped, with room for few experts and for half of them."""
    small = least(model)
    for memory in (f"{small}MiB", memory_for(model, 0.5)):
        for _ in range(2):
            with LLM(model, memory=memory, weight_cache=True, **LIMITS) as llm:
                assert answers(llm) == expected
                plan, found = llm.memory_plan, cache(llm)
                assert plan.experts is not None
                assert found.nbytes <= plan.experts.resident < plan.experts.total
                use = found.use()
                assert use.missed > 0 and use.reads > 0 and use.read_bytes > 0
                assert "matrices of experts stay in memory" in llm.explain()
                metrics = llm.get_metrics()
                assert metrics["expert_misses"] == use.missed
                # what was asked ahead may still be read
                assert use.read_bytes <= metrics["expert_read_bytes"] <= found.use().read_bytes
                assert metrics["expert_hits"] + metrics["expert_guesses"] > 0


def test_drafts_do_not_change_answers(model: Path, expected: list[Any]) -> None:
    drafts = {"method": "ngram", "num_speculative_tokens": 3}
    memory = f"{least(model, speculative_config=drafts)}MiB"
    with LLM(model, memory=memory, weight_cache=True, speculative_config=drafts, **LIMITS) as llm:
        assert answers(llm) == expected
        assert cache(llm).use().reads > 0


def test_a_second_opening_reads_no_matrix(
    model: Path, weights: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from sdk.loaders.gguf_files.checkpoint import GgufCheckpoint

    memory = memory_for(model, 0.4)
    with LLM(model, memory=memory, weight_cache=True, **LIMITS) as llm:
        found = answers(llm)
    (file,) = weights.iterdir()

    def fail(self: object, name: str) -> None:
        raise AssertionError(f"{name} is read from the model's file")

    monkeypatch.setattr(GgufCheckpoint, "weight", fail)
    with LLM(model, memory=memory, weight_cache=True, **LIMITS) as llm:
        assert answers(llm) == found
    assert list(weights.iterdir()) == [file]


def test_guesses_of_the_router_read_ahead(model: Path) -> None:
    with LLM(model, memory=memory_for(model, 0.5), weight_cache=True, **LIMITS) as llm:
        answers(llm)
        use = cache(llm).use()
    assert use.asked_ahead > 0
    assert use.guessed > use.asked_ahead // 4  # chance would be 4 of 32


def test_a_model_that_fits_is_as_always(model: Path) -> None:
    with LLM(model, memory="1GiB", weight_cache=True, **LIMITS) as llm:
        store = llm._runner().weights.weight_store
        assert store is not None and store.experts is None
        assert llm.memory_plan.experts is None


# -- the plan --------------------------------------------------------------------------------------


def test_a_plan_says_how_much_stays_and_what_a_token_reads(model: Path) -> None:
    plan = LLM.plan(model, memory=memory_for(model, 0.5), weight_cache=True, **LIMITS)
    share = plan.experts
    assert plan.fits and share is not None
    assert share.resident / share.total == pytest.approx(0.5, abs=0.1)
    assert share.experts == 4 * 32
    assert share.read == pytest.approx(share.total * 4 / 32, rel=1e-3)
    assert share.missed == pytest.approx(share.read * (1 - share.resident / share.total), abs=1)
    assert f"{share.resident / share.total:.0%} of all" in str(plan)
    slow, fast = (plan.tokens_per_second(1e12, disk=disk) for disk in (1e6, 1e9))
    assert fast > 100 * slow
    assert 0 < share.usual < share.missed
    assert slow == pytest.approx(1e6 / share.usual, rel=1e-6)
    # In memory everything is multiplied, whatever the disk gives meanwhile.
    assert plan.tokens_per_second(1e6, disk=1e12) == pytest.approx(DECODE_SHARE * 1e6 / plan.read)


def test_the_least_memory_is_named_and_works(model: Path) -> None:
    found = least(model)
    assert LLM.plan(model, memory=f"{found}MiB", weight_cache=True, **LIMITS).fits
    below = LLM.plan(model, memory=f"{found - 1}MiB", weight_cache=True, **LIMITS)
    assert not below.fits and "experts of 128" in below.problem
    with pytest.raises(OutOfMemoryError, match="is the least for these limits"):
        LLM(model, memory=f"{found - 1}MiB", weight_cache=True, **LIMITS)


def test_without_a_cache_the_plan_proposes_it(model: Path) -> None:
    plan = LLM.plan(model, memory=memory_for(model, 0.5), **LIMITS)
    assert not plan.fits
    (one,) = [one for one in plan.alternatives if one.options == {"weight_cache": True}]
    assert one.plan.experts is not None and "are read for a token" in str(one)


@pytest.mark.parametrize(
    ("options", "why"),
    [
        ({"tensor_parallel_size": 2}, "several ranks"),
        ({"data_parallel_size": 2}, "several replicas"),
        ({"memory": MemoryPool("20MiB")}, "a memory pool"),
    ],
)
def test_what_shares_experts_is_refused_by_name(
    model: Path, options: dict[str, Any], why: str
) -> None:
    given = {"memory": f"{least(model)}MiB", **options}
    plan = LLM.plan(model, weight_cache=True, **LIMITS | given)
    assert not plan.fits and plan.experts is None
    assert f"experts cannot be read from the cache of weights: {why}" in plan.problem


def test_a_dense_model_is_refused_by_name() -> None:
    dense = Path(__file__).parents[1] / "golden" / "gguf-Q4_K_M" / "model.gguf"
    plan = LLM.plan(dense, memory="1MiB", weight_cache=True, **LIMITS)
    assert not plan.fits and "the model has no experts" in plan.problem


def test_a_fork_is_refused(model: Path) -> None:
    with (
        LLM(model, memory=memory_for(model, 0.5), weight_cache=True, **LIMITS) as llm,
        pytest.raises(RequestError, match="its experts are not all in memory"),
    ):
        llm.fork()


def test_a_cache_that_is_too_small_is_refused(model: Path) -> None:
    memory = f"{least(model)}MiB"
    with pytest.raises(OutOfMemoryError, match="larger than the cache may be"):
        LLM(model, memory=memory, weight_cache="1MiB", **LIMITS)


class _Mixed:
    """Gate and up of an expert have different types, so they cannot be one matrix."""

    architecture, mixture = SHAPE.architecture, SHAPE.mixture

    def metadata(self) -> dict[str, Any]:
        return SHAPE.metadata()

    def tensors(self) -> Iterator[Tensor]:
        for one in SHAPE.tensors():
            yield one._replace(part="output") if "ffn_up_exps" in one.name else one


def test_experts_that_one_product_cannot_read_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "mixed.gguf"
    write_shape(path, "mixed", _Mixed())
    memory = f"{least(path)}MiB"
    with pytest.raises(KernelError, match="several formats in a layer"):
        LLM(path, memory=memory, weight_cache=True, **LIMITS)


def test_a_folder_that_cannot_be_read_is_an_error(model: Path, weights: Path) -> None:
    """Elsewhere the weights would be packed without it."""
    weights.parent.parent.mkdir(parents=True)
    weights.parent.write_text("not a folder")
    with pytest.raises(OutOfMemoryError, match=r"\(weight_cache\), which has none: .*Not a dir"):
        LLM(model, memory=f"{least(model)}MiB", weight_cache=True, **LIMITS)


# -- files -----------------------------------------------------------------------------------------


def test_a_wrong_bit_of_an_expert_is_an_error_and_the_file_goes(
    model: Path, weights: Path, expected: list[Any]
) -> None:
    memory = f"{least(model)}MiB"
    with LLM(model, memory=memory, weight_cache=True, **LIMITS) as llm:
        places = _places(llm)
    (file,) = weights.iterdir()
    with file.open("r+b") as out:
        for start in places:  # of the first layer, all experts
            out.seek(start + 100)
            byte = out.read(1)
            out.seek(start + 100)
            out.write(bytes([byte[0] ^ 1]))
    with (
        LLM(model, memory=memory, weight_cache=True, **LIMITS) as llm,
        pytest.raises(EngineDeadError, match="are damaged"),
    ):
        answers(llm)
    assert list(weights.iterdir()) == []
    with LLM(model, memory=memory, weight_cache=True, **LIMITS) as llm:
        assert answers(llm) == expected


def _places(llm: LLM) -> list[int]:
    """Where the matrices of the first layer's experts lie in the file."""
    grouped = llm._runner().model.layers[0].mlp.up.weight.grouped
    return [one.kept.begin - cache(llm)._base for one in grouped.packed.weights]


def test_a_file_that_another_process_truncates_is_an_error(model: Path, weights: Path) -> None:
    with LLM(model, memory=f"{least(model)}MiB", weight_cache=True, **LIMITS) as llm:
        (file,) = weights.iterdir()
        answers(llm)
        # waits until this process has copied what it needs and gives its lease back
        done = subprocess.run(
            [sys.executable, "-c", f"import os; os.truncate({str(file)!r}, 4096)"], timeout=60
        )
        assert done.returncode == 0
        with pytest.raises(EngineDeadError, match="an expert cannot be read"):
            answers(llm)


def test_a_file_that_is_removed_is_still_read(
    model: Path, weights: Path, expected: list[Any]
) -> None:
    with LLM(model, memory=f"{least(model)}MiB", weight_cache=True, **LIMITS) as llm:
        for one in weights.iterdir():
            one.unlink()
        assert answers(llm) == expected


def test_a_forked_child_reads_experts_too(model: Path) -> None:
    """It has none of the threads that read, and places of its own."""
    with LLM(model, memory=f"{least(model)}MiB", weight_cache=True, **LIMITS) as llm:
        layers = [layer.mlp for layer in llm._runner().model.layers]
        x = torch.randn(40, 256, generator=torch.Generator().manual_seed(1))
        expected = [mlp(x).clone() for mlp in layers]
        pid = os.fork()
        if not pid:
            reads = cache(llm).use().reads
            right = all(
                bool((mlp(x) == one).all()) for mlp, one in zip(layers, expected, strict=True)
            )
            os._exit(0 if right and cache(llm).use().reads > reads else 1)
        assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
        assert all(bool((mlp(x) == one).all()) for mlp, one in zip(layers, expected, strict=True))


# -- slots -----------------------------------------------------------------------------------------


def test_sizes_share_the_budget_evenly_and_keep_their_least() -> None:
    assert slots_within(1000, {10: 50, 20: 50}, 1) == {10: 33, 20: 33}
    assert slots_within(10_000, {10: 50, 20: 50}, 1) == {10: 50, 20: 50}
    found = slots_within(500, {10: 100, 50: 4}, 4)
    assert found == {50: 4, 10: 30}
    assert slots_within(50, {10: 3}, 5) == {10: 3}
    with pytest.raises(KernelError, match="expected at least 150 bytes"):
        slots_within(149, {10: 50, 20: 50}, 5)
    assert slot_bytes(1) == slot_bytes(4096) == 8192 and slot_bytes(4097) == 12288


# -- the disk --------------------------------------------------------------------------------------


def test_the_speed_of_the_disk_is_measured(tmp_path: Path) -> None:
    path = tmp_path / "weights.gguf"
    path.write_bytes(os.urandom(1 << 20) * 80)
    found = disk_bandwidth(path)
    assert found is None or 1e6 < found < 1e12
    assert disk_bandwidth(tmp_path) is None or found is not None  # the largest file of a folder
    path.write_bytes(bytes(1 << 20))
    assert disk_bandwidth(path) is None  # too small to say
    assert disk_bandwidth(tmp_path / "none") is None


def test_the_command_shows_what_is_read(model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    memory = memory_for(model, 0.5)
    options = ["--memory", memory, "--weight-cache", "1GiB", "--max-model-len", "256"]
    limits = ["--max-num-seqs", "3", "--max-num-batched-tokens", "64", "--skip-tokenizer-init"]
    assert main(["plan", str(model), *options, *limits]) == 0
    said = capsys.readouterr().out
    assert "of these are experts" in said and "of experts for a token; the disk reads" in said
