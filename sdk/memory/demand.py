"""The inputs of a memory plan, and the arithmetic of a step's workspace."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from sdk.api.config import EngineConfig
from sdk.engine.scheduling.scheduler_config import WindowGroup
from sdk.kernels.dataclass import dataclass
from sdk.memory.expert_memory import (
    ExpertBytes,
    ExpertShare,
    least_bytes,
    why_all_stay,
)
from sdk.memory.mixers import mixer_width
from sdk.models.parallel import sent_per_step
from sdk.quant.caches import pages_in_window
from sdk.sampling.extra_rows import SCORED_BYTES, scored_rows, waiting_rows

if TYPE_CHECKING:
    from sdk.kernels.scratch import Scratch
    from sdk.memory.image_memory import ImageMemory
    from sdk.models.configs.config import ModelConfig

#: The engine, its threads and Python objects, and the unused ends of huge pages: 7 to 12 MiB were
#: measured with 1 to 32 requests. In addition, bytes per vocabulary entry: the list is read once.
ENGINE_BYTES = 10 * 2**20
ENGINE_WORD_BYTES = 36
#: A tokenizer's bytes per vocabulary entry: 17 MiB for 49,152 entries, 49 MiB for 262,144.
TOKENIZER_WORD_BYTES = 160
TOKENIZER_BYTES = 8 * 2**20
#: What llguidance takes per vocabulary entry. While it reads the vocabulary: 25 MiB for 49,152
#: entries, 151 MiB for 262,144. 330 to 400 bytes stay; compiled structures take the rest.
STRUCTURE_WORD_BYTES = 620
#: See sdk/memory/weights.py.
_READ_BYTES = 8 * 2**20
_DRAFT_BYTES, _DRAFT_REQUESTS = 16 * 2**20, 8
#: Replicas that hand prompts over: this many at a time, and for each of them what is read between
#: two steps at most.
HAND_OVERS = 2
HAND_OVER_READ_BYTES = 8 * 2**20
_RING_BYTES = 8 * 2**20


@dataclass(frozen=True, slots=True)
class WeightBytes:
    """Bytes of a model's weights.

    ``total``: as the kernels hold them. ``loading``: the peak of a load; ``early`` is the part of a
    load before the matrices of the blocks. ``read``: what one token reads. ``movable``: what can be
    offloaded (everything except embedding and head); of that, ``window`` is in memory at a time
    during a step, and ``packing`` while a matrix is packed. ``layers``: the bytes of each layer if
    only whole layers can be offloaded (GPU). ``moving``: the experts of one layer, if they can move
    between ranks: those that arrive are in memory before the others leave. ``experts``: those of
    all layers, if the model has some.
    """

    total: int
    loading: int
    read: int
    movable: int = 0
    window: int = 0
    packing: int = 0
    early: int = 0
    layers: tuple[int, ...] = ()
    moving: int = 0
    experts: ExpertBytes | None = None


@dataclass(frozen=True, slots=True)
class MemoryDemand:
    """What a plan is computed from: weights, model and limits, in bytes unless stated otherwise.

    ``weights`` exclude the ``offloaded`` bytes; ``layers_away`` is the number of offloaded layers
    (GPU). ``page_bytes``: one page of the KV cache, all layers and ranks. ``activation_bytes``: one
    value that a kernel passes to the next. ``captured_tokens``: tokens of the largest step that a
    GPU records, or 0. ``scratch``: what a GPU's kernels need in a step. ``draft_tokens``: the most
    that a step verifies, of all requests; ``drafter_bytes``: what finding them takes;
    ``drafting_weights``: the part of ``weights`` that drafts, of ``drafting_model``, which may run
    prompts too. ``feature_bytes``: hidden states of one token for a head that drafts.
    ``adapter_bytes``: all low-rank adapters together. ``ranks``: of a tensor-parallel model;
    ``stages``: of a pipeline, with ``ranks`` ranks each. The weights and pages are those of all.
    ``on_cards``: each has a GPU. ``whole_experts``: these ranks have whole experts. ``lockstep``:
    engines that share the experts (models/experts/lockstep.py). ``hand_over_bytes``: for hand-overs
    between replicas. ``num_pages``: as many as a step needs, if pages are those of one step (an
    encoder). ``windows``: for each window group of the cache the window and the bytes of a frame,
    which ``page_bytes`` does not include. ``slot_bytes``: the recurrent states of one sequence;
    ``rounded_bytes``: a snapshot of them in 16 bits, 0: in all bits. ``row_drafts``: the most draft
    tokens of one request. ``experts``: if not all are in memory. ``images``: what reading images
    takes.
    """

    weights: WeightBytes
    model: ModelConfig
    page_bytes: int
    page_size: int
    kv_dtype: str
    max_num_seqs: int
    max_num_batched_tokens: int
    activation_bytes: int = 4
    has_tokenizer: bool = True
    offloaded: int = 0
    layers_away: int = 0
    captured_tokens: int = 0
    scratch: Scratch | None = None
    #: Steps with embeddings run operator by operator, next to a recorded step with its own memory.
    steps_with_embeds: bool = False
    draft_tokens: int = 0
    drafter_bytes: int = 0
    drafting_weights: int = 0
    drafting_model: ModelConfig | None = None
    drafting_prompts: bool = False
    feature_bytes: int = 0
    adapter_bytes: int = 0
    ranks: int = 1
    stages: int = 1
    on_cards: bool = False
    whole_experts: bool = False
    lockstep: int = 1
    hand_over_bytes: int = 0
    num_pages: int | None = None
    windows: tuple[WindowGroup, ...] = ()
    slot_bytes: int = 0
    rounded_bytes: int = 0
    row_drafts: int = 0
    experts: ExpertShare | None = None
    images: ImageMemory | None = None

    @property
    def slots_of_request(self) -> int:
        """States that change: one, one for each draft, and one that snapshots in 16 bits are
        written through."""
        return 1 + self.row_drafts + bool(self.rounded_bytes)

    @property
    def snapshot_bytes(self) -> int:
        """Of one snapshot of states."""
        return self.rounded_bytes or self.slot_bytes

    @property
    def tokenizer(self) -> int:
        if not self.has_tokenizer:
            return 0
        return TOKENIZER_BYTES + TOKENIZER_WORD_BYTES * self.model.vocab_size


def hand_over_ring(page_bytes: int) -> int:
    """The memory between two replicas for one hand-over. Two groups fit, each of a page at least,
    or of a layer's state (sdk/cluster/transfer/shared_memory.py).
    """
    return max(_RING_BYTES, 2 * page_bytes)


def hand_over_bytes(
    page_bytes: int,
    page_size: int,
    windows: Sequence[WindowGroup] = (),
    state_bytes: int = 0,
    largest_state: int = 0,
) -> int:
    """What a replica takes for hand-overs: 2 * (8 MiB + 8 MiB) = 32 MiB, or with pages of more than
    4 MiB what these need. The sender has what it read and the rings; the receiver reads rows of
    pages where they lie in the same rings. Frames and states of a request are whole on both sides,
    at the receiver in their parts too. ``state_bytes``: of a snapshot, which is what travels;
    ``largest_state``: of the layer on one rank that has most of it.
    """
    rest = state_bytes + sum(
        pages_in_window(group.window, 1, page_size) * group.frame_bytes for group in windows
    )
    read = max(HAND_OVER_READ_BYTES, page_bytes, 2 * rest)
    return HAND_OVERS * (read + hand_over_ring(max(page_bytes, largest_state)))


def draft_tokens(vocab_size: int, most: int, requests: int) -> int:
    """The most draft tokens of a step: ``most`` for each of eight requests, or as many as have 16
    MiB of logits. More do not pay off on a CPU: a step of 64 takes ten times as long as one of 1.
    """
    fitting = max(_DRAFT_BYTES // (4 * vocab_size), most)
    return min(fitting, most * min(requests, _DRAFT_REQUESTS))


def workspace_bytes(demand: MemoryDemand, seqs: int, tokens: int) -> int:
    """The largest step's workspace: activations of its tokens, logits of its requests and drafts.

    A token has about six rows of hidden and three of intermediate size alive at once (residual,
    norm, q/k/v, attention, output; gate, up, product), and for each of its experts gate, up,
    product and output. Other mixers than an attention of one size have more
    (sdk/memory/mixers.py). The residual and what is added to it are always float32. In addition
    there are some rows of logits of scored prompt tokens, or copies for logits processors. Every
    rank has the hidden states and the logits as a whole, and a part of what is between them.
    """
    model = demand.model
    rows = min(seqs + demand.draft_tokens, tokens)
    logits = rows * model.vocab_size * 4 * demand.ranks
    if demand.ranks > 1:
        logits += rows * model.vocab_size * 4  # each rank's part, before they are gathered
        logits += _exchanged_bytes(demand, rows, tokens)
    if demand.lockstep > 1:
        logits += 2 * 4 * demand.lockstep * tokens * lockstep_floats(demand.model)
    engine = ENGINE_BYTES + ENGINE_WORD_BYTES * model.vocab_size + demand.drafter_bytes
    engine += demand.weights.window if demand.offloaded else 0
    engine += demand.weights.moving + demand.hand_over_bytes
    if demand.drafting_model is not None:  # its steps have buffers of their own
        own = max(tokens, 2 * seqs) if demand.drafting_prompts else seqs
        engine += own * _token_bytes(demand.drafting_model, demand) + 4 * seqs * model.vocab_size
    if demand.feature_bytes:
        engine += (tokens + waiting_rows(seqs)) * demand.feature_bytes
    steps = 2 if demand.steps_with_embeds else 1
    activations = demand.stages * tokens * _token_bytes(demand.model, demand)
    engine += _link_bytes(demand, tokens)
    return engine + steps * (activations + logits) + SCORED_BYTES


def _exchanged_bytes(demand: MemoryDemand, rows: int, tokens: int) -> int:
    """The memory that the ranks share: two areas each, for the largest sum or gather of a step.

    On GPUs each rank has the parts of all, before it adds them or puts them side by side.
    """
    part = -(-demand.model.vocab_size // demand.ranks)
    each = 1
    if demand.whole_experts and demand.model.experts is not None:
        each = demand.model.experts.per_token  # a rank may have all rows of a step
    stream = each * tokens * demand.model.hidden_size
    areas = (demand.stages - 1) * stream + max(stream, rows * part)
    copies = demand.ranks if demand.on_cards else 2
    return copies * demand.ranks * 4 * areas


def lockstep_floats(model: ModelConfig) -> int:
    """The most numbers that engines in lockstep exchange for a token: the rows of its experts."""
    assert model.experts is not None
    return max(model.experts.per_token * model.hidden_size, model.experts.count)


def _link_bytes(demand: MemoryDemand, tokens: int) -> int:
    """The memory between the stages. A link has slots for the tensors of as many steps as there are
    stages, rounded up to a power of two."""
    sent = demand.stages * sent_per_step(demand.model.model_type)
    slots = 1 << (sent - 1).bit_length()
    links = (demand.stages - 1) * demand.ranks
    return links * slots * 4 * tokens * demand.model.hidden_size


def _token_bytes(model: ModelConfig, demand: MemoryDemand) -> int:
    """Of all ranks together."""
    mlp, mixers = 3 * model.intermediate_size, mixer_width(model)
    # A recorded step of a CPU reuses memory for tensors of the same size alone.
    wide = max(mlp, mixers) if demand.on_cards else mlp + mixers
    short = 4 * demand.ranks * model.hidden_size + wide
    if model.experts is not None:
        split, whole = 3 * model.experts.width, demand.ranks * model.hidden_size
        if demand.whole_experts:
            split *= demand.ranks  # each has room for all rows
        rows = model.experts.per_token * (split + whole)
        if model.experts.shared_width:
            rows += 3 * model.experts.shared_width + 2 * whole  # the result is float32
        if demand.lockstep > 1:  # of all engines, with what enters the experts
            rows = demand.lockstep * (rows + model.hidden_size + model.experts.count)
        short += rows
    return 2 * demand.ranks * model.hidden_size * 4 + short * demand.activation_bytes


def scratch_bytes(demand: MemoryDemand, seqs: int, tokens: int, context: int) -> int:
    """What a GPU's kernels need in the largest step, plus the largest recorded step, because graphs
    have a separate memory pool. Each rank has as much: the largest buffers have one size for all
    matrices."""
    if demand.scratch is None:
        return 0
    drawn = min(seqs + demand.draft_tokens, tokens)
    rows = min(max(drawn, scored_rows(demand.model.vocab_size)), tokens)
    asked = demand.scratch.nbytes(tokens, rows, context) + demand.scratch.kept(drawn)
    captured = min(demand.captured_tokens, tokens)
    if captured:
        asked += demand.scratch.nbytes(max(captured, min(seqs, tokens)), min(seqs, tokens), context)
    return asked * demand.ranks * demand.stages


def graph_bytes(demand: MemoryDemand, seqs: int, tokens: int) -> int:
    """What the recorded steps of a GPU hold in addition to the workspace of steps that are not
    recorded.

    One pool holds the activations of the largest step, and logits. Outside of it are the hidden
    states and logits of decode steps, and for the other steps hidden states and the queries and
    result of one attention. With several ranks all of this is at each of them, except that they
    divide the attention, and one more buffer is for what they exchange.
    """
    captured = min(demand.captured_tokens, tokens)
    if not captured:
        return 0
    rows = min(seqs, tokens)
    largest = max(captured, rows) * _token_bytes(demand.model, demand)
    hidden, vocab = demand.model.hidden_size, demand.model.vocab_size
    attention = 2 * captured * hidden * demand.activation_bytes
    ranks = demand.ranks * demand.stages
    results = rows * (hidden + 2 * vocab) + captured * hidden
    exchanged = captured * hidden if ranks > 1 else 0
    return largest * demand.stages + 4 * ranks * (results + exchanged) + attention * demand.stages


def frames_of_request(demand: MemoryDemand, pages: int) -> list[int]:
    """By window group: the most frames of a decoding request of so many pages."""
    tokens = 2 + demand.row_drafts  # a page and its frames may be given before it is needed
    return [
        min(pages_in_window(group.window, tokens, demand.page_size), pages)
        for group in demand.windows
    ]


def cache_of_request(demand: MemoryDemand, pages: int, step_tokens: int) -> int:
    """The bytes of the KV cache that a request of so many pages needs at least, whose prompt runs
    in steps of ``step_tokens``."""
    step = -(-step_tokens // demand.page_size)
    frames = [min(count + step, pages) for count in frames_of_request(demand, pages)]
    sizes = zip(frames, demand.windows, strict=True)
    nbytes = pages * demand.page_bytes + sum(n * group.frame_bytes for n, group in sizes)
    # it may start from a snapshot, which is read while it has slots of its own
    return nbytes + demand.slots_of_request * demand.slot_bytes + demand.snapshot_bytes


#: ``"auto"`` makes room for a request of this many tokens, unless ``max_model_len`` is given.
_CONTEXT = 4096


@dataclass(frozen=True, slots=True)
class MemoryLimits:
    """The limits of a plan, in bytes and tokens."""

    budget: int
    kv_budget: int | None
    max_model_len: int | None


def with_offload(demand: MemoryDemand, config: EngineConfig, limits: MemoryLimits) -> MemoryDemand:
    """The demand without the weights that ``config`` offloads."""
    asked = config.disk_offload or config.cpu_offload
    if asked == 0:
        return demand
    assert not isinstance(asked, str) or asked == "auto"  # EngineConfig has parsed it
    nbytes = _excess_bytes(demand, limits) if isinstance(asked, str) else asked
    weights, count = demand.weights, 0
    nbytes = min(nbytes, weights.movable)
    if nbytes == 0:
        return demand
    if weights.layers:
        count, nbytes = _whole_layers(weights.layers, nbytes)
    late = max(weights.loading - nbytes + weights.packing, weights.early)
    kept = replace(weights, total=weights.total - nbytes, loading=late)
    return replace(demand, weights=kept, offloaded=nbytes, layers_away=count)


def _whole_layers(layers: tuple[int, ...], nbytes: int) -> tuple[int, int]:
    """The smallest number of layers at the end with at least ``nbytes``, and their bytes."""
    count = total = 0
    while total < nbytes and count < len(layers):
        count += 1
        total += layers[-count]
    return count, total


def with_experts(
    demand: MemoryDemand, config: EngineConfig, limits: MemoryLimits, threads: int
) -> MemoryDemand:
    """The demand if experts that have no room are read from the cache of weights."""
    experts, model = demand.weights.experts, demand.model
    if not config.weight_cache or experts is None or why_all_stay(config, model):
        return demand
    over = _missing_bytes(demand, limits, demand.weights.total)
    if over <= 0:
        return demand
    assert model.experts is not None
    least, nbytes = least_bytes(experts, model.experts.per_token, threads)
    resident = max(experts.total - over, nbytes)
    if resident >= experts.total:
        return demand
    share = ExpertShare(
        experts.total, resident, least, experts.read, sum(experts.matrices.values()) // 2
    )
    weights = _without_most_experts(demand.weights, share, experts)
    return replace(demand, weights=weights, experts=share)


def _without_most_experts(
    weights: WeightBytes, share: ExpertShare, experts: ExpertBytes
) -> WeightBytes:
    """The weights in memory. The first load packs experts layer by layer: some are being packed
    while the ones before are being written, in memory that those of other sizes do not use again.
    """
    others = weights.total - share.total
    reading = _READ_BYTES + 2 * weights.packing  # what a load has of the file, unpacked
    return replace(
        weights,
        total=others + share.resident,
        loading=max(weights.early, others + reading + experts.stacks + ENGINE_BYTES),
    )


def _excess_bytes(demand: MemoryDemand, limits: MemoryLimits) -> int:
    """Bytes that must be offloaded so that a request of full length fits."""
    over = _missing_bytes(demand, limits, max(demand.weights.total, demand.weights.loading))
    return over + max(demand.weights.window, demand.weights.packing) if over > 0 else 0


def _missing_bytes(demand: MemoryDemand, limits: MemoryLimits, loading: int) -> int:
    """By how much a request of full length does not fit; ``loading``: the peak of a load."""
    context = limits.max_model_len or min(demand.model.max_position, _CONTEXT)
    tokens = min(demand.max_num_batched_tokens, demand.max_num_seqs * context)
    pages = cache_of_request(demand, -(-context // demand.page_size), tokens)
    scratch = workspace_bytes(demand, demand.max_num_seqs, tokens)
    scratch += graph_bytes(demand, demand.max_num_seqs, tokens)
    scratch += scratch_bytes(demand, demand.max_num_seqs, tokens, context)
    serving = demand.weights.total + scratch + max(pages, limits.kv_budget or 0)
    return max(serving, loading) + demand.tokenizer - limits.budget
