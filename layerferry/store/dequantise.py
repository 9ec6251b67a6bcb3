"""Quantised weights of published checkpoints as plain ones: fp8 with scales, and MXFP4.

What for: masters are fp32, so a model published in fp8 (DeepSeek-V3, Qwen3-FP8) or MXFP4 (GPT-OSS) is dequantised as it is
read, tensor by tensor. Two layers: pure functions over tensors, and ``DequantisedFolder``, which shows a checkpoint folder as
if it held plain weights under plain names.

fp8: ``value * scale`` in fp32, one rounding (exact where the scale is a power of two). MXFP4: bf16 holds every
product of an e2m1 value and a power of two, so bf16 is exact. Left out: formats that need calibration to be useful again
(GPTQ, AWQ, bitsandbytes, NVFP4): they are refused by name. Checked by ``tests/store/test_dequantise.py`` against closed formulas.
"""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor

from layerferry.errors import CheckpointError
from layerferry.store.safetensors_file import TensorFolder

FP8_DTYPES = (torch.float8_e4m3fn, torch.float8_e5m2)
E2M1_VALUES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0)
"""The sixteen values of a 4-bit float with two exponent bits and one mantissa bit, by code."""

SCALE_BIAS = 127
"""An MXFP4 scale byte s means 2 ** (s - 127)."""

_BLOCKS, _SCALES = "_blocks", "_scales"
_SCALE_SUFFIXES = ("_scale_inv", "_scale")
_ACTIVATION_SUFFIXES = (".input_scale", ".activation_scale", ".k_scale", ".v_scale", ".kv_scale", ".output_scale")
_REFUSED = {
    ".qweight": "GPTQ or AWQ",
    ".weight_packed": "a packed compressed-tensors format",
    ".absmax": "bitsandbytes",
    ".quant_map": "bitsandbytes",
    ".SCB": "bitsandbytes int8",
    ".weight_scale_2": "NVFP4",
}


def dequantise_fp8(weight: Tensor, scale: Tensor, block: tuple[int, int] = (128, 128)) -> Tensor:
    """``weight`` [..., R, C] fp8 times its ``scale``: fp32 [..., R, C].

    The scale is one number, one per row ([R], [R, 1]), or one per ``block`` ([..., ceil(R / rows), ceil(C / columns)]).
    ValueError where it is none of these.
    """
    values = weight.float()
    factors = scale.float()
    if factors.numel() == 1:
        return values.mul_(factors.reshape(()))
    if values.ndim < 2:
        raise ValueError(f"scale of shape {tuple(scale.shape)} for a weight of shape {tuple(weight.shape)}")
    *lead, rows, columns = values.shape
    if tuple(factors.shape) in ((*lead, rows), (*lead, rows, 1)):
        return values.mul_(factors.reshape(*lead, rows, 1))
    grid = (*lead, -(-rows // block[0]), -(-columns // block[1]))
    if tuple(factors.shape) != grid:
        found = f"scale of shape {tuple(scale.shape)}"
        raise ValueError(f"{found}; {block[0]} x {block[1]} blocks of a weight of shape {tuple(weight.shape)} ask for {grid}")
    # One row of blocks at a time: the factors of all elements at once would be as large as the weight.
    for row_block in range(grid[-2]):
        part = values[..., row_block * block[0] : (row_block + 1) * block[0], :]
        part.mul_(factors[..., row_block, None, :].repeat_interleave(block[1], dim=-1)[..., :columns])
    return values


def dequantise_mxfp4(blocks: Tensor, scales: Tensor) -> Tensor:
    """``blocks`` uint8 [E, R, G, 16] (two values a byte, low half first), ``scales`` uint8 [E, R, G]: bf16 [E, 32 G, R].

    GPT-OSS packs each row along its inputs and computes ``x @ w``, so the result is transposed. One expert at a time.
    """
    experts, rows, groups, num_bytes = blocks.shape
    if tuple(scales.shape) != (experts, rows, groups):
        raise ValueError(f"scales of shape {tuple(scales.shape)} for blocks of shape {tuple(blocks.shape)}")
    values = torch.tensor(E2M1_VALUES, dtype=torch.float32)
    byte = torch.arange(256)
    pairs = torch.stack((values[byte & 0xF], values[byte >> 4]), dim=-1)  # [256, 2]
    made = torch.empty(experts, groups * num_bytes * 2, rows, dtype=torch.bfloat16)
    for expert in range(experts):
        factors = torch.exp2(scales[expert].float() - SCALE_BIAS)  # [R, G]
        plain = pairs[blocks[expert].int()].flatten(-2).mul_(factors[..., None])  # [R, G, 32]
        made[expert].copy_(plain.view(rows, -1).T)
    return made


class DequantisedFolder:
    """A ``TensorFolder`` in which quantised weights appear as plain ones; folders without any pass through unchanged.

    ``block`` is the config's ``quantization_config.weight_block_size``. Scales of activations are not weights and are left out.
    """

    def __init__(self, folder: TensorFolder, *, block: tuple[int, int] = (128, 128)) -> None:
        self._folder = folder
        self._block = block
        present = set(folder.names)
        self._scale_of: dict[str, str] = {}
        self._blocks_of: dict[str, str] = {}
        hidden: set[str] = set()
        for name in folder.names:
            self._refuse_unknown(name)
            if self._is_mxfp4(name, present):
                plain = name.removesuffix(_BLOCKS)
                self._blocks_of[plain] = name
                hidden |= {name, plain + _SCALES}
            elif folder.dtype(name) in FP8_DTYPES:
                self._scale_of[name] = self._find_scale(name, present)
                hidden.add(self._scale_of[name])
        if self._scale_of:
            hidden |= {name for name in present if name.endswith(_ACTIVATION_SUFFIXES)}
        self._names = tuple(name for name in (*folder.names, *self._blocks_of) if name not in hidden)

    @property
    def path(self) -> Path:
        return self._folder.path

    @property
    def names(self) -> tuple[str, ...]:
        return self._names

    @property
    def is_quantised(self) -> bool:
        return bool(self._scale_of or self._blocks_of)

    def where(self, name: str) -> Path:
        return self._folder.where(self._blocks_of.get(name, name))

    def shape(self, name: str) -> tuple[int, ...]:
        blocks = self._blocks_of.get(name)
        if blocks is None:
            return self._folder.shape(name)
        experts, rows, groups, num_bytes = self._folder.shape(blocks)
        return experts, groups * num_bytes * 2, rows

    def dtype(self, name: str) -> torch.dtype:
        if name in self._blocks_of:
            return torch.bfloat16
        return torch.float32 if name in self._scale_of else self._folder.dtype(name)

    def read(self, name: str) -> Tensor:
        """The plain value: fp32 of fp8, bf16 of MXFP4, anything else as it is."""
        try:
            if name in self._scale_of:
                return dequantise_fp8(self._folder.read(name), self._folder.read(self._scale_of[name]), self._block)
            if name in self._blocks_of:
                return dequantise_mxfp4(self._folder.read(self._blocks_of[name]), self._folder.read(name + _SCALES))
        except ValueError as error:
            raise CheckpointError(f"{self.where(name)}: {name}: {error}.") from error
        return self._folder.read(name)

    def _is_mxfp4(self, name: str, present: set[str]) -> bool:
        scales = name.removesuffix(_BLOCKS) + _SCALES
        if not name.endswith(_BLOCKS) or scales not in present:
            return False
        shapes = self._folder.shape(name), self._folder.shape(scales)
        if (
            {self._folder.dtype(name), self._folder.dtype(scales)} != {torch.uint8}
            or len(shapes[0]) != 4
            or shapes[1] != shapes[0][:3]
        ):
            raise CheckpointError(f"{self.where(name)}: {name} {shapes[0]} with scales {shapes[1]} is no MXFP4 weight.")
        return True

    def _find_scale(self, name: str, present: set[str]) -> str:
        for suffix in _SCALE_SUFFIXES:
            if name + suffix in present:
                return name + suffix
        raise CheckpointError(f"{self.where(name)}: {name} is {self._folder.dtype(name)} but has no scale ({name}_scale_inv).")

    def _refuse_unknown(self, name: str) -> None:
        for suffix, kind in _REFUSED.items():
            if name.endswith(suffix):
                raise CheckpointError(
                    f"{self._folder.where(name)}: {name} is quantised ({kind}), which loses what full training needs. "
                    "Use the model's bf16, fp8 or MXFP4 weights."
                )
