"""What a step reads back from the device: the gradient norm, once, whatever the number of micro-batches and the plan.

Every operator whose result the host must know is counted, with the file that asked for it. On a CPU all memory is the host's, so
the files that read labels before those go to the device are named here.
"""

from __future__ import annotations

import traceback
from collections import Counter
from typing import Any

import pytest
from torch.utils._python_dispatch import TorchDispatchMode

from layerferry.plan import Plan
from tests.conformance.harness import make_engine
from tests.engine.small import micro_batches, small_model

READS = ("_local_scalar_dense", "nonzero", "is_nonzero", "equal", "masked_select", "_unique2", "bincount")
OF_LABELS_AT_THE_HOST = {"batch.py", "head.py"}


class Reads(TorchDispatchMode):
    """Counts reads by the nearest file of ours or of transformers."""

    def __init__(self) -> None:
        super().__init__()
        self.by_file: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.overloadpacket.__name__ in READS:
            frames = [
                one.filename
                for one in traceback.extract_stack()
                if "/layerferry/" in one.filename or "transformers" in one.filename
            ]
            self.by_file[frames[-1].rpartition("/")[2]] += 1
        return func(*args, **(kwargs or {}))


def reads_of_a_step(model_type: str, plan: Plan) -> dict[str, int]:
    engine = make_engine(small_model(model_type=model_type), plan)
    engine.step(micro_batches(4), lr=1e-3)  # what is looked at once a run
    engine.settle()
    batches = micro_batches(4)
    with Reads() as reads:
        engine.step(batches, lr=1e-3)
    engine.close()
    return {name: count for name, count in reads.by_file.items() if name not in OF_LABELS_AT_THE_HOST}


@pytest.mark.parametrize("model_type", ["llama", "qwen3_moe"])
@pytest.mark.parametrize("plan", [Plan(), Plan(num_waves=2), Plan(turn_layers=2, num_slots=4)], ids=["plain", "waves", "turn"])
def test_a_step_reads_the_norm_and_nothing_else(model_type: str, plan: Plan) -> None:
    assert reads_of_a_step(model_type, plan) == {"engine.py": 1}
