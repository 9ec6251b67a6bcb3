"""Devices: lanes, fences, bytes. ``make`` turns the config's ``device`` into a backend."""

from __future__ import annotations

from layerferry.backends.base import Backend, Fence, Lane
from layerferry.errors import ConfigError

__all__ = ["Backend", "Fence", "Lane", "make"]


def make(device: str = "auto") -> Backend:
    """The backend of ``auto`` (CUDA where there is a device), ``cuda``, ``cuda:N``, ``cpu`` or ``chaos``."""
    from layerferry.backends.cuda import CudaBackend, device_count

    if device == "auto":
        device = "cuda" if device_count() else "cpu"
    kind, _, number = device.partition(":")
    if kind == "cuda" and (not number or number.isdigit()):
        index = int(number or 0)
        if index >= device_count():
            raise ConfigError(f"device: {device} asked for, {device_count()} CUDA devices found; device: cpu runs without one")
        return CudaBackend(index)
    if device == "cpu":
        from layerferry.backends.cpu import CpuBackend

        return CpuBackend()
    if device == "chaos":
        from layerferry.backends.chaos import ChaosBackend

        return ChaosBackend()
    raise ConfigError(f"device: {device!r} is none of auto, cuda, cuda:N, cpu, chaos")
