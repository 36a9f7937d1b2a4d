"""Building and loading the native CPU operators.

Owner of the state: the one library handle of the process (`library()`), and the per-user cache of built libraries.

The sources beside this file are compiled once for this machine, at first use, with the system's C++ compiler, and kept
under `$TENUTO_CACHE_DIR` (default: `$XDG_CACHE_HOME/tenuto` or `~/.cache/tenuto`) by a key over source, flags, compiler
and processor. Several processes may race: one builds behind a lock file, the others find the result, which appears by
an atomic rename. Any failure means "no native operators": one log line, and the torch definitions serve.
"""

import ctypes
import fcntl
import functools
import hashlib
import logging
import os
import platform
import shutil
import subprocess
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

log = logging.getLogger(__name__)

BUILD_LIMIT_S = 120.0
_SOURCES = ("native.cpp", "native_attention.cpp", "native_decoder.cpp", "native_lower.cpp", "native_blocks.cpp")
_HEADERS = ("native.h", "native_ops.h", "native_attention.h", "native_pool.h")
_FLAGS = ("-O3", "-std=c++17", "-fPIC", "-pthread", "-Wno-ignored-attributes")

_pointer, _int, _long, _float = ctypes.c_void_p, ctypes.c_int, ctypes.c_int64, ctypes.c_float
_SIGNATURES = {
    "tn_panel_width": [],
    "tn_panel_bytes": [_long, _long],
    "tn_linear": [_pointer, _int, _pointer, _int, _pointer, _pointer, _long, _long, _long, _int],
    "tn_rms_norm": [_pointer, _int, _pointer, _pointer, _long, _long, _float, _int],
    "tn_silu_mul": [_pointer, _int, _pointer, _long, _long, _int],
    "tn_rope_store": [*[_pointer] * 3, _int, *[_pointer] * 3, _int, _pointer, _pointer, _int],
    "tn_paged_decode": [_pointer, _int, _pointer, _int, _pointer, _pointer, _float, _pointer, _pointer, _int],
    "tn_paged_prefill": [_pointer, _int, _pointer, _int, *[_pointer] * 3, _float, _pointer, _pointer, _int],
    "tn_forward": [_pointer, _pointer, _pointer, _pointer, _int],
    "tn_lower_pack": [_pointer, _int, _pointer, _long, _long, _int],
    "tn_lower_unpack": [_pointer, _pointer, _int, _long, _long, _int],
    "tn_copy_blocks": [*[_pointer] * 4, _long, _long, *[_pointer] * 3],
}
_RETURNING = (
    "tn_panel_width",
    "tn_panel_bytes",
    "tn_rope_store",
    "tn_paged_decode",
    "tn_paged_prefill",
    "tn_forward",
    "tn_copy_blocks",
)


class BuildError(Exception):
    """The native library cannot be had here; the message says why."""


@functools.cache
def library() -> ctypes.CDLL | None:
    """The loaded library, built if need be; None where it is disabled (`TENUTO_NATIVE=0`) or cannot be built."""
    if os.environ.get("TENUTO_NATIVE", "1") == "0":
        log.info("native CPU operators: disabled by TENUTO_NATIVE=0")
        return None
    try:
        started = time.monotonic()
        path = build(cache_dir())
        loaded = load(path)
    except (BuildError, OSError) as error:
        log.warning("native CPU operators: unavailable (%s); torch definitions serve", error)
        return None
    log.info("native CPU operators: %s (%.1f s)", path.name, time.monotonic() - started)
    return loaded


def cache_dir() -> Path:
    own = os.environ.get("TENUTO_CACHE_DIR")
    if own:
        return Path(own)
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "tenuto"


def load(path: Path) -> ctypes.CDLL:
    """The library at `path`, built again once if the file there is damaged. Raises BuildError or OSError."""
    try:
        return _open(path)
    except (OSError, AttributeError):
        path.unlink(missing_ok=True)
        return _open(build(path.parent))


def _open(path: Path) -> ctypes.CDLL:
    loaded = ctypes.CDLL(str(path))
    for name, arguments in _SIGNATURES.items():
        function = getattr(loaded, name)
        function.argtypes = arguments
        function.restype = ctypes.c_int if name in _RETURNING else None
    return loaded


def build(directory: Path) -> Path:
    """The library for this machine in `directory`, compiled unless it is already there. Raises BuildError."""
    compiler = shutil.which(os.environ.get("CXX") or "g++") or shutil.which("clang++")
    if compiler is None:
        raise BuildError("no C++ compiler found")
    target = directory / f"native-{_key(compiler)}.so"
    if target.exists():
        return target
    try:
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        if directory.stat().st_uid != os.geteuid():
            raise BuildError(f"{directory} belongs to another user")
        with _locked(directory / "native.lock"):
            if not target.exists():
                _compile(compiler, target)
    except OSError as error:
        raise BuildError(f"cannot write {directory}: {error}") from error
    return target


def _compile(compiler: str, target: Path) -> None:
    here = Path(__file__).parent
    deadline = time.monotonic() + BUILD_LIMIT_S
    with tempfile.TemporaryDirectory(dir=target.parent) as scratch:
        objects = [Path(scratch) / f"{source}.o" for source in _SOURCES]
        flags = [*_FLAGS, f"-march={_architecture()}", "-c"]
        with ThreadPoolExecutor(len(_SOURCES)) as pool:
            commands = [
                [compiler, *flags, str(here / source), "-o", str(compiled)]
                for source, compiled in zip(_SOURCES, objects, strict=True)
            ]
            list(pool.map(lambda command: _run(command, deadline), commands))
        built = Path(scratch) / target.name
        _run([compiler, "-shared", *map(str, objects), "-pthread", "-o", str(built)], deadline)
        os.replace(built, target)


def _run(command: list[str], deadline: float) -> None:
    left = deadline - time.monotonic()
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=max(left, 0.1), check=False)
    except subprocess.TimeoutExpired as error:
        raise BuildError(f"compilation took longer than {BUILD_LIMIT_S:.0f} s") from error
    if done.returncode != 0:
        lines = done.stderr.strip().splitlines() or [f"exit status {done.returncode}"]
        raise BuildError(f"{Path(command[0]).name}: {lines[0]}")


def _architecture() -> str:
    """What the compiler may assume of the processor; all of it, unless `TENUTO_NATIVE_ARCH` names less."""
    return os.environ.get("TENUTO_NATIVE_ARCH", "native")


def _key(compiler: str) -> str:
    here = Path(__file__).parent
    version = subprocess.run([compiler, "--version"], capture_output=True, text=True, timeout=20, check=False).stdout
    parts = [version, " ".join(_FLAGS), _architecture(), _processor()]
    parts += [(here / name).read_text() for name in (*_HEADERS, *_SOURCES)]
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()[:20]


def _processor() -> str:
    """Whatever decides the instruction set that -march=native picks."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return f"{platform.machine()} {platform.processor()}"
    wanted = ("vendor_id", "cpu family", "model", "flags", "Features", "CPU part")
    found = {line.split(":")[0].strip(): line for line in reversed(lines)}
    return platform.machine() + "".join(found.get(name, "") for name in wanted)


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    """An advisory lock between processes; waits no longer than a build may take."""
    deadline = time.monotonic() + BUILD_LIMIT_S
    with path.open("w") as handle:
        while True:
            try:
                fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() > deadline:
                    raise BuildError("another process holds the build lock") from None
                time.sleep(0.05)
        yield
