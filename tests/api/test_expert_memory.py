"""Models larger than memory: experts that do not fit are read from the cache of weights."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from sdk import (
    LLM,
    EngineDeadError,
    LoadCancelled,
    MemoryPool,
    OutOfMemoryError,
    RequestError,
    SamplingParams,
)
from sdk.bench.random_blocks import write_shape
from sdk.bench.real_shapes import Experts
from sdk.bench.shape_parts import Tensor
from sdk.cli import main
from sdk.engine.weight_cache import packing
from sdk.engine.weight_cache.expert_uses import MOST_TOKENS, ExpertUses, read_uses
from sdk.engine.weight_cache.folder import prune_uses
from sdk.engine.weight_cache.store import WeightStore
from sdk.engine.weight_cache.writer import WeightWriter
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
    (file,) = weights.glob("*.weights")

    def fail(self: object, name: str) -> None:
        raise AssertionError(f"{name} is read from the model's file")

    monkeypatch.setattr(GgufCheckpoint, "weight", fail)
    with LLM(model, memory=memory, weight_cache=True, **LIMITS) as llm:
        assert answers(llm) == found
    assert list(weights.glob("*.weights")) == [file]


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


def test_a_full_disk_is_said_before_anything_is_packed(
    model: Path, weights: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(packing, "FREE", 1 << 60)
    seen: list[int] = []
    with pytest.raises(OutOfMemoryError, match="TiB stay free: remove files"):
        LLM(
            model,
            memory=f"{least(model)}MiB",
            weight_cache=True,
            on_progress=lambda _, done, total: seen.append(done),
            **LIMITS,
        )
    assert not seen and not list(weights.iterdir())


def test_what_waits_for_the_disk_can_be_cancelled(
    model: Path, weights: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A progress bar lives on, too: the same bytes are reported again."""
    write, seen = WeightWriter._write_weight, list[int]()

    def slowly(*args: Any) -> None:
        time.sleep(0.05)  # 128 experts and a few others
        write(*args)

    def goes_on(stage: str, done: int, total: int) -> bool:
        seen.append(done)
        return len(seen) < 3 or len({*seen[-3:]}) > 1

    monkeypatch.setattr(WeightWriter, "_write_weight", slowly)
    options: dict[str, Any] = {"memory": f"{least(model)}MiB", "weight_cache": True, **LIMITS}
    with pytest.raises(LoadCancelled):
        LLM(model, on_progress=goes_on, **options)
    assert seen == sorted(seen) and not list(weights.iterdir())


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
    (file,) = weights.glob("*.weights")
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
    assert list(weights.glob("*.weights")) == []
    with LLM(model, memory=memory, weight_cache=True, **LIMITS) as llm:
        assert answers(llm) == expected


def _places(llm: LLM) -> list[int]:
    """Where the matrices of the first layer's experts lie in the file."""
    grouped = llm._runner().model.layers[0].mlp.up.weight.grouped
    return [one.kept.begin - cache(llm)._base for one in grouped.packed.weights]


def test_a_file_that_another_process_truncates_is_an_error(model: Path, weights: Path) -> None:
    with LLM(model, memory=f"{least(model)}MiB", weight_cache=True, **LIMITS) as llm:
        (file,) = weights.glob("*.weights")
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


# -- uses of earlier runs --------------------------------------------------------------------------

LONG = SamplingParams(temperature=1, seed=5, max_tokens=150, min_tokens=150, ignore_eos=True)


def run_long(llm: LLM) -> None:
    llm.generate([PROMPTS[0]], LONG, use_tqdm=False)


def uses_file(weights: Path) -> Path:
    (found,) = weights.glob("*.uses")
    return found


def test_a_second_opening_begins_with_what_was_used_most(model: Path, weights: Path) -> None:
    """It is read before anybody asks; most of what a request needs is there then."""
    memory = memory_for(model, 0.5)
    with LLM(model, memory=memory, weight_cache=True, **LIMITS) as llm:
        run_long(llm)
        seen = cache(llm).history()
    assert seen.tokens == 5 + 149  # the last token is not computed with
    assert [sum(layer) for layer in seen.chosen] == [4 * seen.tokens] * 4
    assert sum(seen.ranks) == 4 * 4 * seen.ranked > 0
    known = read_uses(weights, uses_file(weights).stem)
    assert known == ExpertUses.of(seen)
    with LLM(model, memory=memory, weight_cache=True, **LIMITS) as llm:
        slots, end = sum(cache(llm).slots.values()), time.monotonic() + 30
        while cache(llm).use().reads < slots and time.monotonic() < end:
            time.sleep(0.01)
        assert cache(llm).use().reads == slots
        llm.generate([PROMPTS[0]], PARAMS, use_tqdm=False)
        use = cache(llm).use()
        # Half of the experts; by chance half would be there.
        assert use.hits > 0.6 * (use.hits + use.guessed + use.missed)
    both = read_uses(weights, uses_file(weights).stem)
    assert both is not None and both.tokens == seen.tokens + 5 + 11


def test_a_plan_says_on_what_its_speed_stands(model: Path, weights: Path) -> None:
    memory = memory_for(model, 0.5)
    options: dict[str, Any] = {"memory": memory, "weight_cache": True, **LIMITS}
    even = LLM.plan(model, **options)
    assert even.experts is not None and even.experts.curve == ()
    assert even.experts.basis == "if all are used about equally often" in str(even)
    with LLM(model, **options) as llm:
        run_long(llm)
    made = LLM.plan(model, **options)
    assert made.experts is not None and made.experts.counted == 154
    assert made.experts.basis == "as the last 154 tokens used them" in str(made)
    curve = made.experts.curve
    assert len(curve) == 65 and curve[0] == 1.0 and curve[-1] == 0.0
    assert list(curve) == sorted(curve, reverse=True)
    assert even.experts.usual != made.experts.usual < made.experts.missed
    with LLM(model, **options) as llm:
        run_long(llm)
        before = cache(llm).use()
        run_long(llm)
        use = [new - old for new, old in zip(cache(llm).use(), before, strict=True)]
    missed = (use[1] + use[2]) / sum(use[:3])
    assert missed == pytest.approx(made.experts.usual / made.experts.read, abs=0.12)


def test_steps_of_several_tokens_are_counted_but_not_ranked(model: Path) -> None:
    """Only one request alone says what one request needs."""
    with LLM(model, memory=memory_for(model, 0.5), weight_cache=True, **LIMITS) as llm:
        short = SamplingParams(temperature=0, max_tokens=60, min_tokens=60, ignore_eos=True)
        llm.generate([PROMPTS[0]] * 3, short, use_tqdm=False)  # all fit at once
        seen = cache(llm).history()
    assert seen.tokens >= 3 * 59 and seen.ranked <= 1


@pytest.mark.parametrize(
    "damage",
    [
        lambda data: b"",
        lambda data: data[: len(data) // 2],
        lambda data: b"\xff" + data[1:],
        lambda data: data.replace(b'"version": 1', b'"version": 2'),
        lambda data: data.replace(b'"chosen": [[', b'"chosen": [[-1, '),
        lambda data: data.replace(b'"chosen": [[', b'"chosen": [[1e400, '),
        lambda data: data.replace(b'"chosen": [[', b'"chosen": [[1, '),  # another model's
        lambda data: data.replace(b'"ranks": [', b'"ranks": [1, '),
        lambda data: b"[" * 100_000,
        lambda data: b"0" * (5 << 20),
    ],
)
def test_damaged_uses_change_nothing(
    model: Path, weights: Path, expected: list[Any], damage: Callable[[bytes], bytes]
) -> None:
    options: dict[str, Any] = {"memory": f"{least(model)}MiB", "weight_cache": True, **LIMITS}
    with LLM(model, **options) as llm:
        answers(llm)
    file = uses_file(weights)
    data = file.read_bytes()
    file.write_bytes(damage(data))
    assert file.read_bytes() != data
    plan = LLM.plan(model, **options)
    assert plan.experts is not None and plan.experts.curve == ()
    with LLM(model, **options) as llm:
        assert answers(llm) == expected
    known = read_uses(weights, file.stem)
    assert known is not None and [*map(len, known.chosen)] == [32] * 4  # written anew


def test_uses_that_others_may_write_are_not_read(model: Path, weights: Path) -> None:
    with LLM(model, memory=f"{least(model)}MiB", weight_cache=True, **LIMITS) as llm:
        answers(llm)
    file = uses_file(weights)
    assert file.stat().st_mode & 0o777 == 0o600
    file.chmod(0o666)
    assert read_uses(weights, file.stem) is None


def test_old_uses_count_less_and_what_is_kept_is_bounded() -> None:
    ranks = tuple(range(65))
    old = ExpertUses(MOST_TOKENS, ((MOST_TOKENS, 0), (40, 8)), 1000, ranks)
    new = ExpertUses(MOST_TOKENS // 2, ((0, MOST_TOKENS // 2), (8, 40)), 1000, ranks)
    both = old.plus(new)
    assert both.tokens == MOST_TOKENS
    assert both.chosen == ((MOST_TOKENS // 2, MOST_TOKENS // 2), (28, 44))
    again = both.plus(ExpertUses(4 * MOST_TOKENS, ((0, 4 * MOST_TOKENS), (0, 4)), 0, ranks))
    assert again.tokens == MOST_TOKENS and again.chosen == ((0, MOST_TOKENS), (0, 1))
    few = ExpertUses(10, ((1, 2, 3),), 0, ranks)
    assert old.plus(few) == few  # another number of experts


def test_the_curve_of_what_is_missed() -> None:
    first = (100, *(0,) * 64)
    assert ExpertUses(400, ((1,),), 100, first).missed() == (1.0, *(0.0,) * 64)
    never = (50, *(0,) * 63, 50)
    found = ExpertUses(400, ((1,),), 100, never).missed()
    assert found == (1.0, *(0.5,) * 63, 0.0)
    assert ExpertUses(400, ((1,),), 7, first).missed() == ()  # too few tokens


def test_uses_go_with_their_weights(
    model: Path, weights: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with LLM(model, memory=f"{least(model)}MiB", weight_cache=True, **LIMITS) as llm:
        answers(llm)
    file = uses_file(weights)
    assert main(["cache", "ls"]) == 0
    assert file.stem not in capsys.readouterr().out
    assert main(["cache", "rm", next(weights.glob("*.weights")).stem]) == 0
    assert not list(weights.iterdir())
    for number in range(40):
        (weights / f"{number:032x}.uses").write_bytes(b"")
        os.utime(weights / f"{number:032x}.uses", (number, number))
    prune_uses(weights)
    assert sorted(one.stem for one in weights.iterdir())[0] == f"{8:032x}"
    assert main(["cache", "prune", "--max-size", "0"]) == 0
    assert not list(weights.iterdir())


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
    assert "of these are experts" in said and "of experts for a token (if all are used" in said
    assert "the disk reads" in said
