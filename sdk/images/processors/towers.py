"""What a processor must know of the tower: how many tokens a tile becomes."""

from __future__ import annotations

from sdk.images.processors.settings import Settings


def tokens_per_side(settings: Settings, side: int, patch: int, merge: int = 1) -> int:
    """Rows, and columns, of tokens of a square tile, of which ``merge`` x ``merge`` patches become
    one token.

    :raises CheckpointError: the tile is not what the tower reads.
    """
    tower = settings.vision.get("image_size")
    tower = tower[0] if isinstance(tower, (list, tuple)) and tower else tower
    if tower is not None and tower != side:
        raise settings.invalid("size", side, f"the tower's vision_config.image_size, {tower}")
    # A rest at the edge is not read, as by the tower's convolution.
    tokens, rest = divmod(side // patch, merge)
    if rest or not tokens:
        raise settings.invalid("size", side, f"a multiple of {patch} x {merge} pixels")
    return tokens


__all__ = ["tokens_per_side"]
