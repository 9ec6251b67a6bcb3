"""The command line: one small function a command, and the one place where an error becomes an exit code.

Exit codes: 0 done, 1 wrong or failed, 2 user error, 3 does not fit, 4 model refused, 129, 130 or 143 interrupted. For 2 to
4 there is one ``error:`` line on standard error and no traceback (LAYERFERRY_DEBUG=1 shows it), and so for a file that the system
refuses; a fault of ours keeps its traceback.
Results go to standard output, logs to standard error. ``--help`` answers at once: what is heavy is imported inside the commands.
Checked by ``tests/cli``.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import traceback
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any, NoReturn, Protocol

from layerferry.config import Config, debug_requested
from layerferry.errors import ConfigError, LayerFerryError, PlanError
from layerferry.planner.host import address_space_told, check_address_space
from layerferry.version import VERSION

INTERRUPTED = 130
LIGHT = ("version", "env")
"""Commands that load no model."""


class Report(Protocol):
    """What plan, verify and probe return: the same facts for a person and for a program."""

    def render(self) -> str: ...

    def to_dict(self) -> dict[str, Any]: ...


class Parser(argparse.ArgumentParser):
    """Reports a wrong command line as every other user error is reported."""

    def error(self, message: str) -> NoReturn:
        raise ConfigError(f"{message} (see {self.prog} --help)")


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code."""
    _fill_closed_streams()
    try:
        arguments, rest = _parser().parse_known_args(argv)
        if arguments.command not in LIGHT:
            check_address_space()
        run: Callable[[argparse.Namespace, list[str]], int] = arguments.run
        code = run(arguments, rest)
        sys.stdout.flush()
        return code
    except LayerFerryError as error:
        if debug_requested():
            traceback.print_exc()
        _say(f"error: {' '.join(str(error).split())}")
        return error.exit_code
    except BrokenPipeError:  # the reader went away (``| head``); keep the interpreter from failing at its last flush
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except (OSError, MemoryError, ImportError, RuntimeError) as error:  # BrokenPipeError is above
        return _system_said_no(error)
    except KeyboardInterrupt:
        _say("interrupted")
        return INTERRUPTED


def _fill_closed_streams() -> None:
    """Streams that whoever has started us has closed lead nowhere: else a checkpoint's file would get the number of one, and what
    a library prints would land in it."""
    while (descriptor := os.open(os.devnull, os.O_RDWR)) <= 2:
        pass
    os.close(descriptor)
    for name in ("stdout", "stderr"):
        if getattr(sys, name) is None:
            setattr(sys, name, open(os.devnull, "w"))  # noqa: SIM115


def _system_said_no(error: Exception) -> int:
    """The exit code for a file, disk or limit that nothing closer by has spoken of; what is a fault of ours is raised again."""
    told, code = address_space_told(error), PlanError.exit_code
    if told is None and isinstance(error, MemoryError):
        told = "the system has given this process no more memory: `layerferry plan` says what a run takes, host_memory bounds it"
    if told is None:
        if not isinstance(error, OSError):
            raise error
        about = f"{error.filename}: " if error.filename is not None else ""
        told, code = f"{about}{error.strerror or error} (LAYERFERRY_DEBUG=1 shows where)", 1
    if debug_requested():
        traceback.print_exc()
    _say(f"error: {told}")
    return code


def _say(text: str) -> None:
    """On standard error; the exit code is the same where that has gone away with its terminal."""
    with suppress(OSError):
        print(text, file=sys.stderr, flush=True)


def _parser() -> Parser:
    parser = Parser(
        prog="layerferry", description=_DESCRIPTION, epilog=_EPILOG, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--version", action="version", version=f"layerferry {VERSION}")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", required=True)

    def command(name: str, run: Callable[[argparse.Namespace, list[str]], int], text: str, usage: str) -> Parser:
        added: Parser = commands.add_parser(
            name, help=text, description=text, usage=f"layerferry {name} {usage}", allow_abbrev=False
        )
        added.set_defaults(run=run)
        return added

    with_json = "print one JSON object instead of text"
    command("train", _train, "train a model", "CONFIG.yaml [key=value ...]")
    plan = command(
        "plan",
        _plan,
        "what lives where, how many bytes, how many seconds a step; needs no weights",
        "CONFIG.yaml [--json] [key=value ...]",
    )
    plan.add_argument("--json", action="store_true", help=with_json)
    verify = command(
        "verify", _verify, "compare the engine with plain autograd on a small random copy of a model", "MODEL_DIR [--json]"
    )
    verify.add_argument("--json", action="store_true", help=with_json)
    probe = command("probe", _probe, "measure this machine's links, memory, device and disk", "[--disk FOLDER] [--json]")
    probe.add_argument("--disk", metavar="FOLDER", help="the disk of this folder, for disk_memory; else that of the cache")
    probe.add_argument("--json", action="store_true", help=with_json)
    data = command("data", _data, "show a few samples with the trained tokens in colour", "CONFIG.yaml [--json] [key=value ...]")
    data.add_argument("--json", action="store_true", help="print every sample of the training set, one JSON object a line")
    data.add_argument("--samples", type=int, default=3, metavar="N", help="samples to show (default: %(default)s)")
    chat = command("chat", _chat, "talk to a model", "MODEL_DIR [--prompt TEXT] [--greedy] [key=value ...]")
    chat.add_argument("--prompt", metavar="TEXT", help="answer this one message and leave")
    chat.add_argument("--system", metavar="TEXT", help="system message")
    chat.add_argument("--greedy", action="store_true", help="always take the likeliest token")
    command(
        "export",
        _export,
        "rewrite a model folder: shard size, element type",
        "MODEL_DIR|CONFIG.yaml export_dir=DIR [export_size=GB] [infer_dtype=bfloat16] [key=value ...]",
    )
    command("version", _version, "print the version", "")
    command("env", _env, "print the versions that a bug report needs", "")
    return parser


def _train(_arguments: argparse.Namespace, rest: list[str]) -> int:
    config = _run_config(rest)
    from layerferry.trainer import train

    train(config)
    return 0


def _plan(arguments: argparse.Namespace, rest: list[str]) -> int:
    config = _run_config(rest)
    from layerferry.planner import plan_for

    plan = plan_for(config)
    _print_report(plan, arguments.json)
    if not plan.fits:
        raise PlanError(plan.shortfall())
    return 0


def _verify(arguments: argparse.Namespace, rest: list[str]) -> int:
    folder = Path(_only(rest, "MODEL_DIR"))
    _log_to_stderr()
    from layerferry.verify import verify

    report = verify(folder)
    _print_report(report, arguments.json)
    return 0 if report.ok else 1


def _probe(arguments: argparse.Namespace, rest: list[str]) -> int:
    _nothing(rest)
    _log_to_stderr()
    from layerferry.config import EngineConfig
    from layerferry.planner import probe

    _print_report(probe(EngineConfig(disk_folder=arguments.disk)), arguments.json)
    return 0


def _data(arguments: argparse.Namespace, rest: list[str]) -> int:
    if arguments.samples < 1:
        raise ConfigError(f"command line: --samples: expected at least 1, found {arguments.samples}")
    config = _run_config(rest)
    from layerferry.data import preview, tokenizer

    loaded = tokenizer.load(config)
    if arguments.json:
        for sample in preview.samples(config, loaded.tokenizer):
            print(json.dumps(sample))
    else:
        for text in preview.render(config, loaded.tokenizer, arguments.samples, colour=sys.stdout.isatty()):
            print(text)
        if not config.data.streaming:
            print(preview.counts(config))
    return 0


def _chat(arguments: argparse.Namespace, rest: list[str]) -> int:
    from layerferry.chat import chat
    from layerferry.interop.llamafactory import chat_options

    _log_to_stderr()
    path, overrides = _config_and_overrides(rest)
    if arguments.greedy:
        overrides.append("do_sample=false")
    options = chat_options(path, overrides)
    chat(options if arguments.system is None else replace(options, default_system=arguments.system), prompt=arguments.prompt)
    return 0


def _export(_arguments: argparse.Namespace, rest: list[str]) -> int:
    from layerferry.interop.export import export
    from layerferry.interop.llamafactory import export_options

    _log_to_stderr()
    export(export_options(*_config_and_overrides(rest)))
    return 0


def _version(_arguments: argparse.Namespace, rest: list[str]) -> int:
    _nothing(rest)
    print(f"layerferry {VERSION}")
    return 0


def _env(_arguments: argparse.Namespace, rest: list[str]) -> int:
    from layerferry.environment import facts

    _nothing(rest)
    for name, value in facts().items():
        print(f"{name}: {value}")
    return 0


def _run_config(rest: Sequence[str]) -> Config:
    """The configuration of a run, with its notices already in the log; read before anything heavy is imported."""
    from layerferry.interop.llamafactory import read_config

    if not rest:
        raise ConfigError("no configuration: give a file or key=value settings (see layerferry train --help)")
    _log_to_stderr()
    return read_config(*_config_and_overrides(rest))


def _print_report(report: Report, as_json: bool) -> None:
    print(json.dumps(report.to_dict()) if as_json else report.render(), flush=True)


def _config_and_overrides(rest: Sequence[str]) -> tuple[Path | None, list[str]]:
    """Split ``CONFIG key=value --key value --flag`` into the file and OmegaConf dotlist items."""
    path: Path | None = None
    overrides: list[str] = []
    pending = list(rest)
    while pending:
        token = pending.pop(0)
        if token.startswith("--"):
            key = token[2:]
            if "=" not in key:
                has_value = bool(pending) and not pending[0].startswith("--")
                key = f"{key}={pending.pop(0) if has_value else 'true'}"
            overrides.append(key)
        elif "=" in token and not Path(token).exists():
            overrides.append(token)
        elif path is None:
            path = Path(token)
        else:
            raise ConfigError(f"command line: {token!r} is neither key=value nor the one configuration file ({path})")
    return path, overrides


def _only(rest: Sequence[str], what: str) -> str:
    if len(rest) != 1 or rest[0].startswith("-"):
        raise ConfigError(f"command line: expected one argument, {what}, and found {' '.join(rest) or 'none'}")
    return rest[0]


def _nothing(rest: Sequence[str]) -> None:
    if rest:
        raise ConfigError(f"command line: unexpected argument {rest[0]!r}")


def _log_to_stderr() -> None:
    import logging

    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(logging.Formatter("%(message)s"))
    logger = logging.getLogger("layerferry")
    logger.handlers[:] = [handler]
    logger.setLevel(logging.INFO)
    logger.propagate = False


_DESCRIPTION = """\
Full-precision, full-parameter training of language models far larger than the GPU's memory, on one GPU.
Takes LLaMA-Factory's configuration files and data unchanged (stages pt and sft, finetuning_type full and freeze)."""

_EPILOG = """\
exit codes: 0 done, 1 wrong or failed, 2 user error, 3 does not fit this machine, 4 model refused
settings on the command line win over the file: key=value, or --key value"""
