"""Every module of ours, its source, its tables, and the native library.

Modules are imported by names made at run time, and four of the folders have no ``__init__.py``, so
PyInstaller's own functions find half of them. Triton reads the source of its kernels.
"""

from pathlib import Path

from PyInstaller.utils.hooks import collect_data_files, collect_dynamic_libs, get_package_paths

_base, _package = map(Path, get_package_paths("sdk"))

hiddenimports = sorted(
    ".".join(path.relative_to(_base).with_suffix("").parts).removesuffix(".__init__")
    for path in _package.rglob("*.py")
)
binaries = collect_dynamic_libs("sdk", search_patterns=["*.so"])
datas = collect_data_files("sdk")
module_collection_mode = {"sdk": "pyz+py"}
