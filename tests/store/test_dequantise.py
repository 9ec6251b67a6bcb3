"""Dequantisation against closed formulas, element by element."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from layerferry.errors import CheckpointError
from layerferry.store.dequantise import DequantisedFolder, dequantise_fp8, dequantise_mxfp4
from layerferry.store.safetensors_file import CheckpointFolder


def fp8(*shape: int, dtype: torch.dtype = torch.float8_e4m3fn) -> torch.Tensor:
    """Every finite code of the format, at random."""
    raw = torch.randint(0, 256, shape, dtype=torch.uint8)
    values = raw.view(dtype)
    return torch.where(values.float().isfinite(), raw, 0).view(dtype)


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float8_e5m2])
@pytest.mark.parametrize("lead", [(), (3,)])
@pytest.mark.parametrize(("rows", "columns"), [(256, 128), (130, 257), (1, 1), (128, 5), (7, 300)])
@pytest.mark.parametrize("scale_dtype", [torch.float32, torch.bfloat16])
def test_fp8_blocks(rows: int, columns: int, lead: tuple[int, ...], dtype: torch.dtype, scale_dtype: torch.dtype) -> None:
    weight = fp8(*lead, rows, columns, dtype=dtype)
    scale = torch.rand(*lead, -(-rows // 128), -(-columns // 128)).to(scale_dtype)
    row, column = torch.arange(rows) // 128, torch.arange(columns) // 128
    expected = weight.float() * scale.float()[..., row[:, None], column[None, :]]
    made = dequantise_fp8(weight, scale)
    assert made.dtype == torch.float32 and torch.equal(made, expected)


def test_fp8_other_block() -> None:
    weight, scale = fp8(32, 48), torch.rand(2, 6)
    expected = weight.float() * scale.repeat_interleave(16, 0).repeat_interleave(8, 1)
    assert torch.equal(dequantise_fp8(weight, scale, (16, 8)), expected)


def test_fp8_with_power_of_two_scales_is_exact() -> None:
    weight = fp8(128, 256)
    scale = torch.exp2(torch.randint(-20, 20, (1, 2)).float())
    made = dequantise_fp8(weight, scale.to(torch.float8_e8m0fnu))
    assert torch.equal(made.double(), weight.double() * scale.double().repeat_interleave(128, 1))


@pytest.mark.parametrize("shape", [(), (1,), (1, 1)])
def test_fp8_per_tensor(shape: tuple[int, ...]) -> None:
    weight = fp8(5, 6)
    assert torch.equal(dequantise_fp8(weight, torch.full(shape, 0.3)), weight.float() * torch.tensor(0.3))


@pytest.mark.parametrize("shape", [(200,), (200, 1)])
def test_fp8_per_channel(shape: tuple[int, ...]) -> None:
    weight, scale = fp8(200, 300), torch.rand(shape)
    assert torch.equal(dequantise_fp8(weight, scale), weight.float() * scale.view(200, 1))


def test_fp8_scale_of_another_shape() -> None:
    with pytest.raises(ValueError, match=r"\(3, 2\).*ask for \(2, 2\)"):
        dequantise_fp8(fp8(200, 200), torch.rand(3, 2))


def test_mxfp4_every_code_and_scale() -> None:
    """A byte is two values of sign, two exponent bits and one mantissa bit; the scale is a power of two."""
    experts, rows, groups = 2, 3, 4
    blocks = torch.randint(0, 256, (experts, rows, groups, 16), dtype=torch.uint8)
    blocks.view(-1)[:256] = torch.arange(256, dtype=torch.uint8)
    scales = torch.randint(1, 250, (experts, rows, groups), dtype=torch.uint8)
    made = dequantise_mxfp4(blocks, scales)
    assert made.dtype == torch.bfloat16 and made.shape == (experts, groups * 32, rows) and made.is_contiguous()
    for expert in range(experts):
        for row in range(rows):
            for column in range(groups * 32):
                byte = int(blocks[expert, row, column // 32, column % 32 // 2])
                code = byte >> 4 if column % 2 else byte & 15
                exponent, mantissa = code >> 1 & 3, code & 1
                magnitude = (1 + mantissa / 2) * 2.0 ** (exponent - 1) if exponent else mantissa / 2
                value = -magnitude if code & 8 else magnitude
                expected = value * 2.0 ** (int(scales[expert, row, column // 32]) - 127)
                assert float(made[expert, column, row]) == expected


def test_folder_with_fp8(tmp_path: Path) -> None:
    weight, scale = fp8(130, 140), torch.rand(2, 2)
    plain = torch.randn(4).bfloat16()
    tensors = {
        "a.weight": weight,
        "a.weight_scale_inv": scale,
        "b.weight": weight.clone(),
        "b.weight_scale": torch.tensor(0.5),
        "b.input_scale": torch.tensor(2.0),
        "norm": plain,
    }
    save_file(tensors, tmp_path / "model.safetensors")
    folder = DequantisedFolder(CheckpointFolder(tmp_path))
    assert folder.is_quantised and set(folder.names) == {"a.weight", "b.weight", "norm"}
    assert folder.dtype("a.weight") == torch.float32 and folder.shape("a.weight") == (130, 140)
    assert torch.equal(folder.read("a.weight"), dequantise_fp8(weight, scale))
    assert torch.equal(folder.read("b.weight"), weight.float() * 0.5)
    assert torch.equal(folder.read("norm"), plain)


def test_folder_with_mxfp4(tmp_path: Path) -> None:
    blocks = torch.randint(0, 256, (2, 6, 3, 16), dtype=torch.uint8)
    scales = torch.randint(120, 130, (2, 6, 3), dtype=torch.uint8)
    save_file({"e.down_proj_blocks": blocks, "e.down_proj_scales": scales}, tmp_path / "model.safetensors")
    folder = DequantisedFolder(CheckpointFolder(tmp_path))
    assert folder.names == ("e.down_proj",) and folder.where("e.down_proj").name == "model.safetensors"
    made = folder.read("e.down_proj")
    assert folder.shape("e.down_proj") == tuple(made.shape) == (2, 96, 6) and folder.dtype("e.down_proj") == made.dtype
    assert torch.equal(made, dequantise_mxfp4(blocks, scales))


def test_plain_folder_passes_through(tmp_path: Path) -> None:
    tensors = {"x_scale": torch.ones(2), "y_blocks": torch.zeros(3), "router.scale": torch.ones(1)}
    save_file(tensors, tmp_path / "model.safetensors")
    folder = DequantisedFolder(CheckpointFolder(tmp_path))
    assert set(folder.names) == set(tensors) and not folder.is_quantised


def test_malformed_mxfp4_is_refused(tmp_path: Path) -> None:
    tensors = {"e_blocks": torch.zeros(2, 6, 16, dtype=torch.uint8), "e_scales": torch.zeros(2, 6, dtype=torch.uint8)}
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(CheckpointError, match=r"e_blocks \(2, 6, 16\) with scales \(2, 6\) is no MXFP4 weight"):
        DequantisedFolder(CheckpointFolder(tmp_path))


def test_refusals(tmp_path: Path) -> None:
    save_file({"a.weight": fp8(2, 2)}, tmp_path / "model.safetensors")
    with pytest.raises(CheckpointError, match=r"a\.weight is torch\.float8_e4m3fn but has no scale"):
        DequantisedFolder(CheckpointFolder(tmp_path))
    save_file({"a.qweight": torch.zeros(2)}, tmp_path / "model.safetensors")
    with pytest.raises(CheckpointError, match=r"GPTQ or AWQ.*bf16"):
        DequantisedFolder(CheckpointFolder(tmp_path))
    save_file({"a.weight": fp8(200, 200), "a.weight_scale_inv": torch.rand(3, 2)}, tmp_path / "model.safetensors")
    folder = DequantisedFolder(CheckpointFolder(tmp_path))
    with pytest.raises(CheckpointError, match=r"model\.safetensors: a\.weight: scale of shape \(3, 2\)"):
        folder.read("a.weight")
