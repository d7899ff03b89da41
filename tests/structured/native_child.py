"""Compiles structures that it reads as lines of JSON, and follows each for some bytes.

One line of output for each: a crash of the grammar library ends this process and no other.
"""

from __future__ import annotations

import json
import random
import resource
import sys
import threading

#: Enough for what is accepted, and far less than a machine has; CPU seconds for all inputs.
MEMORY, SECONDS = 3 * 2**30, 900


def _follow(structure: dict[str, object]) -> str:
    import numpy as np

    from sdk.api.errors import RequestError
    from sdk.structured.library import GrammarError
    from tests.structured.byte_matcher import matcher_of

    try:
        matcher = matcher_of(**structure)
        mask = np.zeros(9, np.uint32)
        draw = random.Random(0)
        for _ in range(40):
            if matcher.stopped:
                break
            matcher.mask(mask)
            allowed = [one for one in range(256) if int(mask[one >> 5]) >> (one & 31) & 1]
            if not allowed:
                break
            matcher.consume((draw.choice(allowed),))
    except (RequestError, GrammarError) as error:
        return f"refused: {error}"[:300]
    return "accepted"


def main() -> None:
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY, MEMORY))
    resource.setrlimit(resource.RLIMIT_CPU, (SECONDS, SECONDS))
    for line in sys.stdin:
        print(json.dumps(_follow(json.loads(line))), flush=True)


if __name__ == "__main__":
    if len(sys.argv) > 1:  # on a thread with a stack of this many bytes
        threading.stack_size(int(sys.argv[1]))
        thread = threading.Thread(target=main)
        thread.start()
        thread.join()
    else:
        main()
