"""The options of one rank."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sdk.engine.pages.disk_space import reserved_file
from sdk.kernels.context import Compute
from sdk.kernels.dataclass import dataclass
from sdk.kernels.kv.tiers import KEPT_PAGES
from sdk.kernels.operators.ops import Ops
from sdk.kernels.sized_graphs import MOST_TOKENS
from sdk.kernels.weights.offload import Offload, OnDisk, OnHost
from sdk.loaders.open import open_checkpoint
from sdk.models.auto import quantized_online
from sdk.models.parallel import Mesh
from sdk.quant.checkpoint import Checkpoint
from sdk.quant.online import online_quantized

if TYPE_CHECKING:
    from sdk.models.drafting_heads import HeadConfig


@dataclass(frozen=True, slots=True)
class DraftingWeights:
    """The weights that draft: the model's in fewer bits, a model of its own, or a ``head``."""

    model: str
    quantization: str | None
    #: The longest request that gets drafts, in tokens.
    max_model_len: int
    #: Whether they have keys and values of their own.
    has_pages: bool = False
    hf_overrides: Mapping[str, Any] = field(default_factory=dict)
    head: HeadConfig | None = None

    def open(self) -> Checkpoint:
        """Open the files, with online quantization if ``quantization`` is set."""
        from sdk.loaders.folders.head_folder import open_head

        own_files = self.head is None or self.head.block
        opened = open_checkpoint(self.model, mmproj=False) if own_files else open_head(self.model)
        return online_quantized(opened, self.quantization)


@dataclass(frozen=True, slots=True)
class RunnerConfig:
    """Everything a rank needs to load its model, as plain values that go to every process."""

    model: str
    num_pages: int
    page_size: int
    kv_dtype: str
    max_model_len: int
    max_num_seqs: int
    max_num_batched_tokens: int
    num_threads: int
    #: Draft tokens that a step may verify, of all requests together.
    max_draft_tokens: int = 0
    drafting: DraftingWeights | None = None
    #: ``"cuda"``: the rank with number r has the r-th GPU.
    device: str = "cpu"
    compute: Compute = "auto"
    #: The type of activations between kernels.
    activations: str = "float32"
    enforce_eager: bool = False
    #: GPU only: tokens of the largest step that is recorded in pieces, as the memory plan has it.
    recorded_tokens: int = MOST_TOKENS
    deterministic: bool = False
    revision: str | None = None
    local_files_only: bool = False
    hf_overrides: Mapping[str, Any] = field(default_factory=dict)
    quantization: str | None = None
    #: Slots of the swap space, and how many of them a place of each region of the cache takes.
    num_swap_pages: int = 0
    swap_parts: tuple[int, ...] = (1,)
    swap_path: str | None = None
    kv_keep: tuple[int, int] = KEPT_PAGES
    #: Frames of each window group, with frame 0, which is for padding; empty: layers with a window
    #: keep all tokens, in pages.
    num_frames: tuple[int, ...] = ()
    #: Slots of recurrent states, with slot 0, which is for padding.
    num_states: int = 0
    #: Places of snapshots of states in 16 bits, with place 0; 0: snapshots are in slots.
    num_rounded: int = 0
    #: Bytes of this rank's weights that are offloaded to a file in ``disk_folder``, and bytes that
    #: stay in memory.
    disk_bytes: int = 0
    resident_bytes: int = 0
    disk_folder: str = ""
    #: The most bytes of the cache of packed weights; 0: it is not used.
    weight_cache: int = 0
    #: Bytes for experts that stay in memory; 0: all do. Matrices of each size of which that many
    #: fit at least.
    expert_bytes: int = 0
    least_experts: int = 0
    #: What the weights take in the cache if some experts do not stay in memory, about.
    packed_bytes: int = 0
    #: GPU only: the first layer whose weights are offloaded to host memory.
    host_from: int | None = None
    #: The layers of each stage; empty: every rank has a part of all.
    stage_layers: tuple[range, ...] = ()
    #: Slots of low-rank adapters.
    adapter_slots: int = 0
    #: The largest rank of an adapter, and the type of its factors; ``None``: what the kernels take.
    max_adapter_rank: int = 64
    adapter_dtype: str | None = None
    #: See :class:`sdk.models.parallel.Mesh`.
    redundant_experts: int | None = None
    #: Copies of experts of engines that run in lockstep; ``None``: this one runs alone.
    lockstep_redundant: int | None = None
    #: Where results of known-answer checks are kept; ``None``: nowhere.
    answers_folder: Path | None = None
    #: Engines like this one that compute on this machine: the replicas of a model.
    engines_here: int = 1
    #: Rows of the image cache; 0: the tower is not loaded.
    image_rows: int = 0
    #: The file of the tower of a GGUF model; ``None``: the one beside it.
    mmproj: str | None = None

    def layers_of(self, stage: int) -> range | None:
        """The layers of a stage; ``None``: all of them."""
        return self.stage_layers[stage] if self.stage_layers else None

    def device_of(self, mesh: Mesh) -> str:
        """The device of a rank, with a GPU's number."""
        return f"cuda:{mesh.number}" if self.device == "cuda" else self.device

    def mesh_of(self, mesh: Mesh) -> Mesh:
        """A rank's place with what these options say about it."""
        return replace(mesh, redundant_experts=self.redundant_experts)

    def open_model(self) -> Checkpoint:
        """Open the model's files, with online quantization if ``quantization`` is set."""
        checkpoint = open_checkpoint(
            self.model,
            revision=self.revision,
            local_files_only=self.local_files_only,
            mmproj=self.mmproj if self.image_rows else False,
        )
        return quantized_online(checkpoint, self.quantization, self.hf_overrides, self.num_threads)

    def open_ops(self, mesh: Mesh) -> Ops:
        """The operators of a rank.

        :raises OutOfMemoryError: the disk has no room for the offloaded weights.
        """
        device = self.device_of(mesh)
        ops = Ops(
            device,
            compute=self.compute,
            num_threads=self.num_threads,
            deterministic=self.deterministic,
            activations=self.activations,
            offload=self._offload(),
        )
        if device != "cpu":
            with ops.entered():
                ops.check_answers(self.answers_folder)
        return ops

    def _offload(self) -> Offload | None:
        if self.host_from is not None:
            return OnHost(self.host_from)
        if not self.disk_bytes:
            return None
        file = reserved_file("disk_offload", self.disk_folder, self.disk_bytes, "weights")
        return OnDisk(self.resident_bytes, self.disk_bytes, file)
