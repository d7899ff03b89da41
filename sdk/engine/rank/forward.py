"""Forward passes of the model over a step's inputs, one for each way to run a step."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

from sdk.engine.rank.inputs import StepInputs
from sdk.engine.rank.kv_cache import KVCache
from sdk.kernels.graph import Cut, Exchange, Graph
from sdk.kernels.lazy_torch import Tensor, torch
from sdk.kernels.operators.batch import AttentionBatch
from sdk.kernels.operators.ops import Ops
from sdk.kernels.packed_shapes import PackedShapes
from sdk.models.decoder import CausalLM, Decoder
from sdk.models.experts.lockstep import Lockstep
from sdk.models.parallel import Mesh
from sdk.sampling.extra_rows import scored_rows

#: Makes a context whose value takes ``(done, total)`` kernels.
Compiling = Callable[[], AbstractContextManager[Callable[[int, int], None]]]


def powers_of_two(most: int) -> list[int]:
    """Those below ``most``, and ``most``: kernels have tiles of such sizes."""
    return [*(1 << bit for bit in range(most.bit_length()) if 1 << bit < most), most]


class ForwardPasses:
    """The forward passes of one rank."""

    #: The engines with which this one runs its steps.
    lockstep: Lockstep | None = None

    def __init__(
        self, model: CausalLM, kv: KVCache, inputs: StepInputs, ops: Ops, mesh: Mesh
    ) -> None:
        self._model = model
        self._kv = kv
        self._inputs = inputs
        self.ops = ops
        self._mesh = mesh
        self._shapes: PackedShapes | None = None
        #: Seconds spent in native calls so far.
        self.native_seconds = 0.0

    def run_empty(self) -> None:
        """Compute the experts of this engine for the tokens of those in lockstep with it."""
        assert self.lockstep is not None
        self.ops.adapter_slots = self._inputs.adapters[:0]
        with torch.inference_mode():
            self.lockstep.run_empty(self.ops, self._model.config.hidden_size)

    def hidden(
        self,
        batch: AttentionBatch,
        embedded: Sequence[tuple[int, Tensor]] = (),
        out: Tensor | None = None,
    ) -> Tensor:
        """Hidden states of the first tokens in the inputs, in ``out`` if given.

        ``embedded``: embeddings in place of token ids, each with its first token. Such a step runs
        operator by operator.
        """
        self.ops.find_places(batch)
        self.ops.adapter_slots = self._inputs.adapters[: batch.num_tokens]
        inputs = self._inputs.token_ids[: batch.num_tokens]
        if embedded and self._mesh.is_first:
            inputs = self._model.embed(inputs)
            for first, rows in embedded:
                inputs[first : first + len(rows)] = rows
        layers: Any = self._kv.layers
        if isinstance(self._model, Decoder):
            return self._model(inputs, batch, layers, out)
        found = self._model(inputs, batch, layers)
        return found if out is None else out.copy_(found)

    @property
    def alone(self) -> bool:
        """Whether this rank has the whole model."""
        return self._mesh.size == self._mesh.stages == 1

    @property
    def samples(self) -> bool:
        """Whether this rank draws tokens."""
        return self._mesh.samples

    @property
    def streams(self) -> Sequence[Tensor]:
        """``Decoder.streams`` of the last pass."""
        return self._model.streams if isinstance(self._model, Decoder) else ()

    def logits(self, hidden: Tensor, outputs: int) -> Tensor:
        """Logits of the first ``outputs`` output rows; draws tokens with the inputs' draws. None in
        a stage or a model without a head."""
        if not outputs or not self._mesh.is_last or not self._model.config.causal:
            return hidden[:0]
        logits = self._head(hidden, outputs)
        if self._mesh.samples:
            self.ops.sampling.sample_into(logits, self._inputs.sampling)
        return logits

    def _head(self, hidden: Tensor, outputs: int, out: Tensor | None = None) -> Tensor:
        """Logits of the first output rows, in ``out`` if given."""
        self.ops.adapter_slots = self._inputs.output_adapters[:outputs]
        rows = self.ops.select_rows(hidden, self._inputs.output_rows[:outputs])
        if isinstance(self._model, Decoder):
            return self._model.logits(rows, out)
        found = self._model.logits(rows)
        return found if out is None else out.copy_(found)

    def logits_in_parts(self, hidden: Tensor, adapter: int = -1) -> Iterator[Tensor]:
        """Yield logits of rows of one adapter, in parts. Each part is valid until the next."""
        rows = scored_rows(self._model.config.vocab_size)
        for begin in range(0, len(hidden), rows):
            part = hidden[begin : begin + rows]
            slots = None
            if adapter >= 0:
                slots = torch.full((len(part),), adapter, dtype=torch.int32, device=part.device)
            with torch.inference_mode():
                self.ops.adapter_slots = slots
                logits = self._model.logits(part)
            yield logits
            del logits  # free it before the next part

    def record(self) -> Graph[tuple[Tensor, Tensor]]:
        """Record a step of the largest size; smaller steps use its first rows.

        :raises CaptureError: the step cannot be recorded.
        """
        inputs = self._inputs
        tokens, outputs = len(inputs.token_ids), len(inputs.output_rows)
        requests = inputs.attention_batch.num_requests

        def forward() -> tuple[Tensor, Tensor]:
            hidden = self.hidden(inputs.attention_batch)
            return hidden, self.logits(hidden, outputs)

        with torch.inference_mode():
            return self.ops.recording.capture(
                forward, tokens=tokens, outputs=outputs, requests=requests
            )

    def compile_and_warm_up(self, compiling: Compiling | None) -> None:
        """:meth:`warm_up`; if kernels can be compiled in threads, all of them are before."""
        shown = nullcontext() if compiling is None else compiling()
        with shown as report, self.ops.context.only_compiling(report) as only_compiles:
            if only_compiles:
                self.warm_up()
                if self._inputs.finds_shared:  # otherwise its graph would compile it
                    rows = min(2, self._inputs.attention_batch.num_requests)
                    with torch.inference_mode():
                        self.hidden(self._inputs.decode_batch(rows, shared=True))
        self.warm_up()

    def warm_up(self) -> None:
        """Run steps without requests of every size that has kernels of its own, so that nothing is
        compiled later. All ranks call it together."""
        inputs = self._inputs
        most, outputs = len(inputs.token_ids), len(inputs.output_rows)
        longest = inputs.attention_batch.max_context_len
        inputs.clear()
        samples = self._mesh.samples and self._model.config.causal
        steps = [(tokens, longest) for tokens in powers_of_two(most)]
        steps += [(min(most, 2), context) for context in powers_of_two(longest)]
        with torch.inference_mode():
            for tokens, context in steps:
                hidden = self.hidden(inputs.empty_batch(tokens, context))
                logits = self.logits(hidden, 0)
                if self._mesh.is_last and self._model.config.causal:
                    logits = self._head(hidden, min(tokens, outputs))
                if samples:
                    self.draw(logits, shaped=False)
        if samples:
            self.ops.sampling.warm_up(logits)

    def decode(self, size: int, shared: bool, hidden: Tensor, logits: Tensor) -> Tensor:
        """A decode step of ``size`` rows, which writes hidden states and logits: the result of
        ``SamplingOps.sample_rows`` with these logits unchanged."""
        with torch.inference_mode():
            self.hidden(self._inputs.decode_batch(size, shared), out=hidden)
            return self.draw(self._head(hidden, size, logits), shaped=False)

    def new_results(self, rows: int) -> tuple[Tensor, Tensor]:
        """Memory for hidden states and logits, uninitialized."""
        config = self._model.config
        return self.ops.empty(rows, config.output_size), self.ops.empty(rows, config.vocab_size)

    def pack_shapes(self, rows: int) -> tuple[bool, list[int]]:
        """Send the shapes of the first ``rows`` output rows to the device.

        Returns whether there are any, and the rows whose shapes did not fit.
        """
        buffers = self._inputs.sampling
        if not buffers.shaped(rows):
            return False, []
        if self._shapes is None:
            most, vocab = len(self._inputs.output_rows), self._model.config.vocab_size
            self._shapes = PackedShapes.with_room(self.ops.device, most, vocab)
        return True, self._shapes.pack(buffers, rows)

    def sample(self, hidden: Tensor, outputs: int, shaped: bool) -> tuple[Tensor, Tensor]:
        """Logits of the first output rows and ``SamplingOps.sample_rows`` of them, without waiting.

        ``shaped``: they change by the shapes that :meth:`pack_shapes` sent last.
        """
        with torch.inference_mode():
            logits = self._head(hidden, outputs)
            return logits, self.draw(logits, shaped)

    def draw(self, logits: Tensor, shaped: bool) -> Tensor:
        """``SamplingOps.sample_rows`` of the first output rows' logits: see :meth:`sample`."""
        draws, shapes = self._inputs.draws[: len(logits)], self._shapes if shaped else None
        with torch.inference_mode():
            return self.ops.sampling.sample_rows(logits, draws, shapes)

    def no_graphs_reason(self) -> str | None:
        """Why a GPU cannot record whole steps. None: it can."""
        if not self._model.config.causal:
            return "an encoder decodes no tokens"
        if isinstance(self._model, Decoder) and self._model.streamed:
            return "a head that drafts reads the inputs of several layers"
        return None

    def no_pieces_reason(self) -> str | None:
        """Why steps cannot be recorded in pieces between attention operators. None: they can."""
        if self.ops.context.offloaded:
            return "offloaded weights are copied while attention runs"
        if not isinstance(self._model, Decoder):
            return "transformers' own code runs between attention operators"
        return self.no_graphs_reason()

    def pieces(self, size: int, cut: Cut, exchange: Exchange) -> Tensor:
        """Hidden states of ``size`` tokens, for :class:`~sdk.kernels.sized_graphs.PieceGraphs`."""
        with torch.inference_mode(), self.ops.recording.in_pieces(cut, exchange):
            return self.hidden(self._inputs.piece_batch(size))
