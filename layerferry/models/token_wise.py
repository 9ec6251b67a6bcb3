"""A layer's token-wise parts (MLP, norms) in chunks of tokens: what is between their ends is never whole.

At half a million tokens the three inner activations of one MLP are 20 GB each. A part that maps every token by itself may see
the row in chunks; the backward computes each chunk again, so a chunk's inner activations are all that is alive, and sums the
parameters' gradients in fp32.

No family is known by name. A direct child of a layer qualifies if it maps [B, T, D] to [B, T, D] and proves that it is
token-wise: other tokens at both ends of a row change no bit between them, and a row in two pieces is the row. What it has learnt
must not hide a mixture (a weight of a token shift may begin at zero), so the proof lends it random weights. A reach of exactly
``_TRIAL_TOKENS`` tokens and more is not seen. Experts are left whole: they gather tokens of the whole row, and their router's
statistics belong to it. So is what draws random numbers, because chunks would draw others.

Checked by ``tests/models/test_token_wise.py``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call

_TRIAL_TOKENS, _CUT = 64, 24
_RANDOM_NUMBERS = 65537
"""That are drawn for a weight; larger ones repeat them, for drawing hundreds of millions takes seconds."""
_ROUNDINGS = 8
"""Units of the dtype's precision by which a row in pieces may differ: products of other shapes add in another order."""

Part = Callable[[Tensor], Tensor]


@dataclass(frozen=True, slots=True)
class Found:
    """``part`` is token-wise where ``reason`` is empty."""

    name: str
    part: nn.Module
    reason: str


def token_wise_parts(layer: nn.Module, hidden_size: int) -> Iterator[Found]:
    """The children of ``layer`` that take hidden states and nothing else. Its parameters must hold weights."""
    for name, child in layer.named_children():
        reason = _reason_against(child, hidden_size)
        if reason is not None:
            yield Found(name, child, reason)


def _reason_against(part: nn.Module, hidden_size: int) -> str | None:
    """ "": none; None: it is no map of hidden states at all, such as an attention that wants positions."""
    like = next(part.parameters(), None)
    if like is None:
        return None
    generator = torch.Generator(device=like.device).manual_seed(0)
    shape = (1, _TRIAL_TOKENS, hidden_size)
    hidden = torch.randn(shape, generator=generator, device=like.device).to(like.dtype)
    with torch.no_grad(), torch.random.fork_rng(devices=[like.device] if like.is_cuda else []):
        try:
            output = part(hidden)
        except Exception:  # the family's own code, called with less than it wants
            return None
        if not isinstance(output, Tensor) or output.shape != shape:
            return None
        if any("experts" in name.split(".") for name, _ in part.named_modules()):
            return "it has experts, whose tokens are gathered over the whole row"
        return _reason_on_trial(part, hidden, generator)


def _reason_on_trial(part: nn.Module, hidden: Tensor, generator: torch.Generator) -> str:
    """``hidden``: [1, T, D]. ``part`` keeps its own weights."""
    changed = hidden.clone()
    changed[:, [0, -1]] = changed[:, [0, -1]].flip(-1) + 1  # whichever way a token reaches, and however far
    weights = {name: _random_like(own, generator) for name, own in part.named_parameters()}
    try:
        whole, other, *pieces = (
            functional_call(part, weights, (given,)) for given in (hidden, changed, hidden[:, :_CUT], hidden[:, _CUT:])
        )
    except Exception as error:  # the family's own code
        return f"it does not run with other weights ({type(error).__name__})"
    if bool((whole != other).any(-1)[0, 1:-1].any()):
        return "a token reaches others in it, or it draws random numbers"
    bound = _ROUNDINGS * torch.finfo(whole.dtype).eps * whole.abs().max()
    if not bool(((torch.cat(pieces, 1) - whole).abs() <= bound).all()):
        return "a row in pieces is not the row"
    return ""


def _random_like(weight: Tensor, generator: torch.Generator) -> Tensor:
    """Of the size that weights have: a matrix keeps its input's scale; of others none is near zero, or larger than 1.5."""
    drawn = torch.rand(min(weight.numel(), _RANDOM_NUMBERS), generator=generator, device=weight.device) * 2 - 1
    scaled = drawn * (3 / max(weight.shape[-2:])) ** 0.5 if weight.dim() > 1 else drawn + drawn.sign() / 2
    repeats = -(-weight.numel() // max(scaled.numel(), 1))
    return scaled.to(weight.dtype).repeat(repeats)[: weight.numel()].view(weight.shape)


def has_inner_width(part: nn.Module, hidden_size: int) -> bool:
    """Whether anything in it is wider than its ends."""
    return any(parameter.dim() == 2 and max(parameter.shape) > hidden_size for parameter in part.parameters())


def run_in_chunks(part: nn.Module, chunk_tokens: int, compile_part: Callable[[Part], Part] | None) -> None:
    """``part`` sees at most ``chunk_tokens`` of a row at a time from now on. ``compile_part``: the layer around it is compiled,
    and breaks here; None: it is eager."""
    run: Part = part.forward if compile_part is None else compile_part(part.forward)

    def forward(hidden: Tensor) -> Tensor:
        if hidden.shape[1] <= chunk_tokens:
            return run(hidden)
        output: Tensor = _Chunks.apply(run, chunk_tokens, hidden, *part.parameters())  # type: ignore[no-untyped-call]
        return output

    part.forward = forward if compile_part is None else torch.compiler.disable(forward, recursive=False)  # type: ignore[no-untyped-call]


class _Chunks(torch.autograd.Function):
    """Keeps its input. The parameters are inputs, so that their gradients have a way out; ``run`` reads them itself."""

    @staticmethod
    def forward(ctx: Any, run: Part, chunk_tokens: int, hidden: Tensor, *parameters: Tensor) -> Tensor:
        ctx.run, ctx.chunk_tokens, ctx.parameters = run, chunk_tokens, parameters
        ctx.save_for_backward(hidden)
        output = torch.empty_like(hidden)
        for piece in _pieces(hidden, chunk_tokens):
            output[:, piece] = run(hidden[:, piece])
        return output

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        (hidden,) = ctx.saved_tensors
        wanted = [parameter for parameter in ctx.parameters if parameter.requires_grad]
        sums = [torch.zeros_like(parameter, dtype=torch.float32) for parameter in wanted]
        found = torch.empty_like(hidden)
        for piece in _pieces(hidden, ctx.chunk_tokens):
            leaf = hidden[:, piece].detach().requires_grad_(True)
            with torch.enable_grad():
                output = ctx.run(leaf)
            own, *others = torch.autograd.grad(output, [leaf, *wanted], gradient[:, piece])
            found[:, piece] = own
            for total, one in zip(sums, others, strict=True):
                total.add_(one)
        of = {id(parameter): total.to(parameter.dtype) for parameter, total in zip(wanted, sums, strict=True)}
        return None, None, found, *(of.get(id(parameter)) for parameter in ctx.parameters)


def _pieces(hidden: Tensor, chunk_tokens: int) -> Iterator[slice]:
    for start in range(0, hidden.shape[1], chunk_tokens):
        yield slice(start, start + chunk_tokens)
