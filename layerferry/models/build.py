"""A Hugging Face causal LM without a byte of weights: the real class, parameters on ``meta``, buffers real.

Also says which parameters must stay fp32 (the family's own list) and refuses, by name, what the engine cannot train.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from layerferry.config import ModelConfig
from layerferry.errors import CheckpointError, ConfigError, ModelRefused
from layerferry.models.rope import stretch

if TYPE_CHECKING:
    from transformers import PretrainedConfig, PreTrainedModel

ATTENTION = {"auto": None, "disabled": "eager", "sdpa": "sdpa", "fa2": "flash_attention_2", "fa3": "flash_attention_3"}
"""LLaMA-Factory's ``flash_attn`` -> transformers' attention implementation."""
_LOOKS_AHEAD = "{}: a model that looks ahead (an encoder); only causal (decoder-only) models are trained"
OTHER_MODALITIES = ("vision_config", "audio_config", "image_config", "speech_config")


def refuse_missing_folder(source: str) -> None:
    """Raise ``CheckpointError`` where ``source`` is neither a folder nor anything that the hub could know."""
    if not Path(source).is_dir() and re.fullmatch(r"[\w-][\w.-]*(?:/[\w.-]+)?", source) is None:
        raise CheckpointError(f"model_name_or_path: {source}: no such folder")


def read_config(
    source: str, *, revision: str = "main", trust_remote_code: bool = False, cache_dir: str | None = None
) -> PretrainedConfig:
    """The config of a model folder or hub id. Raises ``CheckpointError`` where there is none."""
    from transformers import AutoConfig

    refuse_missing_folder(source)
    if Path(source).is_dir() and not (Path(source) / "config.json").is_file():
        raise CheckpointError(f"{source}: no usable config.json: the folder has none")
    try:
        config: PretrainedConfig = AutoConfig.from_pretrained(
            source, revision=revision, trust_remote_code=trust_remote_code, cache_dir=cache_dir
        )
    except Exception as error:  # the hub's, the JSON reader's and the family's own checks, of many classes
        if "trust_remote_code" in str(error):
            first = str(error).strip().partition("\n")[0].rstrip(". ")
            raise CheckpointError(f"{source}: no usable config.json: {first}: trust_remote_code: true runs it") from error
        raise CheckpointError(f"{source}: no usable config.json: {reason(error)}") from error
    depth = getattr(config.get_text_config(), "num_hidden_layers", None)
    if isinstance(depth, int) and depth < 1:
        raise CheckpointError(f"{source}: no usable config.json: num_hidden_layers is {depth}, a model has at least 1")
    return config


def config_of(given: ModelConfig, tokens: int | None) -> PretrainedConfig:
    """``read_config`` as ``given`` says, with rotary positions for rows of ``tokens`` (None: not known)."""
    config = read_config(
        given.model_name_or_path,
        revision=given.model_revision,
        trust_remote_code=given.trust_remote_code,
        cache_dir=given.cache_dir,
    )
    stretch(config, given.rope_scaling, tokens)
    return config


def reason(error: Exception) -> str:
    """What a library says, in one line: its text up to the second line feed, since a first line often ends in a colon."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return " ".join(lines[:2]) or type(error).__name__


def refuse_unsupported(config: PretrainedConfig) -> None:
    """Raise ``ModelRefused`` for kinds of models that no template can be right for yet."""
    kind = config.model_type
    for name in OTHER_MODALITIES:
        if getattr(config, name, None) is not None:
            raise ModelRefused(f"{kind}: a multimodal checkpoint ({name}); only text models are trained so far")
    if getattr(config, "is_encoder_decoder", False):
        raise ModelRefused(f"{kind}: an encoder-decoder model; only causal (decoder-only) models are trained")
    encodes = getattr(config, "is_decoder", True) is False and hasattr(config, "type_vocab_size")  # gpt_neox has the first too
    if encodes or getattr(config, "use_bidirectional_attention", None) is True:
        raise ModelRefused(_LOOKS_AHEAD.format(kind))


def take_block_size(config: Any) -> tuple[int, int]:
    """Block of an fp8 checkpoint's scales; the quantisation leaves the config, for it ends when the planes are filled."""
    given = getattr(config, "quantization_config", None)
    if given is None:
        return (128, 128)
    del config.quantization_config
    block = (given if isinstance(given, dict) else given.to_dict()).get("weight_block_size") or (128, 128)
    return (int(block[0]), int(block[1]))


def build_on_meta(
    config: PretrainedConfig,
    *,
    dtype: torch.dtype,
    attention: str | None = None,
    experts: str | None = None,
    trust_remote_code: bool = False,
) -> PreTrainedModel:
    """The model of ``config`` in ``dtype``: parameters on ``meta``, buffers @host, tied weights one Parameter."""
    from accelerate import init_empty_weights
    from transformers import AutoModelForCausalLM

    refuse_unsupported(config)
    config = copy.deepcopy(config)  # the skeleton changes it, and a live model's must stay as it is
    options: dict[str, Any] = {"dtype": dtype}
    if attention is not None:
        options["attn_implementation"] = attention
    if experts is not None:
        options["experts_implementation"] = experts
    try:
        with init_empty_weights(include_buffers=False):
            model: PreTrainedModel = AutoModelForCausalLM.from_config(config, trust_remote_code=trust_remote_code, **options)
    except ValueError as error:
        raise ModelRefused(f"{config.model_type}: {reason(error)}") from error
    except ImportError as error:
        raise ConfigError(f"flash_attn: {reason(error)}: sdpa needs no package") from error
    except Exception as error:  # whatever the family's code makes of numbers and words that it does not expect
        why = f"{type(error).__name__}: {reason(error)}"
        raise CheckpointError(f"{config.model_type}: no model can be made of its config.json ({why})") from error
    encodes = getattr(config, "is_decoder", True) is False
    if encodes and any(getattr(module, "is_causal", None) is False for module in model.modules()):
        raise ModelRefused(_LOOKS_AHEAD.format(config.model_type))
    model.tie_weights()
    if getattr(model.config, "_experts_implementation", None) == "batched_mm":
        raise ModelRefused(
            f"{config.model_type}: experts as batched_mm keep 10 to 14 copies of the weights; use grouped_mm or eager"
        )
    model.train()
    return model


def fp32_only(model: PreTrainedModel) -> re.Pattern[str] | None:
    """Pattern of the parameter names that the family computes with in fp32 whatever the model's dtype."""
    keys = getattr(model, "_keep_in_fp32_modules_strict", None) or ()
    return re.compile("|".join(rf"(?:(?:^|\.){key}(?:$|\.))" for key in sorted(keys))) if keys else None


def locations(root: nn.Module) -> dict[int, list[tuple[nn.Module, str]]]:
    """Where each Parameter hangs in the module tree, by identity: a tied one in several places."""
    found: dict[int, list[tuple[nn.Module, str]]] = {}
    for module in root.modules():
        for leaf, parameter in module._parameters.items():
            if parameter is not None:
                found.setdefault(id(parameter), []).append((module, leaf))
    return found


def owner_types(root: nn.Module) -> Mapping[int, str]:
    """Class name of the module that owns each Parameter, by identity: what the weight-decay rule asks for."""
    return {key: type(places[0][0]).__name__ for key, places in locations(root).items()}
