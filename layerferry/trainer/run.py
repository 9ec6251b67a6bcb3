"""``train``: from a configuration to a trained model and its records.

Order: the output folder is locked first, so that nobody else changes what is found there; whatever can be refused cheaply
(trackers, the folder, data) comes before the model is loaded, and the plan is shown before the first step. A checkpoint that
is resumed is checked before its bytes are used. Nothing but the lock is written into the output folder before the engine stands.
Leaves out: reading files of settings (``interop``). Checked by ``tests/trainer/test_train.py``.
"""

from __future__ import annotations

import logging
import math
import secrets
import sys
from contextlib import ExitStack, closing
from dataclasses import replace
from pathlib import Path
from typing import Any

from layerferry import api
from layerferry.backends import make
from layerferry.backends.base import Backend
from layerferry.checkpoint.files import reason_of
from layerferry.checkpoint.folders import LATEST, write_latest
from layerferry.checkpoint.lock import LockedFiles
from layerferry.checkpoint.save import Saver
from layerferry.config import Config
from layerferry.data import DataSets, Sampler
from layerferry.engine.anomaly import WatchfulTape
from layerferry.engine.engine import Engine
from layerferry.errors import CheckpointError, ConfigError, DiskTierError
from layerferry.interop.checks import check
from layerferry.optim.base import Optimizer
from layerferry.optim.choose import optimizer_for
from layerferry.optim.verified import verified
from layerferry.plan import Plan
from layerferry.planner.facts import Model
from layerferry.planner.host import host_limits
from layerferry.planner.machine import machine_for
from layerferry.planner.problem import Problem, problem
from layerferry.planner.report import render
from layerferry.trainer import watchdog
from layerferry.trainer.asked import Asked, wants_evaluation
from layerferry.trainer.card import CARD, model_card
from layerferry.trainer.checkpoints import Checkpoints, how_to_go_on, save_model, save_tokenizer_beside, side_files
from layerferry.trainer.determinism import deterministic_kernels
from layerferry.trainer.disk import DiskWatch
from layerferry.trainer.folder import Records, check_source, claim, clear
from layerferry.trainer.history import STATE_NAME, History, clock_time
from layerferry.trainer.interrupts import Interrupts
from layerferry.trainer.loop import Loop
from layerferry.trainer.meter import Meter
from layerferry.trainer.model_changes import CONFIG_NAME, model_changes
from layerferry.trainer.output import OutputFolder
from layerferry.trainer.plots import plot_history
from layerferry.trainer.progress import progress
from layerferry.trainer.reporters import open_reporters, tracker_names
from layerferry.trainer.resume import Start, latest_of, say_what_is_left_behind
from layerferry.trainer.retreat import retreat
from layerferry.trainer.rounding import other_rounding, rounding_of
from layerferry.trainer.state import (
    RunState,
    changes,
    check_data,
    data_facts,
    eval_facts,
    settings_of,
)
from layerferry.trainer.timeline import StepRecorder
from layerferry.trainer.watchdog import Lane, Watchdog

logger = logging.getLogger("layerferry.trainer")


def train(config: Config) -> None:
    """Run what ``config`` asks for: training, evaluation, or both."""
    check(config)  # once more where a file was read; a configuration made in Python has seen none of it
    trackers = tracker_names(config.train.report_to)
    if not (config.train.do_train or wants_evaluation(config)):
        raise ConfigError("nothing to do: set do_train: true, do_eval: true, or both")
    check_source(config)
    with claim(config.train) as lock:  # before anything in the folder is looked at
        _train(config, trackers, OutputFolder(Path(config.train.output_dir), LockedFiles(lock)))


def _train(config: Config, trackers: list[str], output: OutputFolder) -> None:
    asked = Asked.by(config)
    with ExitStack() as stack:
        if config.train.full_determinism:
            stack.enter_context(deterministic_kernels())
        if asked.start is not None:
            check_start(asked.start, config, asked.data, asked.sampler, asked.total_steps)
        backend = make(config.engine.device)
        # before loading: free memory is what the plan had to choose from
        machine = machine_for(config.engine, backend, config.disk_folder)
        engine = _load(asked, backend)
        stack.callback(engine.close)
        _restore(asked, engine)
        question = problem(Model.of(engine.skeleton), engine.store.specs, machine, config, asked.row_tokens)
        _say_what_comes(asked, engine, question)
        loop = _loop(asked, engine, question, trackers, output, stack)
        try:
            run(loop)
        except DiskTierError as error:
            raise DiskTierError(f"{error}; {how_to_go_on(output)}; disk_folder names another disk") from error
        finally:
            close_watched(stack, loop)


def close_watched(stack: ExitStack, loop: Loop) -> None:
    """End the threads of the run. They may wait for a lane that stands still: it is named, behind what has ended the run."""
    error, patience_s = sys.exc_info()[1], 60 * loop.config.train.watchdog_minutes

    def on_stall(stalled: list[Lane]) -> None:
        if error is not None:
            logger.error("%s", error)
        watchdog.end_process(stalled, patience_s)

    with Watchdog(loop.lanes(), patience_s, on_stall):
        stack.close()


def _load(asked: Asked, backend: Backend) -> Engine:
    config, start = asked.config, asked.start
    logger.info("loading weights ...")
    return api.load(
        config.model.model_name_or_path,
        config=config,
        backend=backend,
        row_tokens=asked.row_tokens,
        optimizer=optimizer_of(config),
        num_tokens=len(asked.tokenizer),
        weights=None if start is None else start.folder,
    )


def _restore(asked: Asked, engine: Engine) -> None:
    """The rest of the checkpoint that the run goes on from."""
    if asked.start is not None:
        asked.start.restore(engine)
        own = rounding_of(engine.plan, engine.store.units)
        if (told := other_rounding(asked.start.state.rounding, own)) is not None:
            logger.warning("%s", told)
    if asked.config.train.detect_anomaly:
        engine.tape_type = WatchfulTape


def _loop(asked: Asked, engine: Engine, question: Problem, trackers: list[str], output: OutputFolder, stack: ExitStack) -> Loop:
    """With everything that writes into the output folder; ``stack`` closes it."""
    config, start, machine = asked.config, asked.start, question.machine
    beside = side_files(engine, asked.tokenizer)
    other_model = [] if start is None else model_changes(start.folder, beside[CONFIG_NAME])
    for change in other_model:
        logger.warning("the model's config has changed since the checkpoint: %s", change)
    clear(output, config.train, resumes=start is not None)
    saver = stack.enter_context(closing(saver_of(config, engine, output, start, one_memory=machine.one_memory)))
    reporters = open_reporters(trackers, config, output)
    for reporter in reporters:
        stack.callback(reporter.close)
    state = RunState() if start is None else start.state
    history = History(config.train, asked.cadence, output)
    if config.train.do_train:  # an evaluation adds to the log of the run that has trained here
        history.take_up(state.entries, state.log_lines, tokens_seen=state.tokens_seen, total_flops=state.total_flops)
    if state.schedule:
        asked.schedule.load_state_dict(state.schedule)
    return Loop(
        config=config,
        engine=engine,
        tokenizer=asked.tokenizer,
        data=asked.data,
        sampler=asked.sampler,
        schedule=asked.schedule,
        cadence=asked.cadence,
        output=output,
        history=history,
        cursor=state.cursor,
        totals=replace(state.totals),
        last_eval=None if other_model else state.evaluation_that_holds(eval_facts(config, asked.data.eval)),
        skipped_batches=state.skipped_batches,
        disk=None if engine.store.disk is None else DiskWatch(engine.store.disk, machine),
        retreat=lambda what, done: retreat(engine, question, what=what, done=done),
        checkpoints=Checkpoints(saver, beside),
        reporters=reporters,
        progress=stack.enter_context(progress(plain=config.train.disable_tqdm)),
        meter=Meter(None if machine.is_cpu else machine.matmul_flops_per_s.value),  # on a CPU the share says little
        recorder=StepRecorder(engine, output if config.engine.timeline else None, asked.total_steps),
        flops_per_token=question.model.flops.per_token,
    )


def optimizer_of(config: Config) -> Optimizer:
    """The optimizer of the run, watched over where ``verify_memory`` asks for it."""
    optimizer = optimizer_for(config.optim, seed=config.train.seed)
    return verified(optimizer) if config.train.verify_memory else optimizer


def check_start(start: Start, config: Config, data: DataSets, sampler: Sampler, total_steps: int) -> None:
    """Raise where the checkpoint does not belong to this data or is damaged; say which settings have changed."""
    check_data(start.folder, start.state.data, data_facts(sampler, data.train))
    start.check_weights()
    logger.info("resuming %s: step %d of %d", start.folder, start.manifest.step, total_steps)
    if start.manifest.step > total_steps:
        logger.warning(
            "%s is beyond the %d steps that max_steps or num_train_epochs make: nothing is trained, and the model that is "
            "written is that of step %d; resume_from_checkpoint names an older one",
            *(start.folder.name, total_steps, start.manifest.step),
        )
    for change in changes(start.state.settings, settings_of(config, total_steps)):
        logger.warning("changed since the checkpoint: %s", change)


def saver_of(config: Config, engine: Engine, output: OutputFolder, start: Start | None, *, one_memory: bool) -> Saver:
    """The writer of this run's checkpoints, with the marker that makes the folder this run's; refuses a disk without room for one
    checkpoint and the model. ``one_memory``: the device's is the host's."""
    train, folder = config.train, output.path
    latest = latest_of(start, secrets.token_hex(8), folder)
    saver = Saver(
        engine,
        folder,
        run=latest.run,
        line=latest.line,
        keep=train.save_total_limit,
        model_only=train.save_only_model,
        spare_bytes=lambda: spare_bytes(config, engine.plan, one_memory=one_memory),
        files=output.files,
    )
    if train.do_train:
        if train.save_strategy == "no":
            saver.check_model_space()
        else:
            saver.check_space(more_bytes=saver.model_bytes)
        if start is not None:
            say_what_is_left_behind(start, latest, folder, model_only=train.save_only_model, keep=train.save_total_limit)
        try:
            write_latest(output.files, folder, latest)
        except OSError as error:
            raise CheckpointError(f"{folder / LATEST} cannot be written: {reason_of(error)}") from error
    return saver


def spare_bytes(config: Config, plan: Plan, *, one_memory: bool) -> int:
    """Host memory that the copies of a checkpoint may take: half of what is free now, and no more than ``host_memory`` leaves, of
    which the device takes its part where both are ``one_memory``."""
    spare = host_limits()[0].num_bytes // 2
    if config.engine.host_memory is not None:
        spare = min(spare, config.engine.host_memory - plan.total("@host") - (plan.total("@device") if one_memory else 0))
    return max(spare, 0)


def run(loop: Loop) -> None:
    """Train, save, evaluate, and leave LLaMA-Factory's files in the output folder."""
    config, history, folder = loop.config, loop.history, loop.output.path
    records = Records(folder)
    epoch, interrupts = 0.0, None
    with Watchdog(loop.lanes(), 60 * config.train.watchdog_minutes):
        if config.train.do_train:
            metrics = loop.run()
            epoch = metrics["epoch"]
            loop.progress.activity("saving the model")
            with Interrupts() as interrupts, loop.waiting("model writer"):  # a first signal does not cost the model
                save_model(loop.output, loop.engine)
            if interrupts.received is not None:
                raise interrupts.error(
                    f"all steps are taken and the model is in {folder}; its tokenizer and records are not written"
                )
            with records.writing("the tokenizer"):
                save_tokenizer_beside(loop.output, loop.tokenizer)
            with records.writing("train_results.json"):
                history.write_results("train", metrics)
            write_records(loop, records)  # an evaluation may be long, and is no reason to lose them
            if loop.interrupts.received is not None:
                left_out = "; the last evaluation was left out" if wants_evaluation(config) else ", and nothing is left to do"
                records.close(f"the model is in {folder}")
                raise loop.interrupts.error(f"that was the last step: the model is in {folder}{left_out}")
        if wants_evaluation(config):
            with Interrupts("finishing the evaluation") as interrupts:
                metrics = loop.evaluate(epoch)
                if config.train.stage == "pt" and "eval_loss" in metrics:
                    metrics["perplexity"] = _perplexity(metrics["eval_loss"])
                with records.writing("eval_results.json"):
                    history.write_results("eval", metrics)
                if config.train.do_train:
                    write_records(loop, records)
    if config.train.do_train:
        if loop.disk is not None:
            logger.info("%s", loop.disk.summary())
        logger.info("%s", _what_was_done(loop))
    what_is_there = f"the model is in {folder}" if config.train.do_train else "the evaluation is done"
    records.close(what_is_there)
    if interrupts is not None and interrupts.received is not None:
        raise interrupts.error(f"the evaluation was finished first: {what_is_there}, and nothing is left to do")


def write_records(loop: Loop, records: Records) -> None:
    """What training leaves beside the model."""
    config, history, output = loop.config, loop.history, loop.output
    with records.writing(STATE_NAME):
        history.write_state()
    with records.writing(CARD):
        output.write(CARD, card_of(loop).encode("utf-8"))
    if config.train.plot_loss:
        with records.writing("the pictures of the loss"):
            plot_history(history.entries, output, title=output.path.name)


def _what_was_done(loop: Loop) -> str:
    step, taken, folder = loop.totals.step, loop.steps_taken, loop.output.path
    if not taken:
        return f"no step was left to train; the model of step {step} is in {folder}"
    steps = "1 step" if taken == 1 else f"{taken} steps"
    which = "" if taken == step else f", {step - taken + 1} to {step},"
    return f"trained {steps}{which} in {clock_time(loop.history.elapsed_s)}; the model is in {folder}"


def card_of(loop: Loop) -> str:
    """What the model's card says of this run."""
    counts = {"num_params": loop.engine.num_params, "num_trained": loop.engine.num_trained}
    return model_card(loop.config, entries=loop.history.entries, total_steps=loop.cadence.total_steps, **counts)


def _perplexity(loss: float) -> float:
    try:
        return math.exp(loss)
    except OverflowError:
        return math.inf


def _say_what_comes(asked: Asked, engine: Engine, question: Problem) -> None:
    """The plan; a line of parameters; and one of rows, epochs, steps."""
    logger.info("%s", render(engine.plan, question))
    logger.info(
        "trainable params: %s || all params: %s || trainable%%: %.4f",
        f"{engine.num_trained:,}",
        f"{engine.num_params:,}",
        100 * engine.num_trained / engine.num_params,
    )
    facts: dict[str, Any] = {"rows": len(asked.data.train), "rows a step": asked.sampler.step_rows, "steps": asked.total_steps}
    facts |= {f"{name} rows": len(samples) for name, samples in asked.data.eval.items()}
    facts["epochs"] = f"{asked.sampler.epochs_of(asked.total_steps):.3g}"
    logger.info("training: %s", ", ".join(f"{value} {name}" for name, value in facts.items()))
