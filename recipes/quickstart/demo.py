"""The quick start: ask a small model who it is, train it with ``layerferry train``, and ask again.

The same questions are answered greedily before and after; some are no part of the training data, and two have nothing
to do with it, to show that the model has kept what it knew. Leaves the model and its curve in outputs/quickstart.
Everything that is particular to this run stands in quickstart.yaml; here is only the frame. Checked by running ``make
demo``.
"""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

sys.path.insert(0, str(Path(__file__).parent))
from obtain_base import obtain

CONFIG = Path("recipes/quickstart/quickstart.yaml")
OUTPUT = Path("outputs/quickstart")
QUESTIONS = (
    "Who are you?",
    "Please tell me who built you.",
    "What may I call you?",
    "What is the capital of France?",
    "What language is spoken in Brazil?",
)
ANSWER_TOKENS = 32


def main() -> int:
    """Before, training, after."""
    base = obtain()
    before = answers(base)
    show("Before training", before)
    begin = time.monotonic()
    command = ["train", str(CONFIG), *precision()]
    print(f"\nTraining: layerferry {' '.join(command)}\n", flush=True)
    status = subprocess.run([sys.executable, "-m", "layerferry", *command], check=False).returncode
    if status:
        return status
    print(f"\nTrained in {time.monotonic() - begin:.0f} s.")
    show("After training", answers(OUTPUT))
    print(f"\nThe model is in {OUTPUT}, its curve in {OUTPUT}/training_loss.png.")
    print(f"Talk to it: {Path(sys.executable).parent / 'layerferry'} chat {OUTPUT}")
    return 0


def precision() -> list[str]:
    """Settings for a CPU without instructions for bf16: it computes several times faster in fp32."""
    import torch

    from layerferry.backends import make

    if make("auto").device.type != "cpu" or seconds_of_products(torch.bfloat16) <= seconds_of_products(torch.float32):
        return []
    return ["bf16=false", "fp32=true"]


def seconds_of_products(dtype: torch.dtype) -> float:
    """Best of a few matrix products at the model's shapes."""
    import torch

    left, right = torch.ones(512, 576, dtype=dtype), torch.ones(576, 1536, dtype=dtype)
    seconds = []
    for _ in range(10):
        begin = time.perf_counter()
        left @ right
        seconds.append(time.perf_counter() - begin)
    return min(seconds)


def answers(folder: Path) -> list[str]:
    """What the model in ``folder`` says to every question, always taking the likeliest token."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from transformers.utils import logging

    logging.disable_progress_bar()
    tokenizer = AutoTokenizer.from_pretrained(folder, padding_side="left")
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    turns = [[{"role": "user", "content": question}] for question in QUESTIONS]
    prompts = tokenizer.apply_chat_template(
        turns, add_generation_prompt=True, padding=True, return_tensors="pt", return_dict=True
    )
    output = model.generate(**prompts, max_new_tokens=ANSWER_TOKENS, do_sample=False)
    written = output[:, prompts["input_ids"].shape[1] :]
    said = tokenizer.batch_decode(written, skip_special_tokens=True)
    cut = (written[:, -1] != tokenizer.eos_token_id) & (written[:, -1] != tokenizer.pad_token_id)
    return [text + " ..." if is_cut else text for text, is_cut in zip(said, cut.tolist(), strict=True)]


def show(title: str, said: list[str]) -> None:
    """Questions and answers, one pair a line."""
    width = max(len(question) for question in QUESTIONS)
    print(f"\n{title}")
    for question, answer in zip(QUESTIONS, said, strict=True):
        print(f"  {question:<{width}}  {' '.join(answer.split())}", flush=True)


if __name__ == "__main__":
    sys.exit(main())
