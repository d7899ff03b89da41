"""Turns logits into tokens. A request's result does not depend on the rest of the batch.

``resolved`` (pure Python) turns strings into token ids once per request, ``uniform`` (pure Python)
computes random numbers, ``state`` is what the sampler stores per request, ``changes`` how its
logits change before the draw (``rules``: the part that its answers share), ``logprobs`` computes
scores with the arithmetic of ``rows``. ``sampler`` combines them: ``SamplingOps.sample_into``
changes and draws all rows of a step in one call. ``processors`` handles rows that Python callbacks
change.
"""
