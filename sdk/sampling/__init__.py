"""From logits to tokens: what a request forbids, prefers and draws, whatever its neighbours.

``resolved`` (pure Python) turns words into token ids once per request, ``uniform`` (pure Python)
holds the random numbers, ``state`` what the sampler remembers of a request, ``processors`` the
changes to one row of logits, ``logprobs`` the scores with the arithmetic of ``rows``. ``sampler``
is the whole; the choice itself is ``Ops.argmax`` or ``Ops.sample``, all rows of a step in one call.
"""
