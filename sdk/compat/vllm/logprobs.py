"""Log-probabilities of tokens."""

from sdk.logprobs import Logprob as Logprob
