"""doctor"""
from __future__ import annotations
import argparse

def add_arguments(parser: argparse.ArgumentParser) -> None: ...

def run(args: argparse.Namespace) -> int:
    return 0
