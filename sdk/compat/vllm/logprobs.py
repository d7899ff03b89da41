"""Log-probabilities of tokens."""

from sdk.api.logprobs import Logprob as Logprob
