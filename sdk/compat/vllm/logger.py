"""Loggers of programs that ask for them."""

import logging


def init_logger(name: str) -> logging.Logger:
    """The logger of this name. Its handlers are the program's."""
    return logging.getLogger(name)
