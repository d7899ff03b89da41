"""Without hf_xet, 11 MB, the library downloads over HTTP."""

excludedimports = ["hf_xet"]
