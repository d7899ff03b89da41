"""From logits to tokens: what a request forbids, prefers and draws, whatever its neighbours.

``resolved`` (pure Python) turns words into token ids once per request, ``uniform`` (pure Python)
holds the random numbers, ``state`` what the sampler remembers of a request, ``changes`` how its
logits change before the draw (``rules``: what its answers share of that), ``logprobs`` the scores
with the arithmetic of ``rows``. ``sampler`` is the whole; changes and choice are
``SamplingOps.sample_into``, all rows of a step in one call. ``processors`` is for rows that Python
callbacks change.
"""
