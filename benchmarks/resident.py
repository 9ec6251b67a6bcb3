"""The baseline: ordinary training with everything on the device, in the harness of step.py, so that a ratio is of one run.

    python benchmarks/resident.py --case 3b-resident --model qwen2.5-3b --rows 128 --row-tokens 1024 --micro-batch-rows 16

A whole Hugging Face model in bf16 (18 bytes a parameter with all its state), compiled layer by layer; fp32 masters under
torch's fused AdamW; micro-batches summed in fp32 as they come (``--gradients bf16``: autograd's own sum, cast for the step);
the norm exact over all of them. It is given what we give ourselves: the attention kernels of ``Backend.computing``, the
activation budget, and our fused head and loss, which adds straight to the head's fp32 sum. Nothing of the engine runs.
Rows have the fields of step.py. Checked by ``tests/test_benchmarks.py``: one step gives the engine's loss, norm and weights.
"""

from __future__ import annotations

import argparse
import gc
import time
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from rows import Steps, emit, is_done, options, random_batches, resident_bytes, say, step_row
from shapes import config_of
from torch import Tensor, nn

from layerferry.backends import Backend, make
from layerferry.engine.batch import MicroBatch
from layerferry.engine.compiled import budget_backend
from layerferry.layout import Entry
from layerferry.models.build import build_on_meta, owner_types
from layerferry.models.linear_head import Shape
from layerferry.models.skeleton import Skeleton
from layerferry.objectives.fused_linear import FusedLinear
from layerferry.objectives.head import Targets
from layerferry.optim.decay import decays
from layerferry.plan import GIB
from layerferry.planner.flops import flops_per_token

MAX_GRAD_NORM = 1.0
WEIGHT_DECAY = 0.01


class WholeHead:
    """The model's linear head in the words of ``FusedLinear``: it stands for Head, skeleton and accumulator."""

    def __init__(self, weight: nn.Parameter, total: Tensor, chunk_tokens: int) -> None:
        self._weight, self._total, self._chunk_tokens = weight, total, chunk_tokens
        self.skeleton = self.accumulator = self
        shape = tuple(weight.shape)
        self.head = (Entry(name="weight", shape=shape, dtype=weight.dtype, offset=0, decays=True), None)

    def head_weight(self) -> tuple[Tensor, None]:
        return self._weight, None

    def view(self, entry: Entry) -> Tensor:
        return self._total

    def before_head(self, hidden: Tensor) -> Tensor:
        return hidden  # the model has normalised it

    def chunks(self, num_tokens: int) -> Iterator[slice]:
        for start in range(0, num_tokens, self._chunk_tokens):
            yield slice(start, min(start + self._chunk_tokens, num_tokens))

    def backward(self, output: Tensor, inputs: Tensor, gradient: Tensor) -> Tensor:
        return gradient


class Resident:
    """A bf16 model @device and everything that trains it, @device too."""

    def __init__(self, model: Any, backend: Backend, *, gradients: str, chunk_tokens: int, budget: float, compiled: bool) -> None:
        self._model, self._backend, self._chunk_tokens = model, backend, chunk_tokens
        named = dict(model.named_parameters())
        owners = owner_types(model)
        self.parameters: list[Tensor] = list(named.values())
        self.masters = [nn.Parameter(parameter.detach().float()) for parameter in named.values()]
        self._master_of = {id(p): master for p, master in zip(self.parameters, self.masters, strict=True)}
        groups: dict[bool, list[nn.Parameter]] = {True: [], False: []}
        for name, parameter in named.items():
            groups[decays(name, owners[id(parameter)])].append(self._master_of[id(parameter)])
            if gradients == "fp32":
                parameter.register_post_accumulate_grad_hook(self._collect)
        self.optimizer = torch.optim.AdamW(
            [{"params": of, "weight_decay": WEIGHT_DECAY * decayed} for decayed, of in groups.items() if of], fused=True
        )
        self._head_loss = FusedLinear(Shape(), compiled=backend.name == "cuda")
        self.vocab_size = model.config.get_text_config().vocab_size
        self.layers = list(model.get_decoder().layers)
        if compiled:
            for layer in self.layers:
                layer.compile(backend=budget_backend(budget), dynamic=False)
        model.train()

    def _collect(self, parameter: Tensor) -> None:
        """Add a bf16 gradient to the fp32 sum, and drop it."""
        master = self._master_of[id(parameter)]
        assert parameter.grad is not None
        if master.grad is None:
            master.grad = parameter.grad.float()
        else:
            master.grad.add_(parameter.grad)
        parameter.grad = None

    def step(self, micro_batches: Sequence[MicroBatch], *, lr: float) -> tuple[float, float]:
        """Loss (mean over the step's targets) and gradient norm before clipping."""
        denominator = float(sum(batch.num_targets for batch in micro_batches))
        with self._backend.computing():
            shares = [self._micro_batch(batch, denominator) for batch in micro_batches]
            for parameter in self.parameters:
                if parameter.grad is not None:
                    self._collect(parameter)
            norm = nn.utils.clip_grad_norm_(self.masters, MAX_GRAD_NORM)
            for group in self.optimizer.param_groups:
                group["lr"] = lr
            self.optimizer.step()
            with torch.no_grad():
                torch._foreach_copy_(self.parameters, [*self.masters])
            self.optimizer.zero_grad(set_to_none=True)
        loss_value, norm_value = torch.stack([torch.stack(shares).sum(), norm]).tolist()
        return loss_value, norm_value

    def _micro_batch(self, batch: MicroBatch, denominator: float) -> Tensor:
        """Forward and backward; this micro-batch's share of the loss [] fp32 @device."""
        ids = self._backend.to_device(batch.input_ids)
        hidden = self._model.get_decoder()(input_ids=ids, use_cache=False).last_hidden_state
        targets = Targets.of(batch, self._backend.device)
        chosen = hidden.flatten(0, 1).index_select(0, targets.rows)
        weight = self._model.get_output_embeddings().weight
        master = self._master_of[id(weight)]
        if master.grad is None:
            master.grad = torch.zeros_like(master)
        head: Any = WholeHead(weight, master.grad, self._chunk_tokens)
        loss, gradient = self._head_loss.step(head, chosen.detach(), targets.labels, denominator)
        chosen.backward(gradient)
        return loss


def build(args: argparse.Namespace, backend: Backend) -> tuple[Resident, float]:
    """The trainer with random weights, and the model FLOPs of a token."""
    from transformers import AutoModelForCausalLM

    config = config_of(args.model, layers=args.layers or None)
    skeleton = Skeleton(build_on_meta(config, dtype=torch.bfloat16), decays=decays, device=torch.device("cpu"))
    per_token = flops_per_token(skeleton, args.row_tokens)
    with backend.device:
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16, attn_implementation="sdpa")
    resident = Resident(
        model,
        backend,
        gradients=args.gradients,
        chunk_tokens=args.chunk_tokens,
        budget=args.budget,
        compiled=backend.name == "cuda" and not args.no_compile,
    )
    return resident, per_token


def measure(args: argparse.Namespace) -> dict[str, Any]:
    backend = make(args.device)
    if backend.name == "cuda":
        torch.zeros(1, device=backend.device)  # the context itself is no part of the state
    before = resident_bytes()
    resident, flops = build(args, backend)
    gc.collect()
    grown = resident_bytes() - before
    vocab, seconds = int(resident.vocab_size), []
    for number in range(args.warmup + args.steps):
        micro_batches = random_batches(
            rows=args.rows, row_tokens=args.row_tokens, micro_batch_rows=args.micro_batch_rows, vocab_size=vocab
        )
        if number == args.warmup:
            backend.reset_peak()
        begin = time.perf_counter()
        loss, norm = resident.step(micro_batches, lr=1e-5)
        seconds.append(time.perf_counter() - begin)
        peak = backend.peak_bytes() / GIB
        say(f"step {number}: {seconds[-1]:.3f} s loss {loss:.4f} norm {norm:.3f} peak {peak:.2f} GiB")
    tokens = args.rows * args.row_tokens
    choice = {
        name: getattr(args, name) for name in ("gradients", "micro_batch_rows", "budget", "chunk_tokens", "no_compile", "rows")
    }
    steps = Steps(
        case=case_of(args),
        model=args.model,
        layers=len(resident.layers),
        row_tokens=args.row_tokens,
        tokens_per_step=tokens,
        flops_per_step=flops * tokens,
        seconds=seconds[args.warmup :],
        num_params=sum(parameter.numel() for parameter in resident.parameters),
        peak_bytes=backend.peak_bytes(),
        resident_bytes=grown,
        plan={"resident": True, **choice},
    )
    return step_row(steps, {}, backend, args)


def case_of(args: argparse.Namespace) -> str:
    return str(args.case) or f"{args.model}-{args.rows * args.row_tokens}-resident"


def parser() -> argparse.ArgumentParser:
    parser = options(__doc__)
    parser.add_argument("--model", default="tiny", help="a shape of shapes.py")
    parser.add_argument("--layers", type=int, default=0, help="0: as many as the model has")
    parser.add_argument("--rows", type=int, default=8)
    parser.add_argument("--row-tokens", type=int, default=128)
    parser.add_argument("--micro-batch-rows", type=int, default=2)
    parser.add_argument("--budget", type=float, default=1.0, help="share of activations kept")
    parser.add_argument("--chunk-tokens", type=int, default=8192)
    parser.add_argument("--gradients", choices=("fp32", "bf16"), default="fp32", help="how micro-batches are summed")
    parser.add_argument("--steps", type=int, default=5, help="counted steps, after the warm-up")
    parser.add_argument("--warmup", type=int, default=2)
    parser.add_argument("--no-compile", action="store_true")
    return parser


def main(argv: Sequence[str] | None = None) -> None:
    args = parser().parse_args(argv)
    torch.manual_seed(0)
    if not is_done(args, case_of(args)):
        emit(args, measure(args))


if __name__ == "__main__":
    main()
