"""Hidden states to loss and gradient."""

from layerferry.objectives.base import Objective
from layerferry.objectives.cross_entropy import CrossEntropy
from layerferry.objectives.custom import OnHidden, OnLogits
from layerferry.objectives.head import Head

__all__ = ["CrossEntropy", "Head", "Objective", "OnHidden", "OnLogits"]
