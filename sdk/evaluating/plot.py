"""The frontier as a picture: bytes to the right, loss upwards, speed as colour."""

from __future__ import annotations

from collections.abc import Sequence
from importlib.util import find_spec
from os import PathLike
from typing import Any, NamedTuple

from sdk.errors import RequestError

#: Where a logarithm has no place for 0: no scheme of the tables comes near it.
_FLOOR = 1e-5


class Placed(NamedTuple):
    """One model in the picture: bytes of weights, keys and values; nats; tokens per second."""

    label: str
    num_bytes: int
    kld: float
    speed: float


def check_matplotlib(option: str) -> None:
    """:raises RequestError: when it is not installed; better before a long measurement."""
    if find_spec("matplotlib") is None:
        raise RequestError(f"{option}: matplotlib is not installed: pip install 'embedlm[bench]'")


def frontier(models: Sequence[Placed]) -> list[Placed]:
    """Those that no other is both smaller than and closer to the reference, from small to large."""
    best: list[Placed] = []
    for one in sorted(models, key=lambda one: (one.num_bytes, one.kld)):
        if not best or one.kld < best[-1].kld:
            best.append(one)
    return best


def draw(axes: Any, models: Sequence[Placed], title: str) -> Any:
    """Onto ``axes`` of matplotlib; returns the dots, for a colour bar."""
    line = frontier(models)
    axes.step(*_places(line), where="post", color="0.6", linewidth=1, zorder=1)
    dots = axes.scatter(*_places(models), c=[one.speed for one in models], s=36, zorder=2)
    for one, x, y in zip(models, *_places(models), strict=True):
        weight = "bold" if one in line else "normal"
        axes.annotate(
            one.label, (x, y), xytext=(5, 4), textcoords="offset points", fontsize=7, weight=weight
        )
    axes.set(yscale="log", xlabel="weights, keys and values, MB", title=title)
    axes.set_ylabel("KL divergence from the reference, nats")
    axes.grid(alpha=0.3)
    axes.margins(0.12)
    return dots


def write_plot(path: str | PathLike[str], models: Sequence[Placed], title: str) -> None:
    """One picture of one reference's models, in the format that the name's end says."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 5), layout="constrained")
    dots = draw(figure.add_subplot(), models, title)
    figure.colorbar(dots, label="tokens per second, one stream")
    figure.savefig(path, dpi=120)


def _places(models: Sequence[Placed]) -> tuple[list[float], list[float]]:
    return [one.num_bytes / 1e6 for one in models], [max(one.kld, _FLOOR) for one in models]
