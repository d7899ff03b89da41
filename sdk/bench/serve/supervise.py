"""Runs a server, and ends it with the process that started this script, however that ends.

A script, run by path: the server's command line is its arguments, and its standard input is a pipe
from the process that starts it. The script is the leader of a process group; when the pipe closes,
it kills the group.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading


def main() -> int:
    try:
        server = subprocess.Popen(sys.argv[1:], stdin=subprocess.DEVNULL)
    except OSError as error:
        print(error)
        return 127

    def watch() -> None:
        os.read(0, 1)
        os.killpg(0, signal.SIGKILL)

    threading.Thread(target=watch, daemon=True).start()
    while True:
        try:
            return server.wait()
        except KeyboardInterrupt:  # for the server, which has it too
            continue


if __name__ == "__main__":
    code = main()
    sys.stdout.flush()
    os._exit(code if code >= 0 else 128 - code)
