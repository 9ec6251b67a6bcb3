"""Hidden states to loss and gradient."""

from layerferry.objectives.base import Head, Objective
from layerferry.objectives.cross_entropy import CrossEntropy
from layerferry.objectives.custom import OnHidden, OnLogits

__all__ = ["CrossEntropy", "Head", "Objective", "OnHidden", "OnLogits"]
