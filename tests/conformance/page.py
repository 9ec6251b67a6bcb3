"""The page of supported families, made from the conformance list: what is written there is what the suite holds."""

from __future__ import annotations

from typing import Any

import torch

from tests.conformance.families import FAMILIES, REFUSED, Family, tiny_config

_HEAD = """# Model families

*Generated from `tests/conformance/families.py` by `tools/render_families.py`; a test holds the two together.*

LayerFerry has no code per family: it runs the model's own Hugging Face forward around the layers that it streams. Each type below
is trained for a step as a tiny random model, streamed through two slots that hold NaN once released, with two micro-batches of
ragged labels and padding, and compared with plain autograd over the whole model: in fp32 the loss and **every gradient are equal
to the last bit**, under each attention listed; in bf16 the gradients are those of autograd, summed over micro-batches in fp32 and
rounded once.

*Balance* marks families of experts whose load-balancing loss is added when the config says `output_router_logits: true` (or the
run says `moe_aux_loss_coef`), equal to Hugging Face's own.

A type that is not listed is most likely right too, for nothing depends on the name. Ask: `layerferry verify MODEL_DIR` does the
comparison above on a small random copy of any `config.json`, in seconds. To add a family to the list, add its line to the file.

| type | kind | attention | units of the tiny model | balance |
|---|---|---|---|---|
"""

_REFUSED = """
## Refused, with the reason

What cannot be right is refused before training (exit code 4), never trained wrongly.

| type | because | in the words of the error |
|---|---|---|
"""

_TAIL = """
Also refused: any config with a vision, audio or speech part, any encoder-decoder, and any model in which a tensor other than the
hidden states passes from layer to layer.
"""


def markdown() -> str:
    """The whole page."""
    rows = [_row(family) for family in sorted(FAMILIES, key=lambda family: (family.kind, family.model_type))]
    refused = [f"| `{case.model_type}` | {case.because} | {case.reason} |" for case in REFUSED]
    return _HEAD + "\n".join(rows) + "\n" + _REFUSED + "\n".join(refused) + "\n" + _TAIL


def _row(family: Family) -> str:
    from layerferry.models.build import build_on_meta
    from layerferry.models.skeleton import Skeleton

    model: Any = build_on_meta(tiny_config(family), dtype=torch.float32, attention="eager")
    attention = "eager, sdpa" if type(model)._supports_sdpa else "eager"
    skeleton = Skeleton(model, decays=lambda *_: True, device=torch.device("cpu"), fp32=True)
    ends = "tied ends" if skeleton.epilogue_unit is skeleton.prologue_unit else "prologue, epilogue"
    kinds = len(set(skeleton.keys))
    layers = f"{len(skeleton.layer_units)} layers of {kinds} kind{'s' if kinds > 1 else ''}"
    balance = "yes" if family.aux_loss else ""
    return f"| `{family.model_type}` | {family.kind} | {attention} | {ends}, {layers} | {balance} |"
