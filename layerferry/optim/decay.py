"""Which parameters take weight decay: Hugging Face Trainer's rule, as a function of two names.

No decay for parameters of LayerNorm modules and for those whose name speaks of a bias or a norm. All else decays: embeddings
too, and an RMS norm that is called ``ln_f``, as there. Trainer asks ``isinstance(module, nn.LayerNorm)``; every subclass in
transformers has LayerNorm in its name, so the name will do. Of tied parameters the first name counts.
Checked by ``tests/optim/test_decay.py`` against ``Trainer.get_decay_parameter_names``.
"""

from __future__ import annotations

import re

_WITHOUT_DECAY = re.compile(r"bias|layernorm|rmsnorm|(?:^|\.)norm(?:$|\.)|_norm(?:$|\.)")


def decays(name: str, owner: str) -> bool:
    """``name``: the parameter's full name in the model; ``owner``: class name of the module that holds it."""
    return "LayerNorm" not in owner and _WITHOUT_DECAY.search(name.lower()) is None
