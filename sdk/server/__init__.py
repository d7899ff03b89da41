"""The HTTP interface of :class:`sdk.LLM`: an ASGI application, and ``embedlm serve``.

``import sdk`` does not import this package. It needs the extra ``server`` (fastapi, uvicorn).
"""
