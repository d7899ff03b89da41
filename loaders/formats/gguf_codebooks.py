"""GGUF's IQ1, IQ2 and IQ3 types: codebooks of groups of values, unpacked to a code per value.

An index of 8 to 11 bits selects four or eight values from a codebook; signs, or a common shift, are
stored separately. A kernel cannot look that up as fast as it multiplies, so each value gets its own
code when the file is loaded. Nothing is rounded: a type has at most 16 different values per scale,
so codes index a table (`sdk.kernels.weights.layouts.Affine`), and both levels of scales are kept.

============  ======  =========  ==================================  =====================
type          in file in memory  values (times d * (2 s + 1))        s for
============  ======  =========  ==================================  =====================
iq1_s         1.56    3.31       -9 -7 -1 1 7 9 / 8                  32 values
iq1_m         1.75    3.56       the same                            16 values
iq2_xxs       2.06    3.31       +-(8 25 43) / 8                     32 values
iq2_xs        2.31    3.56       the same                            16 values
iq2_s         2.56    3.56       the same                            16 values
iq3_xxs       3.06    4.31       +-(4 12 20 28 36 44 52 62) / 4      32 values
iq3_s         3.44    4.31       +-(1 3 5 7 9 11 13 15)              32 values
============  ======  =========  ==================================  =====================

(Bits per weight; float16 would take 16 and round.) The complement of a code is the code of the
negative value, so signs are applied by an exclusive or over all codes of a group. Source:
ggml-common.h and the decoders of ggml-quants.c.
"""

from __future__ import annotations

import zlib
from base64 import b85decode
from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from sdk.kernels.lazy_torch import torch
from sdk.kernels.weights.layouts import Affine

_Bytes = NDArray[np.uint8]
_Words = NDArray[np.uint32]

#: Base, number of digits, and compressed bits that tell which numbers of this many digits are in
#: the book. An index is the rank of a number; its lowest digit stands for the first value.
_BOOKS = {
    "iq2_xxs": (
        3, 8,
        "c-nPRORB^$43oj#tB`je2YP^R=KfcCw)5@K5e=lV<VbEmf91ogR%p3E0BR^O#16P=^@J3)+t0mx___f>P^zD"
        "olEn6;is&dxI!#Zg_{KuzkVd4Mw`?l*l~*(z5~c8Qj-!-YZym34v`$TQ4<4*~)dpL;rq|+W4irx`d$&)6^vG"
        "b7UkLBrzcFbHqcf>sMFwRxr;MTG;*}m%Qlby-@@TSk)X7om@@#uKQIjUUWQ&$2&y}*gX5TV=Bc|Cuh1wL(2K"
        "n3A3Yj<N%;gblzhT7_jxp@MF=lA5st5R^Hl2J=^JV`E{Z0D^#$6R7"
    ),
    "iq2_xs": (
        3, 8,
        "c-mc2TdsvL2pkgnkBRPwCicH3cK=&BJX-bM<{ZTW!^|+oxJIi-qkD|rsuaR~iB<*?x~C4>8J0pJW<V>X*vo#"
        "SY&(-c)w(<-fCU6QVt|)*=>oJ=N8h~B3mmYKBw*Y)Ca<s*uvOak7T*la5<g=kAh?T96(5+bR(Mt@J=L5^n!u"
        "1sF+~=p=RjVCGbM+vDH*59tF!>kC`)-u3GzO}jM8X_r-*1ytubG*&a^iqGs?p-do}D8x2NWXU?%O)=7t88q0"
        "40RdJ=Ak)9T+$YBcFD31^6BC_W+mG1}iEA-T}Oj@u6-pQ1yByIl9%`W3mW#F%j~<yh(N0zSL~oH^Zy%}}tQx"
        "4=M73#xoc?jNErTmD?iDs40;(&MG>YYMNuDE=SK;cc#9vM%q_=>7msuqjC"
    ),
    "iq2_s": (
        3, 8,
        "c-n1JU5W-F3~NE(E9iYHjPDBe{#V(wI=kPpE5rQ7#3X8F%Z9aF@G^(h-0EI3Em0|W3^QwctZ7zp0a8G#rYWS"
        "&oF&YfEj@sgh^u5FBBgC>LAkBEEtarKv-X}c)kMD5E9g)N*35uFS6j&;COQ!QC2=T0oAzp}=fs8f?3xctXeG"
        "?g^dQAA!2(KVP=j1x!<Qgx@l7F)Pu!TMd$m>{ZzEray(N$AzRb24)#*U9zYZZF^+2!@EVQ9?ARiEH!J<ErE8"
        "usn4?()-BQhW*1pE<<S|Z6aT82aQO}QP4+el6zUY~*z7~Sl6pK?p!Q_DMIhH4w7?joIO9P^#Dw9CRS7mu8OB"
        "C|vDii4FoWN_zK9m?6y$}qXC*pyH_2f!)+bXep&HXz~CYasM7Fd3(JhmM~KIbkHJ7yU4;E692~{FNElHOf~F"
        "zm+TBn!W(JyjC6"
    ),
    "iq3_xxs": (
        8, 4,
        "c-l=-F%H5o3_M%0RAmZ7_lgPeigaLyA4Q!IuVCbv_?)J2Rn;aw-<^~BWtxCXwzFx0%xW)eST<YW5KL&L;j#h"
        "AAHoX-c)&}FY<X@1m|7IGsjrX>q7@bAuHrcP3L2_`6x)_>^v5;&o?@Fdagv_Uo9H*utGOGEJ93R6P|L2rgx{"
        "U}Y-UnrS3sKYtPIbF!WdDS7|dsT<9UQCqzhJe8+4kK5km%XvHjm=J(sMgqk-e3v^zjTJayVggoDWMJzTWE4a"
        "0T)3l-9P!ydlNePrBA?Xny*@kmBo4W|8$?wEo20v5Uy_5"
    ),
    "iq3_s": (
        8, 4,
        "c-k#d!AiqG5PdVu!e&pqA>uXNMyUCUt<-~hDT4SrX{pfmmf{D9Rs{Q#&TgE;z`Qr}-rMBob#A|%IbF{W(Id*"
        "&Lkwq!%0~0(%@Ao{OU0lD_x2OXCI^OquXIKLt}o^pYnG?L6&oz+9HeSVPSrN(A}t!YmF^Xmp*3Qy-5G8(e|b"
        "5Y-VC?q(AA>+32wuC)HmEXp@c1}PT|h83}iuXSwt^ePGkv?U+Lf3a_=1ov?9@{igP&9v4ypFswx3&TJZ@M2_"
        "=SuX>*z&qp%+CoXl)ge8!drA@5Agyn!FG+()?*sDei}n1QT95(J|p-wR7#Aht{0!Hx!aZfy;cl!bD4D3uqR("
        "zW`GY5;6>@R{_|3X$jRqNR^eu)^e<Ll^vCYlKPU1;QQ+o$IB(hKom+bHx0SXmXXwyZnVo8~6jd#wQ>"
    ),
    "iq1": (
        3, 8,
        "c-k#eK}(!R7=CxE;dM-9V?RN1diSfb(^(PgE$L;EU0C#DLh=VZ*|bQ>IZZw%yXlwN6ha`hG?#HO$v6$G@ldv"
        "(umMk2dT8mb2WdTox*h^v8VtnDuD#8?@Vw9Syw7v(LR2?w<}y}3b9YJG^C&5*&qs>Nl?x;NhAB!%0hRecnsm"
        "$a2YwJ@;QqccSPG~@n#@N5uBY$^gNY22s7}?HYgoxmY#Y+!Ajh1yxWA4l1OzVO1-XRyWBes^wA;LAoBq<x!%"
        "nuPhFWp9`{&R@7DG%<XIwD^Is3Q$Jf@<B<<hd(0^?jzIHG8vQn*?-$Ub(LsHW&@kYNcQ%|}dP%c;av8KJU^m"
        "WiJv*28-WD<$YEG%#}+D!ES;XeDuFD(VlG#i@A4$V;H%7rH52w&LB_pg1xSvl=L<CZ@9?{WdkSxbxSuMq|l6"
        "4F4MqT|O(RS}O@H(bLXvHn!_OntvSw2GXTKiD_6XGLxujp0!)qyF+V=7Bv?g3oFy??D1-6?{(2le%HQrc>Le"
        "(m#@Cb_P%)g$;r#{<KcsUbe#9?p_<1{H>jE?+1SCIq;Fwj@yPMjA_U90?}vdY$)D1%>fQq-z{36HBT$I&mG*"
        "v%J#A~V%aSj@pZtCEAg}V1eou`2@uUxU_YQ=)6;l3U7EjmAKr#y2F0kdO91c}@u6ikZ68>90+)KINV7E3oVy"
        "0wcNC7Qg*Gnz$6Ckekcj5w;yQl$8BcV}uIeIA*;9XR~L2uzcrHYS+2)y-rqrtcg6e{stpn$cM#il(dTBx(R&"
        "0u-;P1DmAvG}u@dX;b%ns9v~6p49X^c}lqEMlIFjzJBbrp$X4T{{D_p5YV7e^~xM<^E7<_56qcAaL=FI+lT|"
        "4v2#Y&dpW2-Egd@Fdf5G@Dheeu*|v(bMFD;1sQ1"
    ),
}  # fmt: skip
_IQ1 = (-9.0, -7.0, -1.0, 1.0, 7.0, 9.0)
_IQ2 = (8.0, 25.0, 43.0)
_IQ3_XXS = (4.0, 12.0, 20.0, 28.0, 36.0, 44.0, 52.0, 62.0)
_IQ3_S = (1.0, 3.0, 5.0, 7.0, 9.0, 11.0, 13.0, 15.0)


def codebook(name: str) -> _Bytes:
    """The digits of a book's entries: uint8 ``[entries, 4 or 8]``."""
    base, digits, packed = _BOOKS[name]
    there = np.unpackbits(
        np.frombuffer(zlib.decompress(b85decode(packed)), np.uint8), bitorder="little"
    )
    powers = base ** np.arange(digits)
    found: _Bytes = (np.flatnonzero(there)[:, None] // powers % base).astype(np.uint8)
    return found


def _joined(codes: NDArray[np.integer], bits: int) -> _Words:
    """Codes ``[..., n]`` joined to numbers ``[...]``, the first code in the lowest bits."""
    shifts = bits * np.arange(codes.shape[-1], dtype=np.uint32)
    joined: _Words = np.bitwise_or.reduce(codes.astype(np.uint32) << shifts, axis=-1)
    return joined


def _words(name: str, bits: int) -> _Words:
    """The positive codes of each entry of a book, joined to one number."""
    return _joined(codebook(name) + np.uint8(1 << (bits - 1)), bits)


def _flips(bits: int) -> _Words:
    """By eight sign bits: the mask that inverts the codes of the negative values."""
    signs = np.unpackbits(np.arange(256, dtype=np.uint8)[:, None], axis=1, bitorder="little")
    return _joined(signs * np.uint8((1 << bits) - 1), bits)


def _even_flips(bits: int) -> _Words:
    """The same by seven sign bits; the eighth makes the number of negative values even."""
    seven = np.arange(128)
    parity = np.bitwise_xor.reduce(seven[:, None] >> np.arange(7) & 1, axis=1)
    flips: _Words = _flips(bits)[seven | parity << 7]
    return flips


def _table(positive: tuple[float, ...], divisor: float, bits: int) -> torch.Tensor:
    """The table of values by code; complements are negatives, and unused codes are 0."""
    half = np.zeros(1 << (bits - 1), np.float32)
    half[: len(positive)] = positive
    return torch.from_numpy(np.concatenate((-half[::-1], half)) / np.float32(divisor))


def _nibbles(scales: _Bytes) -> _Bytes:
    """``[..., n]`` -> ``2 s + 1`` of each nibble s, ``[..., 2 n]``, low halves first."""
    both = np.stack((scales & 15, scales >> 4), axis=-1)
    return (2 * both + 1).reshape(*scales.shape[:-1], -1)


def _three_bytes(words: _Words) -> _Bytes:
    """Eight codes of 3 bits each ``[rows, blocks, n]`` -> ``[rows, bytes]``."""
    little = np.ascontiguousarray(words, "<u4").view(np.uint8).reshape(len(words), -1, 4)
    return little[:, :, :3].reshape(len(words), -1)


def _layout(
    name: str, columns: int, codes: _Bytes, scale: _Bytes, super_scale: _Bytes, table: torch.Tensor
) -> Affine:
    rows = len(codes)
    bits = codes.shape[1] * 8 // columns
    scale = scale.reshape(rows, -1)
    d = np.ascontiguousarray(super_scale).reshape(rows, -1).view(np.float16)
    return Affine(
        (rows, columns),
        bits,
        columns // scale.shape[1],
        torch.from_numpy(codes),
        torch.from_numpy(scale.astype(np.uint8, copy=False)),
        table=table,
        super_scale=torch.from_numpy(d),
        super_group=256,
        name=name,
    )


def _shorts(bytes_: _Bytes) -> NDArray[np.uint16]:
    return np.ascontiguousarray(bytes_).view("<u2")


def _seven_signs(words: _Words) -> _Words:
    """``[..., n]`` -> ``[..., n, 4]``: the four fields of 7 bits below a 4-bit scale."""
    fields: _Words = words[..., None] >> np.array([0, 7, 14, 21], np.uint32) & np.uint32(127)
    return fields


def _iq2_xxs(blocks: _Bytes, columns: int) -> Affine:
    pairs = np.ascontiguousarray(blocks[:, :, 2:]).view("<u4")  # four indices, signs and a scale
    indices = np.ascontiguousarray(pairs[:, :, 0::2]).view(np.uint8)
    words = _words("iq2_xxs", 3)[indices]
    words ^= _even_flips(3)[_seven_signs(pairs[:, :, 1::2])].reshape(words.shape)
    scale = 2 * (pairs[:, :, 1::2] >> np.uint32(28)) + 1
    return _layout(
        "iq2_xxs",
        columns,
        _three_bytes(words),
        scale.astype(np.uint8),
        blocks[:, :, :2],
        _table(_IQ2, 8, 3),
    )


def _iq2_xs(blocks: _Bytes, columns: int) -> Affine:
    both = _shorts(blocks[:, :, 2:66])  # 9 bits of index, 7 of signs
    words = _words("iq2_xs", 3)[both & np.uint16(511)]
    words ^= _even_flips(3)[both >> np.uint16(9)]
    scale = _nibbles(blocks[:, :, 66:74])
    return _layout(
        "iq2_xs", columns, _three_bytes(words), scale, blocks[:, :, :2], _table(_IQ2, 8, 3)
    )


def _iq2_s(blocks: _Bytes, columns: int) -> Affine:
    low, signs, high = blocks[:, :, 2:34], blocks[:, :, 34:66], blocks[:, :, 66:74]
    top = high[..., None] >> np.array([0, 2, 4, 6], np.uint8) & np.uint8(3)
    indices = low | top.reshape(low.shape).astype(np.uint16) << 8
    words = _words("iq2_s", 3)[indices] ^ _flips(3)[signs]
    scale = _nibbles(blocks[:, :, 74:82])
    return _layout(
        "iq2_s", columns, _three_bytes(words), scale, blocks[:, :, :2], _table(_IQ2, 8, 3)
    )


def _eights(fours: _Words) -> _Words:
    """Words of four 4-bit codes -> words of eight."""
    pairs: _Words = fours[..., 0::2] | fours[..., 1::2] << np.uint32(16)
    return pairs


def _four_bytes(words: _Words) -> _Bytes:
    return np.ascontiguousarray(words, "<u4").view(np.uint8).reshape(len(words), -1)


def _iq3_xxs(blocks: _Bytes, columns: int) -> Affine:
    rest = np.ascontiguousarray(blocks[:, :, 66:]).view("<u4")  # signs and a scale
    words = _eights(_words("iq3_xxs", 4)[blocks[:, :, 2:66]])
    words ^= _even_flips(4)[_seven_signs(rest)].reshape(words.shape)
    scale = (2 * (rest >> np.uint32(28)) + 1).astype(np.uint8)
    return _layout(
        "iq3_xxs", columns, _four_bytes(words), scale, blocks[:, :, :2], _table(_IQ3_XXS, 4, 4)
    )


def _iq3_s(blocks: _Bytes, columns: int) -> Affine:
    low, high, signs = blocks[:, :, 2:66], blocks[:, :, 66:74], blocks[:, :, 74:106]
    top = np.unpackbits(high, axis=2, bitorder="little")
    indices = low | top.astype(np.uint16) << 8
    words = _eights(_words("iq3_s", 4)[indices]) ^ _flips(4)[signs]
    scale = _nibbles(blocks[:, :, 106:110])
    return _layout(
        "iq3_s", columns, _four_bytes(words), scale, blocks[:, :, :2], _table(_IQ3_S, 1, 4)
    )


def _shifted_words() -> _Words:
    """Codes of IQ1, which adds 1/8 to an entry or subtracts it: ``[entry + 2048 * subtracted]``."""
    added = 2 * codebook("iq1") + np.uint8(2)
    return np.concatenate((_joined(added, 3), _joined(added - np.uint8(1), 3)))


def _iq1_table() -> torch.Tensor:
    return torch.tensor((0.0, *_IQ1, 0.0)) / 8


def _iq1_s(blocks: _Bytes, columns: int) -> Affine:
    low, high = blocks[:, :, 2:34], _shorts(blocks[:, :, 34:50])
    top = high[..., None] >> np.array([0, 3, 6, 9], np.uint16) & np.uint16(7)
    indices = low | top.reshape(low.shape) << 8 | np.repeat(high >> 15, 4, axis=2) << 11
    scale = (2 * (high >> np.uint16(12) & np.uint16(7)) + 1).astype(np.uint8)
    return _layout(
        "iq1_s",
        columns,
        _three_bytes(_shifted_words()[indices]),
        scale,
        blocks[:, :, :2],
        _iq1_table(),
    )


def _iq1_m(blocks: _Bytes, columns: int) -> Affine:
    low, high, packed = blocks[:, :, :32], blocks[:, :, 32:48], _shorts(blocks[:, :, 48:56])
    top = np.stack((high & 15, high >> 4), axis=-1).reshape(low.shape).astype(np.uint16)
    indices = low | (top & np.uint16(7)) << 8 | (top >> 3) << 11
    scale = packed[..., None] >> np.array([0, 3, 6, 9], np.uint16) & np.uint16(7)
    return _layout(
        "iq1_m",
        columns,
        _three_bytes(_shifted_words()[indices]),
        (2 * scale + 1).astype(np.uint8),
        iq1_m_scale(blocks),
        _iq1_table(),
    )


def iq1_m_scale(blocks: _Bytes) -> _Bytes:
    """A block's float16, stored in the top 4 bits of four words: ``[rows, blocks, 2]``."""
    parts = _shorts(blocks[:, :, 48:56]) >> np.uint16(12)
    d = np.bitwise_or.reduce(parts << np.array([0, 4, 8, 12], np.uint16), axis=2)
    halves: _Bytes = d.astype("<u2")[..., None].view(np.uint8)
    return halves


#: Blocks uint8 ``[rows, blocks, bytes]`` and columns -> layout, by the name of the type.
DECODERS: dict[str, Callable[[_Bytes, int], Affine]] = {
    "IQ1_S": _iq1_s,
    "IQ1_M": _iq1_m,
    "IQ2_XXS": _iq2_xxs,
    "IQ2_XS": _iq2_xs,
    "IQ2_S": _iq2_s,
    "IQ3_XXS": _iq3_xxs,
    "IQ3_S": _iq3_s,
}
