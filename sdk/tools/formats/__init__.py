"""One module per way of writing tool calls; see :mod:`sdk.tools.format`."""
