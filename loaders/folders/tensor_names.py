"""Our names of the tensors of a folder whose model does not use a Llama's.

:class:`~sdk.models.architecture.TensorRules` has the names that differ: those of whole paths, and
those of the parts of a layer. A folder may hold the body of a model without its head; its names
then lack the first part of those of the whole model (``transformer.``).
"""

from __future__ import annotations

import re
from collections.abc import Mapping

_LAYERS = "model.layers"


class TensorNames:
    """The names of one model; ``names``: those of its ``TensorRules``."""

    def __init__(self, names: Mapping[str, str | tuple[str, ...]]) -> None:
        every = {ours: (x,) if isinstance(x, str) else x for ours, x in names.items()}
        layers = every.pop(_LAYERS, (_LAYERS,))
        self._layers = layers[0]
        self._bodies = tuple(one.partition(".")[0] + "." for one in layers)
        self._body = self._bodies[0]
        numbered = "|".join({re.escape(one.partition(".")[2]) for one in layers})
        self._layer = re.compile(rf"(?:{numbered})\.(\d{{1,4}})\.(.+)")
        whole = ("model.", "lm_head")
        self._paths = {ours: x for ours, x in every.items() if ours.startswith(whole)}
        self._parts = {ours: x for ours, x in every.items() if ours not in self._paths}

    def ours(self, name: str) -> str:
        """Our name of the file's ``name``, whatever its ending (``.weight``, ``.qweight``); a name
        that is not in the rules stays."""
        body = next((one for one in self._bodies if name.startswith(one)), "")
        inside = name.removeprefix(body)
        whole = ((ours, theirs) for ours, each in self._paths.items() for theirs in each)
        for ours, theirs in whole:
            if (rest := _rest(inside, theirs.removeprefix(self._body))) is not None:
                return ours + rest
        found = self._layer.fullmatch(inside)
        if found is None:
            return name
        own = found[2]
        spellings = ((ours, theirs) for ours, each in self._parts.items() for theirs in each)
        for ours, theirs in spellings:
            if (rest := _rest(own, theirs)) is not None:
                own = ours + rest
                break
        return f"{_LAYERS}.{found[1]}.{own}"

    def theirs(self, name: str) -> str:
        """The file's name of a tensor or module of a whole model that we call ``name``; of
        several spellings the first."""
        for ours, each in self._paths.items():
            if (rest := _rest(name, ours)) is not None:
                return each[0] + rest
        prefix, _, own = name.partition(f"{_LAYERS}.")
        if prefix or not own:
            return name
        number, _, own = own.partition(".")
        for ours, each in self._parts.items():
            if (rest := _rest(own, ours)) is not None:
                own = each[0] + rest
                break
        return f"{self._layers}.{number}.{own}"


def _rest(name: str, path: str) -> str | None:
    """What follows ``path`` in ``name``; ``None``: the name is another one."""
    if name == path:
        return ""
    return name.removeprefix(path) if name.startswith(f"{path}.") else None
