"""Plots models: bytes on the x axis, loss on the y axis, speed as color, and the frontier."""

from __future__ import annotations

from collections.abc import Sequence
from os import PathLike
from typing import Any, NamedTuple

from sdk.api.errors import RequestError
from sdk.kernels.packages import install, is_installed

#: The lowest loss on the logarithmic axis, which has no 0: all schemes are well above.
_FLOOR = 1e-5
#: Possible positions of a label: right or left of its dot, and how many points higher.
_SIDES = [(side, up) for up in (5, -5, 13, -13, 21, -21) for side in (1, -1)]


class Placed(NamedTuple):
    """One model in the plot: bytes of weights, keys and values; nats; tokens per second."""

    label: str
    num_bytes: int
    kld: float
    speed: float | None = None


def check_matplotlib(option: str) -> None:
    """Call before a long measurement. :raises RequestError: it is not installed."""
    if not is_installed("matplotlib"):
        raise RequestError(f"{option}: matplotlib is not installed: {install('matplotlib')}")


def frontier(models: Sequence[Placed]) -> list[Placed]:
    """The models that no other one beats in both size and loss, from small to large."""
    best: list[Placed] = []
    for one in sorted(models, key=lambda one: (one.num_bytes, one.kld)):
        if not best or one.kld < best[-1].kld:
            best.append(one)
    return best


def draw(axes: Any, models: Sequence[Placed], title: str) -> None:
    """Draw on matplotlib's ``axes``, with a color bar if all speeds are known."""
    line = frontier(models)
    axes.step(*_places(line), where="post", color="0.6", linewidth=1, zorder=1)
    speeds = [one.speed for one in models if one.speed is not None]
    colour = {"c": speeds} if len(speeds) == len(models) else {"color": "C0"}
    dots = axes.scatter(*_places(models), s=36, zorder=2, **colour)
    if "c" in colour:
        axes.figure.colorbar(dots, label="tokens per second, one request")
    axes.set(yscale="log", xlabel="weights, keys and values, MB", title=title)
    axes.set_ylabel("KL divergence from the reference, nats")
    axes.grid(alpha=0.3)
    axes.margins(0.14, 0.08)
    _label(axes, models, line)


def _label(axes: Any, models: Sequence[Placed], line: Sequence[Placed]) -> None:
    """Put names next to the dots where there is room; the frontier's first, in bold."""
    taken: list[tuple[float, float, float]] = []
    inside = [x * 72 / axes.figure.dpi for x in axes.transAxes.transform([(0, 0), (1, 1)])[:, 0]]
    for one in sorted(models, key=lambda one: one not in line):
        [x], [y] = _places([one])
        right, top = axes.transData.transform((x, y)) * 72 / axes.figure.dpi  # in points
        width = 4.2 * len(one.label)
        for side, up in _SIDES:
            start = right + 6 if side > 0 else right - 6 - width
            if (
                inside[0] < start
                and start + width < inside[1]
                and all(
                    abs(top + up - other) > 8 or start + width < begin or start > end
                    for begin, end, other in taken
                )
            ):
                break
        taken.append((start, start + width, top + up))
        axes.annotate(
            one.label,
            (x, y),
            xytext=(6 * side, up - 3),
            textcoords="offset points",
            ha="left" if side > 0 else "right",
            fontsize=7,
            weight="bold" if one in line else "normal",
        )


def write_plot(path: str | PathLike[str], models: Sequence[Placed], title: str) -> None:
    """Write a plot of models with the same reference, in the format of the path's suffix."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 5), layout="constrained")
    draw(figure.add_subplot(), models, title)
    figure.savefig(path, dpi=120)


def _places(models: Sequence[Placed]) -> tuple[list[float], list[float]]:
    return [one.num_bytes / 1e6 for one in models], [max(one.kld, _FLOOR) for one in models]
