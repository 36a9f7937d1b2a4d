"""The ``tenuto`` command. Holds no state: sub-commands come from the entry-point group ``tenuto.commands``.

A command is a callable that takes its arguments (``list[str]``, without the program and command names) and returns an
exit status or None. It is imported only when it is run, so that ``tenuto --help`` stays fast and the light install
lists commands whose dependencies it does not have.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Sequence
from importlib.metadata import EntryPoint, PackageNotFoundError, entry_points, version

GROUP = "tenuto.commands"

# One line of help and the extra that brings what the command needs. Commands of other distributions are listed with
# the name of their distribution instead.
_HELP: dict[str, tuple[str, str | None]] = {
    "serve": ("start the inference server", "server"),
    "demo": ("run coding-agent sessions against a server and show what the hints gained", "server"),
    "bench": ("measure a server: replay, kernels", "server"),
    "compare": ("compare two benchmark reports", "server"),
    "gateway": ("route sessions over several servers", "server"),
    "simulate": ("replay traces against policies without a model", "server"),
    "run": ("run a coding agent behind a local proxy that sends hints for it", "proxy"),
    "proxy": ("serve the local proxy for many clients", "proxy"),
    "hooks": ("install or remove command hooks of coding agents", None),
    "top": ("watch sessions, tiers and leases of a server", "top"),
}

Command = Callable[[list[str]], "int | None"]


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command line and returns its exit status: 0 done, 1 failed, 2 wrong usage or missing extra."""
    try:
        status = _main(argv)
        sys.stdout.flush()
        return status
    except BrokenPipeError:  # whoever read this has seen enough (``tenuto --help | head``)
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1


def _main(argv: Sequence[str] | None) -> int:
    args = list(sys.argv[1:] if argv is None else argv)
    if args and args[0] in ("-V", "--version"):
        print(f"tenuto {_version()}")
        return 0
    commands = {point.name: point for point in sorted(entry_points(group=GROUP), key=lambda p: p.name)}
    if not args or args[0] in ("-h", "--help", "help"):
        print(_usage(commands))
        return 0
    name, rest = args[0], args[1:]
    point = commands.get(name)
    if point is None:
        print(f"tenuto: no command {name!r}\n\n{_usage(commands)}", file=sys.stderr)
        return 2
    try:
        command: Command = point.load()
    except ModuleNotFoundError as error:
        print(f"tenuto {name}: {_missing(name, error)}", file=sys.stderr)
        return 2
    except AttributeError:
        print(f"tenuto {name}: this installation does not provide {point.value}", file=sys.stderr)
        return 2
    try:
        return command(rest) or 0
    except ModuleNotFoundError as error:
        print(f"tenuto {name}: {_missing(name, error)}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130


def _usage(commands: dict[str, EntryPoint]) -> str:
    lines = ["usage: tenuto <command> [options]", "", "commands:"]
    width = max((len(name) for name in commands), default=8)
    for name, point in commands.items():
        origin = f"from {point.dist.name}" if point.dist is not None else point.value
        lines.append(f"  {name:<{width}}  {_HELP[name][0] if name in _HELP else origin}")
    if not commands:
        lines.append("  (none installed)")
    lines += ["", "  tenuto <command> --help   options of a command", "  tenuto --version          version"]
    return "\n".join(lines)


def _missing(name: str, error: ModuleNotFoundError) -> str:
    module = (error.name or "").partition(".")[0]
    extra = _HELP.get(name, ("", None))[1]
    if module.startswith("tenuto"):
        return f"this installation does not provide {error.name}"
    if extra is None:
        return f"needs the module {module!r}, which is not installed"
    return f"needs the module {module!r}, which is not installed. Try: pip install 'tenuto[{extra}]'"


def _version() -> str:
    try:
        return version("tenuto")
    except PackageNotFoundError:
        return "unknown"


if __name__ == "__main__":
    sys.exit(main())
