"""What a processor must know of the tower: the sides of tiles and how many tokens they become."""

from __future__ import annotations

from collections.abc import Mapping

from sdk.images.processors.settings import Settings


def tile_side(settings: Settings, default: Mapping[str, int] | int, key: str = "size") -> int:
    """The side of square tiles. If the checkpoint does not say it, it is what the tower reads.

    :raises CheckpointError: the tower reads other tiles.
    """
    tower = settings.vision.get("image_size")
    tower = tower[0] if isinstance(tower, (list, tuple)) and tower else tower
    if tower is None:
        return settings.square(key, default)
    tower = settings.number("image_size", 1, of={"image_size": tower})
    side = settings.square(key, tower)
    if side != tower:
        raise settings.invalid(key, side, f"the tower's vision_config.image_size, {tower}")
    return side


def check_all_patches(settings: Settings, strategy: str) -> None:
    """Refuses towers of which a class token, too, would become a token, or a patch would not.

    ``strategy``: the default of ``vision_feature_select_strategy``, which drops the first result of
    the tower ("default") or not ("full").

    :raises UnsupportedError: the strategy does not fit the tower.
    """
    value = settings.config.get("vision_feature_select_strategy") or strategy
    tower = settings.vision.get("model_type")
    fits = strategy if tower is None else "default" if tower == "clip_vision_model" else "full"
    if value != fits:
        raise settings.unsupported("vision_feature_select_strategy", value, repr(fits))


def tokens_per_side(settings: Settings, side: int, patch: int, merge: int = 1) -> int:
    """Rows, and columns, of tokens of a square tile, of which ``merge`` x ``merge`` patches become
    one token.

    :raises CheckpointError: the tile is not a multiple of that.
    """
    # A rest at the edge is not read, as by the tower's convolution.
    tokens, rest = divmod(side // patch, merge)
    if rest or not tokens:
        raise settings.invalid("size", side, f"a multiple of {patch} x {merge} pixels")
    return tokens


__all__ = ["tile_side", "tokens_per_side"]
