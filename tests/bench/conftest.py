from tests.cli.conftest import _own_cache  # noqa: F401
