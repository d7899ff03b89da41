"""Tiny random models made by transformers, opened as our models, and a paged runner for both.

``DictCheckpoint`` is the smallest checkpoint there is, a dict of tensors, so that these tests need
no file format. ``Paged`` runs a model the way the engine does: requests own shuffled pages of 16
tokens, a step is ``{request: number of tokens}``.
"""

from __future__ import annotations

import json
import math
import tempfile
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import pairwise, product
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor

from sdk.kernels.kv.kv_types import KV_TYPES
from sdk.kernels.kv.pages import KVPages
from sdk.kernels.operators.batch import AttentionBatch
from sdk.kernels.operators.ops import Ops
from sdk.kernels.operators.states import LayerState, StateBatch
from sdk.kernels.weights.layouts import Dense
from sdk.loaders.folders.expert_names import spelled_as_ours
from sdk.loaders.folders.hf_folder import HfFolder
from sdk.loaders.qkv_rows import delta_rows
from sdk.models.architecture import architecture
from sdk.models.auto import build_model
from sdk.models.configs.keys import FIXED, read_keys
from sdk.models.decoder import CausalLM
from sdk.models.parallel import Mesh
from sdk.quant.caches import AttentionCache, StateCache
from sdk.quant.checkpoint import TensorEntry
from sdk.quant.errors import CheckpointError
from sdk.quant.weight import DenseWeight, Weight

PAGE_SIZE = 16
SLOTS = 12
TINY = {
    "vocab_size": 96,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 256,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}


TINY_ENCODER = {
    "vocab_size": 96,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "max_position_embeddings": 256,
    "pad_token_id": 0,
}


class DictCheckpoint:
    """A :class:`sdk.quant.checkpoint.Checkpoint` over a state dict."""

    path = Path("state_dict")
    format = "safetensors"
    tokenizer = None
    on_bytes: Callable[[int, int], None] | None = None

    def __init__(self, config: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> None:
        self.config = dict(config)
        self.generation_config: dict[str, Any] = {}
        self.processor: dict[str, Any] = {}
        self.tensors = dict(tensors)
        self.pulled: set[str] = set()

    def _take(self, name: str) -> Tensor:
        if name not in self.tensors:
            raise CheckpointError(f"{self.path}: {name}: expected a tensor, found none")
        self.pulled.add(name)
        return self.tensors[name]

    def weight(self, name: str) -> Weight:
        return DenseWeight(Dense(self._take(f"{name}.weight")))

    def tensor(self, name: str) -> Tensor:
        return self._take(name).to(torch.float32)

    def has(self, name: str) -> bool:
        return name in self.tensors or f"{name}.weight" in self.tensors

    def alike(self, one: str, other: str) -> bool:
        return False

    def entries(self) -> Sequence[TensorEntry]:
        return [TensorEntry(n, tuple(t.shape), "f32", t.nbytes) for n, t in self.tensors.items()]

    def unused(self) -> list[str]:
        return sorted(set(self.tensors) - self.pulled)

    def close(self) -> None:
        pass


def tiny(model_type: str, seed: int = 0, **options: Any) -> Any:
    """A seeded transformers model in float32 with eager attention and random norms and biases."""
    values = {**TINY, **options}
    own = architecture(model_type)
    if own is not None and model_type not in transformers.CONFIG_MAPPING:  # theirs has a dash
        model_type = next(name for name in own.aliases if name in transformers.CONFIG_MAPPING)
    if isinstance(getattr(transformers.CONFIG_MAPPING[model_type], "head_dim", None), property):
        values.pop("head_dim")  # falcon computes it
    config = transformers.AutoConfig.for_model(model_type, **values)
    config.tie_word_embeddings = values.get("tie_word_embeddings", config.tie_word_embeddings)
    return seeded(config, transformers.AutoModelForCausalLM, seed)


def tiny_encoder(model_type: str, **options: Any) -> Any:
    """The same without a head."""
    config = transformers.AutoConfig.for_model(model_type, **{**TINY_ENCODER, **options})
    return seeded(config, transformers.AutoModel)


def seeded(config: Any, kind: Any, seed: int = 0) -> Any:
    """A model of the auto class ``kind``: see :func:`tiny`."""
    generator = torch.Generator().manual_seed(seed)
    with torch.random.fork_rng():
        torch.manual_seed(seed)  # of what is not replaced below: gpt-oss adds to its sinks
        # Falcon's eager code adds its linear biases twice, transformers 5.24.
        twice = config.model_type == "falcon" and config.alibi
        model = kind.from_config(config, attn_implementation="sdpa" if twice else "eager")
    model = model.to(torch.float32).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            if parameter.dim() == 1:
                spread = 0.3 * noise
                parameter.copy_(spread if name.endswith("bias") else parameter + spread)
            else:
                parameter.copy_(noise * (1.5 / parameter.shape[-1] ** 0.5))
        for module in model.modules():
            if hasattr(module, "create_weight"):  # a table of sines, no weight (RoFormer)
                module.weight.copy_(module.create_weight())
        for name, buffer in model.named_buffers():
            if name.endswith("layer_scalar"):
                buffer.copy_(0.5 + torch.rand(1, generator=generator))
    return model


def checkpoint_of(model: Any, *, stored: bool = False) -> DictCheckpoint:
    """The model's tensors under the names ``save_pretrained`` would give them; those of a model
    that does not use a Llama's as a folder reads them, unless all are wanted as ``stored``."""
    state = {name: t.detach().clone() for name, t in model.state_dict().items()}
    kind = model.config.model_type
    tensors = state
    if not stored:
        tensors = {n: t for name, own in state.items() for n, t in _by_expert(kind, name, own)}
        for name in tensors:
            rows = delta_rows(model.config.to_dict(), name.removesuffix(".weight"))
            tensors[name] = tensors[name] if rows is None else tensors[name][rows]
    if model.config.tie_word_embeddings:
        tensors.pop("lm_head.weight", None)
    own = architecture(kind)
    if "embed_tokens.weight" in tensors:  # without a head
        tensors = {f"model.{name}": tensor for name, tensor in tensors.items()}
    if not stored and own is not None and own.tensors.names:
        tensors = _as_ours(model)
    return DictCheckpoint(model.config.to_dict(), tensors)


def _as_ours(model: Any) -> dict[str, Tensor]:
    """The tensors of a model whose files do not have a Llama's names, as a folder reads them."""
    with tempfile.TemporaryDirectory() as folder:
        model.save_pretrained(folder)
        path = Path(folder, "config.json")
        config = json.loads(path.read_text())  # a folder is refused for what models are, too
        own = architecture(config["model_type"])
        read = frozenset() if own is None else read_keys(own)
        kept = {k: v for k, v in config.items() if k not in FIXED or k in read}
        path.write_text(json.dumps(kept))
        checkpoint = HfFolder(Path(folder))
        found = {}
        for entry in checkpoint.entries():
            path, experts, part = entry.name.rpartition(".experts.")
            if experts and len(entry.shape) == 3:
                parts = ("gate_proj", "up_proj") if part == "gate_up_proj" else (part,)
                for index, own in product(range(entry.shape[0]), parts):
                    name = f"{path}.experts.{index}.{own}"
                    found[f"{name}.weight"] = checkpoint.weight(name).dequantize()
            elif len(entry.shape) == 2 and not entry.name.endswith(".A_log"):
                weight = checkpoint.weight(entry.name.removesuffix(".weight"))
                found[entry.name] = weight.dequantize()
            else:
                found[entry.name] = checkpoint.tensor(entry.name)
        checkpoint.close()
    return found


def _by_expert(model_type: str, name: str, tensor: Tensor) -> Iterator[tuple[str, Tensor]]:
    """transformers joins the experts of a layer in one tensor; gpt-oss' lie turned, gate and up
    taking turns."""
    name = spelled_as_ours(name)
    if model_type == "phimoe":  # its files have another name than the model in memory
        name = name.replace(".mlp.router.", ".mlp.gate.")
    path, found, part = name.partition(".mlp.experts.")
    gpt_oss = model_type == "gpt_oss"
    if not found or architecture(model_type) is None:
        yield name, tensor
        return
    stem, suffix = part.removesuffix("_bias"), "bias" if part.endswith("_bias") else "weight"
    for index, own in enumerate(tensor):
        own = own.t() if gpt_oss and suffix == "weight" else own
        parts = {stem: own}
        if stem == "gate_up_proj":
            half = len(own) // 2
            parts = {"gate_proj": own[:half], "up_proj": own[half:]}
            if gpt_oss:
                parts = {"gate_proj": own[::2], "up_proj": own[1::2]}
        for key, values in parts.items():
            yield f"{path}.mlp.experts.{index}.{key}.{suffix}", values.contiguous()


def expected_logits(model: Any, ids: Sequence[int]) -> Tensor:
    """transformers' logits at every position, float32 ``[T, vocab]``.

    Delta nets run token by token: their code for prompts has ten times the error of that for one
    token, compared with float64.
    """
    if hasattr(model.config, "linear_num_key_heads"):
        return _by_steps(model, ids)
    with torch.no_grad():
        return model(input_ids=torch.tensor([list(ids)]), use_cache=False).logits[0].float()


def _by_steps(model: Any, ids: Sequence[int]) -> Tensor:
    cache, found = transformers.DynamicCache(config=model.config), []
    with torch.no_grad():
        for token in ids:
            found.append(model(input_ids=torch.tensor([[token]]), cache=cache).logits[0, 0])
    return torch.stack(found).float()


def expected_states(model: Any, ids: Sequence[int]) -> Tensor:
    """transformers' last hidden states, float32 ``[T, hidden]``; ``model`` may have a head."""
    with torch.no_grad():
        body = getattr(model, "model", model)
        return body(input_ids=torch.tensor([list(ids)])).last_hidden_state[0].float()


def prompt(length: int, seed: int) -> list[int]:
    """Random token ids, none of them special."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(3, 96, (length,), generator=generator).tolist()


def _pages(cache: AttentionCache, kv_heads: int, pages: int, noise: torch.Generator) -> KVPages:
    shape = (pages, kv_heads, PAGE_SIZE, cache.key_dim)
    transposed = (*shape[:2], cache.key_dim, PAGE_SIZE)
    return KVPages(
        torch.randn(transposed, generator=noise).transpose(2, 3),
        torch.randn((*shape[:3], 0 if cache.latent else cache.value_dim), generator=noise),
        KV_TYPES["float32"],
        KV_TYPES["float32"],
    )


def _state(cache: StateCache, noise: torch.Generator) -> LayerState:
    """Slots of noise, which are not next to each other."""
    sizes = [math.prod(part.shape) for part in cache.parts]
    memory = torch.randn(SLOTS, sum(sizes) + 8, generator=noise)
    parts = memory[:, : sum(sizes)].split(sizes, dim=1)
    return LayerState(
        {p.name: x.view(SLOTS, *p.shape) for p, x in zip(cache.parts, parts, strict=True)}
    )


class Paged:
    """A model with its pages and states; every request gets shuffled ones, filled with noise."""

    def __init__(
        self,
        model: CausalLM,
        kv_heads: int | Sequence[int] | None = None,
        pages: int = 64,
        ranks: int = 1,
    ) -> None:
        """``kv_heads``: of this rank in every cache, or in each."""
        c = model.config
        generator = torch.Generator().manual_seed(7)
        self.model = model
        caches = c.rank_caches(ranks) if c.causal else c.caches[:1]
        each = kv_heads if isinstance(kv_heads, Sequence) else [kv_heads] * len(caches)
        self.kv: list[KVPages | LayerState] = [
            _state(cache, generator)
            if isinstance(cache, StateCache)
            else _pages(cache, heads or cache.kv_heads, pages, generator)
            for cache, heads in zip(caches, each, strict=True)
        ]
        self.free = torch.randperm(pages, generator=generator).tolist()
        self.tables: dict[str, list[int]] = {}
        self.done: dict[str, int] = {}
        self.slots = torch.randperm(SLOTS - 1, generator=generator).tolist()
        self.slot: dict[str, int] = {}

    def step(self, work: Mapping[str, Sequence[int] | Tensor]) -> dict[str, Tensor]:
        """Run the given next tokens of each request in one batch; logits ``[n, vocab]``, or hidden
        states ``[n, hidden]`` of a model that is not causal.

        A tensor ``[n, hidden]`` stands for tokens given as embeddings.
        """
        positions: list[int] = []
        slots: list[int] = []
        begun = {name: self.done.get(name, 0) > 0 for name in work}
        for name, ids in work.items():
            table, begin = self.tables.setdefault(name, []), self.done.get(name, 0)
            while len(table) * PAGE_SIZE < begin + len(ids):
                table.append(self.free.pop())
            for position in range(begin, begin + len(ids)):
                positions.append(position)
                slots.append(table[position // PAGE_SIZE] * PAGE_SIZE + position % PAGE_SIZE)
            self.done[name] = begin + len(ids)
        counts = [len(ids) for ids in work.values()]
        lengths = [self.done[name] for name in work]
        width = max(len(self.tables[name]) for name in work)
        table = [self.tables[n] + [0] * (width - len(self.tables[n])) for n in work]
        starts = [sum(counts[:i]) for i in range(len(counts) + 1)]
        batch = AttentionBatch(
            positions=torch.tensor(positions),
            query_start=torch.tensor(starts, dtype=torch.int32),
            context_len=torch.tensor(lengths, dtype=torch.int32),
            page_table=torch.tensor(table, dtype=torch.int32),
            slots=torch.tensor(slots),
            page_size=PAGE_SIZE,
            max_query_len=max(counts),
            max_context_len=max(lengths),
            token_types=torch.zeros(sum(counts), dtype=torch.int64),
            states=self._states(begun, starts),
        )
        flat = torch.cat([torch.as_tensor(ids) for ids in work.values()])
        with torch.no_grad():
            found = self.model(flat, batch, self.kv)
            if self.model.config.causal:
                found = self.model.logits(found)
        return dict(zip(work, found.split(counts), strict=True))

    def _states(self, begun: Mapping[str, bool], starts: Sequence[int]) -> StateBatch:
        """The states of a step: every request has a slot, which its last token writes."""
        for name in begun:
            if name not in self.slot:
                self.slot[name] = 1 + self.slots.pop()
        own = [self.slot[name] for name in begun]
        initial = [slot if begun[name] else -1 for name, slot in zip(begun, own, strict=True)]
        saves = torch.arange(len(own) + 1)
        last = [end - 1 for end in starts[1:]]
        given = (initial, saves.tolist(), last, own)
        return StateBatch(*(torch.tensor(values, dtype=torch.int32) for values in given))

    def run(self, name: str, ids: Sequence[int], splits: Sequence[int] = ()) -> Tensor:
        """All of ``ids``, cut before the given positions: logits ``[len(ids), vocab]``."""
        edges = [0, *splits, len(ids)]
        parts = [self.step({name: ids[a:b]})[name] for a, b in pairwise(edges)]
        return torch.cat(parts)


class Ranks:
    """``size`` simulated ranks, one thread each, that meet at a barrier for every collective."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.barrier = threading.Barrier(size, timeout=60)
        self.slots: list[Tensor] = [torch.empty(0)] * size

    def mesh(self, rank: int) -> Mesh:
        return Mesh(rank, self.size, _ThreadGroup(self, rank))

    def run(self, work: Callable[[Mesh], Any]) -> list[Any]:
        """``work(mesh)`` on every rank; their results in rank order. The first error is raised."""
        results: list[Any] = [None] * self.size
        errors: list[BaseException] = []

        def target(rank: int) -> None:
            try:
                results[rank] = work(self.mesh(rank))
            except BaseException as error:
                errors.append(error)
                self.barrier.abort()

        threads = [threading.Thread(target=target, args=(rank,)) for rank in range(self.size)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        real = [e for e in errors if not isinstance(e, threading.BrokenBarrierError)]
        if errors:
            raise (real or errors)[0]
        return results


class _ThreadGroup:
    def __init__(self, ranks: Ranks, rank: int) -> None:
        self.ranks, self.rank = ranks, rank

    def all_gather(self, x: Tensor) -> list[Tensor]:
        self.ranks.slots[self.rank] = x.clone()
        self.ranks.barrier.wait()
        gathered = list(self.ranks.slots)
        assert {t.shape for t in gathered} == {x.shape}, "ranks must send tensors of one shape"
        self.ranks.barrier.wait()
        return gathered

    def all_reduce(self, x: Tensor) -> None:
        x.copy_(torch.stack(self.all_gather(x)).sum(dim=0))


@pytest.fixture(scope="session", autouse=True)
def _one_thread() -> Iterator[None]:
    """Tensors this small are slower on two threads, much slower on a busy machine."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="session", params=[("reference",), None], ids=["reference", "fastest"])
def ops(request: pytest.FixtureRequest) -> Iterator[Ops]:
    """Exact arithmetic: on the reference kernels, and on the first that take the work here."""
    found = Ops(compute="exact", num_threads=1, backends=request.param)
    yield found
    found.close()


@pytest.fixture
def load(ops: Ops) -> Callable[..., CausalLM]:
    """``load(transformers model or checkpoint, max_model_len=, mesh=, layers=)`` -> our model.

    One at a time: simulated ranks share an engine, whose memory for weights is for one thread.
    """
    loading = threading.Lock()

    def load(
        source: Any,
        max_model_len: int = 256,
        mesh: Mesh | None = None,
        layers: range | None = None,
    ) -> CausalLM:
        checkpoint = source if hasattr(source, "unused") else checkpoint_of(source)
        with loading:
            return build_model(
                checkpoint, mesh or Mesh(), ops, max_model_len=max_model_len, layers=layers
            )

    return load
