"""The keys of a checkpoint's preprocessor, read with the defaults of transformers' classes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from sdk.quant.errors import CheckpointError, UnsupportedError

#: Operations that every processor here does, or that change nothing of one image: values are not
#: looked at.
_FREE = ("do_convert_rgb", "do_pad", "do_sample_frames")
#: Pillow's filters, 0 to 5.
_FILTERS = 6


class Settings:
    """``preprocessor_config.json``, or ``image_processor`` of ``processor_config.json``, with the
    model's ``config.json``. A key that is missing or null has its default."""

    def __init__(self, config: Mapping[str, Any], processor: Mapping[str, Any]) -> None:
        nested = processor.get("image_processor")
        self.config = config
        self.keys = {**processor, **(nested if isinstance(nested, Mapping) else {})}
        self.vision: Mapping[str, Any] = config.get("vision_config") or {}
        self._operations = {"do_resize", "do_rescale", "do_normalize"}
        if self.flag("do_resize", True) is False:
            raise self.unsupported("do_resize", False, "true")

    @property
    def kind(self) -> str:
        """The class of transformers' image processor without ``Fast`` and ``Pil``; "" if no key
        names it."""
        name = (
            self.keys.get("image_processor_type") or self.keys.get("feature_extractor_type") or ""
        )
        name = str(name).removesuffix("Pil").removesuffix("Fast")
        return name.replace("FeatureExtractor", "ImageProcessor")

    def number(self, key: str, default: int, *, of: Mapping[str, Any] | None = None) -> int:
        """A whole number above 0."""
        value = (self.keys if of is None else of).get(key)
        if value is None:
            return default
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise self.invalid(key, value, "a whole number above 0")
        return value

    def fraction(self, key: str, default: float) -> float:
        value = self.keys.get(key)
        if value is None:
            return default
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not value > 0:
            raise self.invalid(key, value, "a number above 0")
        return float(value)

    def flag(self, key: str, default: bool) -> bool:
        self._operations.add(key)
        value = self.keys.get(key)
        if value is None:
            return default
        if not isinstance(value, bool):
            raise self.invalid(key, value, "true or false")
        return value

    def text(self, key: str, default: str) -> str:
        value = self.keys.get(key)
        if value is None:
            return default
        # Tokens may be written out with their properties.
        value = value.get("content") if isinstance(value, Mapping) else value
        if not isinstance(value, str) or not value:
            raise self.invalid(key, value, "a text")
        return value

    def resample(self, default: int) -> int:
        """The filter of a resize, as Pillow numbers them."""
        value = self.keys.get("resample")
        if value is None:
            return default
        if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value < _FILTERS:
            raise self.invalid("resample", value, f"one of Pillow's filters, 0 to {_FILTERS - 1}")
        return value

    def sides(self, key: str, default: Mapping[str, int] | int) -> dict[str, int]:
        """A size: sides or edges by name. One number is both sides."""
        value = self.keys.get(key)
        value = default if value is None else value
        if isinstance(value, int) and not isinstance(value, bool):
            value = {"height": value, "width": value}
        known = ("height", "width", "shortest_edge", "longest_edge", "min_pixels", "max_pixels")
        if not isinstance(value, Mapping) or not value or set(value) - set(known):
            raise self.invalid(key, value, f"some of the keys {', '.join(known)}")
        found = {name: side for name, side in value.items() if side is not None}
        for name, side in found.items():
            if isinstance(side, bool) or not isinstance(side, int) or side < 1:
                raise self.invalid(f"{key}.{name}", side, "a whole number above 0")
        return found

    def square(self, key: str, default: Mapping[str, int] | int) -> int:
        """A size with equal sides, or one edge."""
        sides = self.sides(key, default)
        if len(set(sides.values())) != 1:
            raise self.unsupported(key, sides, "equal sides")
        return next(iter(sides.values()))

    def patches_joined(
        self, patch: int, joined: int, key: str, of_tower: str | None = None
    ) -> tuple[int, int]:
        """The sides of a patch in pixels and of a token in patches, with these defaults. ``key``,
        ``of_tower``: the names of the latter here and in the tower's config, which decides.

        :raises CheckpointError: the processor's settings differ from the tower's.
        """
        patch = self.patch(self.number("patch_size", patch))
        joined = self.number(of_tower or key, self.number(key, joined), of=self.vision)
        for name, tower in (("patch_size", patch), (key, joined)):
            if (named := self.number(name, tower)) != tower:
                raise self.invalid(name, named, f"the tower's, {tower}")
        return patch, joined

    def patch(self, default: int) -> int:
        """The patch size of the tower."""
        value = self.vision.get("patch_size")
        if isinstance(value, (list, tuple)) and len(set(value)) == 1:
            value = value[0]
        return self.number("patch_size", default, of={"patch_size": value})

    def done(self) -> None:
        """Call it last: refuses operations that nobody asked for.

        :raises UnsupportedError: an operation is switched on that is not one of this processor.
        """
        for key, value in self.keys.items():
            if key.startswith("do_") and value is True and key not in self._operations.union(_FREE):
                raise self.unsupported(key, value, "false")

    def invalid(self, key: str, value: object, expected: str) -> CheckpointError:
        return CheckpointError(
            f"the checkpoint's image processor has {key}={value!r}, expected {expected}: mend its "
            "preprocessor_config.json"
        )

    def unsupported(self, key: str, value: object, expected: str) -> UnsupportedError:
        return UnsupportedError(
            f"the checkpoint's image processor has {key}={value!r}, which is not supported, "
            f"expected {expected}: load it for text only (limit_mm_per_prompt={{'image': 0}})"
        )


__all__ = ["Settings"]
