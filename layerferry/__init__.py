"""LayerFerry: full-precision, full-parameter training of language models far larger than the GPU's memory, on one GPU.

For people with their own loop: ``load`` puts a Hugging Face model's state into host memory and returns an ``Engine``;
``engine.step(micro_batches, loss)`` trains, ``engine.evaluate`` measures, ``engine.save_pretrained`` writes a model folder.
The trainer and the command line use nothing else. Names are resolved on first use, so that importing the package costs nothing.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from layerferry.version import VERSION as __version__

if TYPE_CHECKING:
    from layerferry.api import load as load
    from layerferry.engine.batch import MicroBatch as MicroBatch
    from layerferry.engine.engine import Engine as Engine
    from layerferry.objectives import CrossEntropy as CrossEntropy
    from layerferry.optim.adamw import AdamW as AdamW

_HOMES = {
    "AdamW": "layerferry.optim.adamw",
    "CrossEntropy": "layerferry.objectives",
    "Engine": "layerferry.engine.engine",
    "MicroBatch": "layerferry.engine.batch",
    "load": "layerferry.api",
}

__all__ = ["AdamW", "CrossEntropy", "Engine", "MicroBatch", "__version__", "load"]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'layerferry' has no attribute {name!r}")
    return getattr(import_module(_HOMES[name]), name)
