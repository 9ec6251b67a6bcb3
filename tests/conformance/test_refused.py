"""What must be refused is refused, with the reason; and the guards that find it are not vacuous."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from layerferry.engine.oracle import WholeRows
from layerferry.errors import ModelRefused
from layerferry.models.build import build_on_meta
from tests.conformance.families import BASE, REFUSED, Refused
from tests.conformance.harness import make_engine, micro_batches, real_model


def refused_config(case: Refused) -> Any:
    from transformers import AutoConfig

    return AutoConfig.for_model(case.model_type, **{**BASE, **case.changes})


@pytest.mark.parametrize("case", REFUSED, ids=lambda case: case.model_type)
def test_refused_with_the_reason(case: Refused) -> None:
    config = refused_config(case)
    with pytest.raises(ModelRefused, match=case.reason) as caught:
        build_on_meta(config, dtype=torch.float32)
        engine = make_engine(real_model(config))
        try:
            engine.step(micro_batches(), WholeRows(), lr=0.0)
        finally:
            engine.close()
    assert "\n" not in str(caught.value)
    assert caught.value.exit_code == 4


def test_unknown_class_is_refused_by_name() -> None:
    from transformers import CLIPConfig

    with pytest.raises(ModelRefused, match="clip"):
        build_on_meta(CLIPConfig(), dtype=torch.float32)


def test_batched_experts_are_refused() -> None:
    from tests.conformance.families import BY_TYPE, tiny_config

    with pytest.raises(ModelRefused, match="batched_mm"):
        build_on_meta(tiny_config(BY_TYPE["mixtral"]), dtype=torch.float32, experts="batched_mm")
