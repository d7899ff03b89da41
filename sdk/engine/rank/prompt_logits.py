"""The logits of a prompt that runs on one rank without a scheduler: for evaluations."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from sdk.api.params import SamplingParams
from sdk.engine.pages.tiered_pool import moves_to_lowest_tier
from sdk.engine.plan import RequestStart, SequenceSpec, StepRow
from sdk.engine.rank.forward import ForwardPasses
from sdk.engine.rank.inputs import StepInputs
from sdk.engine.rank.kv_cache import KVCache
from sdk.engine.rank.request import RankRequest
from sdk.engine.rank.step_batch import StepBatch
from sdk.engine.rank.strategy import Strategy
from sdk.kernels.lazy_torch import Tensor
from sdk.kernels.ops import Ops


def logits_of_prompt(
    strategy: Strategy,
    passes: ForwardPasses,
    inputs: StepInputs,
    kv: KVCache,
    ops: Ops,
    token_ids: Sequence[int],
) -> Iterator[Tensor]:
    """See :meth:`sdk.engine.rank.runner.ModelRunner.prompt_logits`."""
    pages = -(-len(token_ids) // inputs.attention_batch.page_size)
    page_ids, count = tuple(range(1, pages + 1)), len(token_ids)
    spec = SequenceSpec("prompt", SamplingParams())
    start = RequestStart(spec, tuple(token_ids), count, 0, page_ids)
    frames, slots = kv.rings(pages), (1,) if kv.counts[-1] else ()
    start = start._replace(frames=frames, state_slots=slots)
    request = RankRequest(start, len(frames))
    step = min(len(inputs.token_ids), kv.most_tokens)
    for begin in range(0, len(token_ids), step):
        moves = moves_to_lowest_tier(request.pages, begin, kv.spec, kv.keep)
        kv.copy(moves, ops)
        inputs.apply_moves([request], moves)
        count = min(len(token_ids) - begin, step)
        batch = StepBatch([StepRow("prompt", count)], [request], [0])
        (launched,) = strategy.launch(batch)
        request.ran(count, 0)
        yield from passes.logits_in_parts(launched.hidden[:count])
    inputs.forget()
