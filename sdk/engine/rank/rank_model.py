"""The weights of one rank, and the operators that run them."""

from __future__ import annotations

import contextlib
from dataclasses import replace
from typing import TYPE_CHECKING

from sdk.engine.rank.experts import unused_tensors
from sdk.engine.rank.forward import Compiling
from sdk.engine.rank.runner_config import RunnerConfig
from sdk.kernels.dataclass import dataclass
from sdk.kernels.lazy_torch import Tensor
from sdk.kernels.operators.ops import Ops
from sdk.models.auto import build_model
from sdk.models.classifier import Classifier, classifier_of, read_score_head
from sdk.models.classifier_heads import has_layers, with_layers
from sdk.models.decoder import CausalLM, Decoder
from sdk.models.experts.lockstep import Lockstep
from sdk.models.parallel import Mesh
from sdk.models.parts import Matrix, Tensors
from sdk.quant.checkpoint import Checkpoint

if TYPE_CHECKING:
    from sdk.engine.weight_cache.store import WeightStore
    from sdk.models.vision.tower import Tower


@dataclass(frozen=True, slots=True)
class RankModel:
    """What a rank reads from the model's files. A forked child shares its memory."""

    ops: Ops
    model: CausalLM
    #: The classes of the checkpoint, if it has any, and their matrix.
    classifier: Classifier | None
    score_head: Tensor | None
    unused_tensors: list[str]
    #: The engines with the same weights that share the experts and run their steps together.
    lockstep: Lockstep | None = None
    #: The encoder of images, on ranks that embed tokens; ``None``: the engine reads no images.
    tower: Tower | None = None
    #: Shows how many kernels of a card are compiled.
    compiling: Compiling | None = None
    #: What the cache of weights does for it; ``None``: it is not to be used.
    weight_store: WeightStore | None = None

    @classmethod
    def load(
        cls,
        config: RunnerConfig,
        mesh: Mesh,
        checkpoint: Checkpoint | None = None,
    ) -> RankModel:
        """Read the weights; the checkpoint (default: the one ``config`` names) is closed then."""
        mesh = config.mesh_of(mesh)
        with contextlib.ExitStack() as undo:
            if checkpoint is None:
                checkpoint = config.open_model()
            undo.callback(checkpoint.close)
            ops = config.open_ops(mesh)
            undo.callback(ops.close)
            store = None
            if config.expert_bytes:
                from sdk.engine.weight_cache.packing import packed_store

                store = packed_store(config, mesh, checkpoint, ops)
            elif config.weight_cache:
                from sdk.engine.weight_cache.store import weight_store

                store = weight_store(config, mesh, checkpoint, ops)
            values = {**checkpoint.config, **config.hf_overrides}
            longest, layers = config.max_model_len, config.layers_of(mesh.stage)
            with ops.entered():
                model = build_model(
                    checkpoint,
                    mesh,
                    ops,
                    max_model_len=longest,
                    config=values,
                    layers=layers,
                    shared=None if store is None or store.reason else store.tensors,
                )
                tower = None
                if config.image_rows:
                    from sdk.models.vision.tower import build_tower

                    tower = build_tower(checkpoint, mesh, ops, config=values)
            classifier = classifier_of(values)
            size, score_head = model.config.output_size, None
            if has_layers(classifier, values.get("model_type")):
                with_layers(checkpoint, classifier, values, size)  # they run where results arrive
            else:
                score_head = read_score_head(checkpoint, classifier, size)
            unused = unused_tensors(checkpoint, model)
            ops.finish_packing()
            if store is not None:
                unused = store.loaded(unused)
            undo.pop_all()
        checkpoint.close()
        return cls(ops, model, classifier, score_head, unused, tower=tower, weight_store=store)

    def share(self, config: RunnerConfig, mesh: Mesh, headers: Checkpoint) -> RankModel:
        """The same weights with operators of their own, for another engine in this process."""
        assert isinstance(self.model, Decoder)
        mesh = config.mesh_of(mesh)
        values = {**headers.config, **config.hf_overrides}
        with contextlib.ExitStack() as undo:
            ops = config.open_ops(mesh)
            undo.callback(ops.close)
            model = build_model(
                headers,
                mesh,
                ops,
                max_model_len=config.max_model_len,
                config=values,
                shared=_tensors(self.model),
            )
            tower = None
            if self.tower is not None:
                from sdk.models.vision.tower import build_tower

                tower = build_tower(
                    headers, mesh, ops, config=values, shared=_tower_tensors(self.tower)
                )
            undo.pop_all()
        return replace(self, ops=ops, model=model, tower=tower)


def _tower_tensors(tower: Tower) -> Tensors:
    found = {path: linear.matrix for path, linear in tower.linears}
    return Tensors(found, tower.vectors)


def _tensors(model: Decoder) -> Tensors:
    """What a model has pulled, by the paths under which a :class:`Source` looks for it."""
    found = {path: linear.matrix for path, linear in model.linears()}
    if model.embedding is not None:
        found["model.embed_tokens"] = Matrix(model.embedding.weight, None)
    if model.positions is not None:
        found["model.embed_positions"] = Matrix(model.positions, None)
    if model.types is not None:
        found["model.embed_types"] = Matrix(model.types, None)
    if model.inputs is not None:
        found["model.embed_tokens_per_layer"] = Matrix(model.inputs.table, None)
    return Tensors(found, model.vectors)
