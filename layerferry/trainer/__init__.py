"""Composition: configuration, data, engine, schedule and records become a training run.

``run`` is the order of things, ``loop`` the steps, ``cadence`` what is due when, ``meter`` speed, ``evaluation``
held-out loss, ``history`` numbers and their files, ``checkpoints`` and ``folder`` what is saved and where, ``plots``
and ``card`` what a person reads afterwards, ``progress`` what a person sees meanwhile, ``reporters`` trackers.
"""

from __future__ import annotations

from layerferry.config import Config


def train(config: Config) -> None:
    """Train as ``config`` says; see ``layerferry.trainer.run``."""
    from layerferry.trainer.run import train as run

    run(config)


__all__ = ["train"]
