"""The exception tree: every error that a user can cause, with the exit code that the command line gives it.

A message names the number, key, file or line that is wrong and, where there is one, the remedy. Anything that is not a
``LayerFerryError`` is a fault of ours and keeps its traceback.
"""

from __future__ import annotations


class LayerFerryError(Exception):
    """Base of all errors raised on purpose; exit code 1 means that the work failed or its result is wrong."""

    exit_code = 1


class UserError(LayerFerryError):
    """Something that the user wrote cannot be used as it stands: exit code 2."""

    exit_code = 2


class ConfigError(UserError):
    """A configuration key or value: unknown, duplicate, of the wrong type, or in conflict with another."""


class DataError(UserError):
    """A data set: missing, malformed, empty, or of a kind that the stage cannot train on."""


class CheckpointError(UserError):
    """A model folder or checkpoint: missing, truncated, or of another shape than the model."""


class PlanError(LayerFerryError):
    """The plan does not fit the machine: exit code 3. The message carries the bytes needed, the bytes there, and remedies."""

    exit_code = 3


class ModelRefused(LayerFerryError):
    """The engine cannot train this model correctly: exit code 4. The message carries the reason."""

    exit_code = 4


class DiskTierError(LayerFerryError):
    """The disk that holds optimizer state has failed, or gave back other bytes than were written: exit code 1. The run cannot go
    on, its newest checkpoint can."""


class Interrupted(LayerFerryError):
    """A signal has ended the run after its step: exit code 128 + the signal's number, as a shell counts. Says how to go on."""

    def __init__(self, message: str, *, signal_number: int) -> None:
        super().__init__(message)
        self.exit_code = 128 + signal_number
