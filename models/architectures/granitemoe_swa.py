"""Granite with sliding windows, sinks and experts: the layers of granite_swa and granitemoeshared.

transformers' modeling_granitemoe_swa.py.
"""

from __future__ import annotations

from sdk.models.architecture import Architecture
from sdk.models.architectures.granite_swa import ARCHITECTURE as DENSE
from sdk.models.architectures.granitemoeshared import ARCHITECTURE as EXPERTS

ARCHITECTURE = Architecture(
    "granitemoe_swa",
    layer=EXPERTS.layer._replace(sinks=True),
    config=DENSE.config._replace(
        keys=(*DENSE.config.keys, *EXPERTS.config.keys),
        expert_width=EXPERTS.config.expert_width,
        defaults={**EXPERTS.config.defaults, **DENSE.config.defaults},
    ),
    tensors=EXPERTS.tensors,
)
