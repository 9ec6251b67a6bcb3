"""How often attention was really computed."""

from __future__ import annotations

from typing import Any

from torch.utils._python_dispatch import TorchDispatchMode

from layerferry.models.attention_outputs import KERNELS


class Kernels(TorchDispatchMode):
    """Counts attention kernels that run inside."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += func.overloadpacket.__name__ in KERNELS
        return func(*args, **(kwargs or {}))
