"""OpenAI's API in both directions: request bodies to our parameters, our outputs to its responses.

The client in this process (``sdk.compat.openai``) and the server (``sdk.serving``) share it. It
needs no third-party package.
"""
