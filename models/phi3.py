"""Phi-3 and Phi-3.5: Llama whose files hold q/k/v and gate/up joined; longrope, partial rotation.

Abdin et al., "Phi-3 Technical Report" (2024). :meth:`sdk.models.layers.Source.columns` takes the
joined matrices as they are, and :mod:`sdk.models.rope` decides between long and short factors.
"""

from __future__ import annotations

from sdk.models import llama


class Model(llama.Model):
    """A :class:`sdk.models.decoder.CausalLM`."""
