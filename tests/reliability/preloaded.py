"""Imported once by the fork server: everything slow."""

import torch
import transformers.models.llama.modeling_llama  # noqa: F401

import layerferry.engine.engine
import layerferry.trainer.run  # noqa: F401

torch.set_num_threads(1)
