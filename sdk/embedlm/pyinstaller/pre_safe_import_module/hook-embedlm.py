"""``embedlm.cli`` is ``sdk.cli``, and so on: there are no files of these names to find."""

from typing import Any

from embedlm.pyinstaller import modules


def pre_safe_import_module(api: Any) -> None:
    for name in modules():
        if name != "sdk":
            api.add_alias_module(name, "embedlm" + name.removeprefix("sdk"))
