"""What a plan is made from, and the arithmetic of a step's workspace."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from sdk.kernels.scratch import Scratch

#: The engine, its threads and Python objects, and the ends of huge pages that weights do not fill:
#: 7 to 12 MiB were measured with 1 to 32 requests; and for each word of the vocabulary, whose list
#: passes through memory once.
ENGINE_BYTES = 9 * 2**20
ENGINE_WORD_BYTES = 36
#: What a tokenizer takes for each word: 17 MiB for 49,152 of them, 49 for 262,144.
TOKENIZER_WORD_BYTES = 160
TOKENIZER_BYTES = 8 * 2**20
#: Logits beside those that a step draws from take at most this much, see :func:`scored_rows`.
SCORED_BYTES = 8 * 2**20
_SCORED_ROWS = 128


@dataclass(frozen=True, slots=True)
class Demand:
    """What the plan is made from. Sizes in bytes; ``page_bytes`` over all layers and ranks.

    ``weights`` as kernels hold them, ``loading`` what a load has in memory at its peak, ``read``
    what one token reads of the weights. ``weights`` are without those ``offloaded``; ``movable``
    can be, ``window`` is what of them is in memory at a time, ``packing`` while they are packed,
    ``early`` what a load has in memory before it comes to them, ``layers`` the bytes of each where
    they go as a whole (of a GPU). ``experts_per_token`` and ``expert_width`` are those of a mixture
    of experts; ``captured_tokens`` those of the largest step that a GPU records, or 0;
    ``activation_bytes``: of a number that one kernel hands to the next; ``scratch``: what a GPU's
    kernels ask for in a step.
    """

    weights: int
    page_bytes: int
    page_size: int
    kv_dtype: str
    model_context: int
    hidden_size: int
    intermediate_size: int
    vocab_size: int
    max_num_seqs: int
    max_num_batched_tokens: int
    experts_per_token: int = 0
    expert_width: int = 0
    activation_bytes: int = 4
    loading: int = 0
    read: int = 0
    has_tokenizer: bool = True
    offloaded: int = 0
    layers_away: int = 0
    movable: int = 0
    window: int = 0
    packing: int = 0
    early: int = 0
    layers: tuple[int, ...] = ()
    captured_tokens: int = 0
    scratch: Scratch | None = None

    @property
    def tokenizer(self) -> int:
        if not self.has_tokenizer:
            return 0
        return TOKENIZER_BYTES + TOKENIZER_WORD_BYTES * self.vocab_size


def scored_rows(vocab_size: int) -> int:
    """Rows of logits beside those that a step draws from: of a prompt or a benchmark being scored,
    or copies for logits processors."""
    return min(_SCORED_ROWS, max(SCORED_BYTES // (4 * vocab_size), 1))


def workspace_bytes(demand: Demand, seqs: int, tokens: int) -> int:
    """The largest step's scratch: activations of its tokens and the logits of its requests.

    A token has about six rows of hidden and three of intermediate size alive at once (residual,
    norm, q/k/v, attention, output; gate, up, product), and for each of its experts gate, up,
    product and output. The residual and what is added to it are float32 whatever the others are.
    Beside the logits stand those of the prompt's tokens that are scored, or copies for logits
    processors, some rows at a time.
    """
    expert = 3 * demand.expert_width + demand.hidden_size
    short = 4 * demand.hidden_size + 3 * demand.intermediate_size
    short += demand.experts_per_token * expert
    row = 2 * demand.hidden_size * 4 + short * demand.activation_bytes
    logits = min(seqs, tokens) * demand.vocab_size * 4
    engine = ENGINE_BYTES + ENGINE_WORD_BYTES * demand.vocab_size
    engine += demand.window if demand.offloaded else 0
    return engine + tokens * row + logits + SCORED_BYTES


def scratch_bytes(demand: Demand, seqs: int, tokens: int, context: int) -> int:
    """What a GPU's kernels ask for in the largest step, and what graphs keep for those of the
    largest recorded one: they have a pool of their own."""
    if demand.scratch is None:
        return 0
    rows = min(max(seqs, scored_rows(demand.vocab_size)), tokens)
    asked = demand.scratch.nbytes(tokens, rows, context) + demand.scratch.kept(min(seqs, tokens))
    captured = min(demand.captured_tokens, tokens)
    if captured:
        asked += demand.scratch.nbytes(max(captured, min(seqs, tokens)), min(seqs, tokens), context)
    return asked


def graph_bytes(demand: Demand, seqs: int, tokens: int) -> int:
    """What the recorded steps of a GPU hold beside the workspace of those that are not.

    One pool has the activations of the largest, and logits; outside of it lie hidden states and
    logits of decode steps, and of the others hidden states and an attention's queries and result.
    """
    captured = min(demand.captured_tokens, tokens)
    if not captured:
        return 0
    rows = min(seqs, tokens)
    largest = workspace_bytes(demand, 0, max(captured, rows)) - workspace_bytes(demand, 0, 0)
    hidden, vocab = demand.hidden_size, demand.vocab_size
    attention = 2 * captured * hidden * demand.activation_bytes
    return largest + 4 * (rows * (hidden + 2 * vocab) + captured * hidden) + attention
