"""Memory plans of ranks on several GPUs, as if there were some."""

from __future__ import annotations

import contextlib
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from sdk import RequestError
from sdk.api.options import engine_config
from sdk.kernels import gpu
from sdk.kernels.gpu.tuning import Tuning
from sdk.kernels.scratch import Matrix, Products
from sdk.loading import load as loading
from sdk.memory import planning, resolve
from sdk.memory.demand import WeightBytes
from sdk.memory.plan import MemoryPlan
from sdk.memory.split import largest_part

GIB = 2**30
LIMITS: dict[str, Any] = {"max_model_len": 64, "max_num_seqs": 2, "device": "cuda"}


class Cards:
    """What torch says about GPUs: the whole memory of each, and what is free of it."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.whole = [16 * GIB, 16 * GIB]
        self.free = [12 * GIB, 1]
        self.capability = [(9, 0), (9, 0)]
        self.measured: list[int] = []

        def mem_get_info(device: int = 0) -> tuple[int, int]:
            self.measured.append(device)
            return self.free[device], self.whole[device]

        def properties(device: int) -> Any:
            return SimpleNamespace(total_memory=self.whole[device])

        for name, value in (
            ("is_available", lambda: True),
            ("device_count", lambda: len(self.whole)),
            ("mem_get_info", mem_get_info),
            ("get_device_properties", properties),
            ("get_device_capability", self._capability),
            ("current_device", lambda: 1),
        ):
            monkeypatch.setattr(torch.cuda, name, value)
        monkeypatch.setattr(planning, "activations_of", lambda config, checkpoint: torch.bfloat16)
        monkeypatch.setattr(gpu, "tuning_of", lambda device: Tuning(programs=528))

    def _capability(self, device: Any) -> tuple[int, int]:
        return self.capability[device if isinstance(device, int) else 0]


@pytest.fixture
def cards(monkeypatch: pytest.MonkeyPatch) -> Cards:
    return Cards(monkeypatch)


def planned(path: Path, **options: Any) -> MemoryPlan:
    config = engine_config(path, **LIMITS | options)
    with contextlib.closing(resolve.open_model(config)) as checkpoint:
        return planning.plan_for(config, checkpoint)


def model(**facts: Any) -> Any:
    sizes = {"num_heads": 8, "num_kv_heads": 4, "intermediate_size": 1024, "vocab_size": 1000}
    return SimpleNamespace(**{**sizes, "experts": None, "num_layers": 4, **facts})


@pytest.mark.parametrize(
    ("ranks", "facts", "part"),
    [
        (1, {}, 1.0),
        (2, {}, 1 / 2),
        (2, {"num_heads": 9, "num_kv_heads": 3}, 2 / 3),
        (4, {"num_kv_heads": 2}, 1 / 4),  # two ranks have each head
        (2, {"intermediate_size": 768}, 2 / 3),
        (3, {"num_heads": 6, "num_kv_heads": 3, "intermediate_size": 768}, 334 / 1000),
        (2, {"experts": SimpleNamespace(width=768, shared_width=0)}, 2 / 3),
    ],
)
def test_the_largest_part_of_a_layer_counts(ranks: int, facts: dict[str, Any], part: float) -> None:
    config = engine_config("model.gguf", device="cuda", tensor_parallel_size=ranks)
    assert largest_part(config, model(**facts), WeightBytes(1, 1, 1), ()) == pytest.approx(part)


def test_the_stage_with_most_weights_or_most_layers_counts() -> None:
    config = engine_config("model.gguf", device="cuda", pipeline_parallel_size=2)
    weights = WeightBytes(100, 100, 100, layers=(10, 10, 10, 30))  # and 40 at both ends
    assert largest_part(config, model(), weights, (range(2), range(2, 4))) == 0.8
    assert largest_part(config, model(), weights, (range(3), range(3, 4))) == 0.75  # of the pages
    both = engine_config(
        "model.gguf", device="cuda", pipeline_parallel_size=2, tensor_parallel_size=2
    )
    assert largest_part(both, model(), weights, (range(2), range(2, 4))) == 0.4


def test_cards_count_as_often_as_the_smallest_of_them_allows(cards: Cards) -> None:
    two = engine_config("model.gguf", device="cuda", tensor_parallel_size=2)
    assert resolve.available_to(two) == 2 * int(0.9 * 12 * GIB)
    assert cards.measured == [0]  # a measurement leaves a context on the card
    cards.whole[1] = 8 * GIB
    assert resolve.available_to(two) == 2 * int(0.9 * 8 * GIB)
    half = engine_config(
        "model.gguf", device="cuda", tensor_parallel_size=2, gpu_memory_utilization=0.5
    )
    assert resolve.available_to(half) == 2 * 4 * GIB
    one = engine_config("model.gguf", device="cuda")
    assert resolve.available_to(one) == int(0.9 * 12 * GIB)


def test_two_cards_hold_what_one_cannot(golden: Path, cards: Cards) -> None:
    path = golden / "gguf-Q8_0" / "model.gguf"
    whole = planned(path)
    assert whole.fits
    cards.free[0] = int(whole.total * 0.8 / 0.9)
    assert not planned(path).fits
    made = planned(path, tensor_parallel_size=2)
    assert made.fits and made.total <= 2 * 0.9 * cards.free[0]
    # each rank has the hidden states, the logits and the scratch as a whole
    assert made.weights == whole.weights and made.workspace > whole.workspace
    assert made.scratch == 2 * whole.scratch and made.graphs > whole.graphs


@pytest.mark.usefixtures("cards")
@pytest.mark.parametrize(("plain", "packed"), [(True, False), (False, True)])
def test_float32_results_of_the_library_are_scratch_on_amd_s_cards_alone(
    monkeypatch: pytest.MonkeyPatch, plain: bool, packed: bool
) -> None:
    matrix = Matrix(8192, 1024, plain=plain, packed=packed)  # packed ones are dequantized first
    products = Products((matrix,), replace(matrix, n=1), 8, 8, 64, 0, False, False, False)
    nvidia = gpu.scratch_of(products, "cuda").nbytes(512, 1, 0)
    monkeypatch.setattr(torch.version, "hip", "7.0")
    amd = gpu.scratch_of(products, "cuda").nbytes(512, 1, 0)
    assert amd - nvidia > (4 * 512 * 8192 - 1024 if plain else 0)


def test_a_budget_that_a_card_cannot_give_is_refused_with_the_sums(
    golden: Path, cards: Cards
) -> None:
    path = golden / "gguf-Q8_0" / "model.gguf"
    options = {"memory": "1GiB", "tensor_parallel_size": 2}
    made = planned(path, **options)
    assert made.fits
    cards.whole = [made.total, made.total // 2 - 1]
    problem = planned(path, **options).problem
    assert "a rank needs more memory than the smallest of 2 GPUs has" in problem
    assert "of a rank" in problem


def test_a_rank_has_the_card_of_its_number_and_one_rank_the_current_one(cards: Cards) -> None:
    assert loading._device(engine_config("model.gguf")) == "cpu"
    assert loading._device(engine_config("model.gguf", device="cuda")) == "cuda:1"
    two = engine_config("model.gguf", device="cuda", tensor_parallel_size=2)
    assert loading._device(two) == "cuda"
    cards.capability[1] = (7, 5)
    message = r"expected 2 GPUs of one compute capability, found cuda:0 9\.0, cuda:1 7\.5; choose"
    with pytest.raises(RequestError, match=message):
        loading._device(two)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"enable_expert_parallel": True}, "expected enable_expert_parallel=False"),
        ({"distributed_executor_backend": "ray"}, "expected distributed_executor_backend='mp'"),
        ({"data_parallel_size": 2}, "device='cuda': data_parallel_size must be 1"),
        (
            {"remote_workers": {"listen": "127.0.0.1:1", "token": "x" * 32}},
            "expected remote_workers=None",
        ),
        ({"cpu_offload": "auto", "pipeline_parallel_size": 2}, "cpu_offload: needs pipeline"),
        ({"speculative_config": {"model": "small.gguf"}}, "not supported on a GPU"),
    ],
)
def test_what_ranks_on_gpus_do_not_support_is_named(options: dict[str, Any], message: str) -> None:
    with pytest.raises(RequestError, match=message):
        engine_config("model.gguf", **{"device": "cuda", "tensor_parallel_size": 2, **options})
