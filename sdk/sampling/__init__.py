"""From logits to tokens: what a request forbids, prefers and draws, whatever its neighbours.

``resolved`` (pure Python) turns words into token ids once per request, ``uniform`` (pure Python)
holds the random numbers, ``state`` what the sampler remembers of a request, ``processors`` the
changes to one row of logits, ``logprobs`` the scores. The choice itself is in ``candidates`` for
CPUs, one row at a time with the arithmetic of ``rows``, and in ``truncation`` for accelerators,
all rows together. ``sampler`` is the whole.
"""
