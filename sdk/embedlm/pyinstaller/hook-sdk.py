"""All modules of sdk, the data files, and the native library.

Modules are imported by names made at run time. Triton reads the source of its kernels; nothing
else needs sources, which are 9 MB.
"""

from embedlm.pyinstaller import files, modules

hiddenimports = modules()
binaries = files(libraries=True)
datas = files(libraries=False)
module_collection_mode = {"sdk": "pyz", "sdk.kernels.gpu": "pyz+py"}
