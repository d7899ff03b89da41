"""FalconMamba: Mamba-1 with norms of what its time steps, b and c come from.

Zuo et al., "Falcon Mamba" (2024), arXiv 2410.05355; transformers' modeling_falcon_mamba.py. GGUF
files have one eps for all norms, which llama.cpp takes for these, too.
"""

from __future__ import annotations

from typing import Any

from sdk.models.architecture import Architecture, GgufKeys
from sdk.models.architectures.mamba import CONFIG, GGUF, LAYER, TENSORS, read_gguf, spec_of
from sdk.models.configs.fields import Fields
from sdk.models.mixers.mamba import MambaSpec


def _recurrent(fields: Fields) -> MambaSpec:
    return spec_of(fields, norms="plain", eps=fields.positive("mixer_rms_eps", default=1e-6))


def _has_norms(keys: GgufKeys) -> bool:
    return keys.flag("ssm.dt_b_c_rms", False)


def _read_gguf(config: dict[str, Any], keys: GgufKeys) -> None:
    read_gguf(config, keys)
    config["mixer_rms_eps"] = config["layer_norm_epsilon"]


ARCHITECTURE = Architecture(
    "falcon_mamba",
    layer=LAYER,
    config=CONFIG._replace(
        keys=(*CONFIG.keys, "mixer_rms_eps"),
        ignored=(*CONFIG.ignored, "use_falcon_mambapy"),
        recurrent=_recurrent,
    ),
    tensors=TENSORS,
    more_gguf=(GGUF._replace(matches=_has_norms, read=_read_gguf),),
)
