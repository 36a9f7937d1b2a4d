"""The ``serve`` command: settings, refusals, a real process with signals."""

import contextlib
import http.client
import json
import logging
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator

import pytest

from tenuto_server import commands, options, telemetry
from tenuto_server.config import ServerConfig
from tenuto_server.errors import ConfigError


def config_of(*argv: str) -> ServerConfig:
    return options.config_from(options.serve_parser().parse_args(list(argv)))


@pytest.fixture
def own_logging():
    """``serve`` sets up the process's logging; this gives it back."""
    root = logging.getLogger()
    before = root.handlers[:], root.level
    yield
    root.handlers[:], level = before
    root.setLevel(level)


def test_defaults_are_those_of_the_settings():
    given, default = config_of(), ServerConfig()
    assert given == default


def test_flags():
    config = config_of(
        *("--model", "toy", "--dtype", "fp32", "--port", "0", "--device-bytes", "64MiB", "--host-bytes", "0"),
        *("--disk-dir", "kv", "--host-bandwidth", "1GB", "--api-key", "a=k1", "--api-key", "b=k=2", "--threads", "2"),
        *("--max-context", "4096", "--step-tokens", "256", "--invariant", "--journal", "j", "--policy", "lru"),
        *("--secret", "s" * 16, "--recorder", "traces", "--recorder-bytes", "2MiB"),
        *("--model-alias", "local-*", "--model-alias", "mine", "--keep-attribution", "--prompt-memory", "1MiB"),
    )
    assert config.model_aliases[-2:] == ("local-*", "mine")
    assert "claude-*" in config.model_aliases
    assert (config.strip_attribution, config.prompt_memory_bytes) == (False, 2**20)
    assert config.api_keys == {"a": "k1", "b": "k=2"}
    assert (config.device_bytes, config.host_bytes, config.disk_bytes) == (64 * 2**20, 0, 8 * 2**30)
    assert (str(config.recorder_path), config.recorder_bytes_max) == ("traces", 2 * 2**20)
    assert (config.host_bandwidth, config.disk_bandwidth) == (1e9, None)
    assert (config.max_context_tokens, config.step_tokens_max, config.threads) == (4096, 256, 2)
    assert (config.invariant, config.policy, str(config.journal_path), config.port) == (True, "lru", "j", 0)


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        (["--disk-bytes", "1GiB"], "--disk-dir"),
        (["--secret", "short"], "16 characters"),
        (["--port", "70000"], "65535"),
        (["--threads", "0"], "threads"),
    ],
)
def test_settings_that_cannot_be(argv, words):
    with pytest.raises(ConfigError, match=words):
        config_of(*argv)


@pytest.mark.parametrize(
    "argv", [["--device-bytes", "much"], ["--api-key", "nokey"], ["--dtype", "int3"], ["--nonsense"], ["--port", "x"]]
)
def test_wrong_usage_is_status_2(argv, capsys):
    with pytest.raises(SystemExit) as ended:
        commands.serve(argv)
    assert ended.value.code == 2
    assert argv[0] in capsys.readouterr().err


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        (["--model", "no-such-model"], ["no-such-model", "toy"]),
        (["--model", "toy", "--policy", "magic"], ["magic", "lru"]),
        (["--model", "toy", "--device-bytes", "1KiB"], ["--device-bytes", "at least"]),
        (["--model", "toy", "--device", "warp"], ["--device", "auto"]),
        (["--model", "toy", "--host", "256.1.1.1"], ["256.1.1.1"]),
    ],
)
def test_a_server_that_cannot_start_says_why_and_what_to_do(argv, words, capsys, own_logging):
    assert commands.serve([*argv, *([] if "--host" in argv else ["--port", "0"])]) == 1
    told = next(line for line in capsys.readouterr().err.splitlines() if line.startswith("tenuto serve: "))
    for word in words:
        assert word in told


def test_a_port_in_use_is_found_before_the_model_is_loaded(capsys, own_logging):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        assert commands.serve(["--model", "no-such-model", "--port", port]) == 1
    told = capsys.readouterr().err
    assert port in told
    assert "no-such-model" not in told


def test_the_secret_outlives_the_process_only_beside_a_disk(tmp_path):
    kept = ServerConfig(disk_dir=tmp_path, disk_bytes=1)
    assert options.secret_of(kept) == options.secret_of(kept)
    assert (tmp_path / "secret").stat().st_mode & 0o777 == 0o600
    assert [p.name for p in tmp_path.iterdir()] == ["secret"]
    assert options.secret_of(ServerConfig()) != options.secret_of(ServerConfig())
    named = ServerConfig(secret="a secret of many characters")
    assert options.secret_of(named) == options.secret_of(named) != options.secret_of(kept)
    (tmp_path / "secret").write_bytes(b"x")
    with pytest.raises(ConfigError, match="damaged"):
        options.secret_of(kept)


def test_importing_the_commands_is_cheap():
    code = (
        "import sys, tenuto_server.commands; print(sorted({'torch', 'fastapi', 'numpy', 'uvicorn'} & set(sys.modules)))"
    )
    path = os.pathsep.join(p for p in sys.path if p)
    done = subprocess.run(
        [sys.executable, "-c", code], env={**os.environ, "PYTHONPATH": path}, capture_output=True, text=True
    )
    assert done.stdout.strip() == "[]", done.stderr


class Process:
    """``tenuto serve`` as a process of its own."""

    def __init__(self, folder, *argv):
        self.port_file = folder / "port"
        arguments = ["--model", "toy", "--port", "0", "--port-file", str(self.port_file), *argv]
        code = f"import sys; from tenuto_server.commands import serve; sys.exit(serve({arguments!r}))"
        path = os.pathsep.join(p for p in sys.path if p)
        self.process = subprocess.Popen(
            [sys.executable, "-c", code],
            env={**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    def wait_ready(self) -> int:
        deadline = time.monotonic() + 60
        while not self.port_file.exists():
            assert self.process.poll() is None, self.process.communicate()
            assert time.monotonic() < deadline
            time.sleep(0.05)
        return int(self.port_file.read_text())


@contextlib.contextmanager
def post(port: int, body: dict) -> Iterator[http.client.HTTPResponse]:
    with contextlib.closing(http.client.HTTPConnection("127.0.0.1", port, timeout=20)) as connection:
        connection.request("POST", "/v1/chat/completions", json.dumps(body), {"content-type": "application/json"})
        yield connection.getresponse()


def test_a_process_serves_and_ends_well_on_a_signal(tmp_path):
    flags = [
        "--disk-dir",
        str(tmp_path / "kv"),
        "--disk-bytes",
        "16MiB",
        "--device-bytes",
        "4MiB",
        "--host-bytes",
        "1MiB",
    ]
    talk = {"model": "toy", "messages": [{"role": "user", "content": "secret words " * 20}], "temperature": 0}
    server = Process(tmp_path, *flags)
    try:
        port = server.wait_ready()
        with post(port, {**talk, "max_tokens": 20, "ignore_eos": True}) as answer:
            assert answer.status == 200
            assert json.loads(answer.read())["usage"]["completion_tokens"] == 20
        # A stream that runs when the signal comes is finished, not cut.
        with post(port, {**talk, "max_tokens": 400, "ignore_eos": True, "stream": True}) as running:
            assert running.read(6) == b"data: "
            server.process.send_signal(signal.SIGTERM)
            assert running.read().endswith(b"data: [DONE]\n\n")
        out, err = server.process.communicate(timeout=30)
    finally:
        server.process.kill()
        server.process.wait()
    assert server.process.returncode == 0, err
    assert f"http://127.0.0.1:{port}/v1" in out
    assert out.rstrip().endswith("stopped")
    assert "secret words" not in out + err
    assert "generated=400" in err
    assert not server.port_file.exists()
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.1", port), timeout=1)


def test_log_lines_are_single_lines_with_facts(capsys, own_logging):
    telemetry.setup_logging("info")
    telemetry.log_event(logging.getLogger("x"), "turn", id="a", session="two words\n", none=None, seconds=0.25)
    line = capsys.readouterr().err
    assert line.endswith('INFO x turn id=a session="two words\\n" seconds=0.25\n')
    assert line.count("\n") == 1
    with pytest.raises(ValueError, match="loud"):
        telemetry.setup_logging("loud")


def test_spans_reach_opentelemetry():
    trace_sdk = pytest.importorskip("opentelemetry.sdk.trace")
    from opentelemetry import trace
    from opentelemetry.sdk.trace.export import SimpleSpanProcessor
    from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

    exporter, provider = InMemorySpanExporter(), trace_sdk.TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    before, trace._TRACER_PROVIDER = trace._TRACER_PROVIDER, provider
    try:
        span = telemetry.start_span("chat", {"gen_ai.request.model": "m", "left_out": None})
        span.set_attribute("gen_ai.usage.input_tokens", 5)
        span.end()
    finally:
        trace._TRACER_PROVIDER = before
        provider.shutdown()
    (seen,) = exporter.get_finished_spans()
    assert seen.name == "chat"
    assert dict(seen.attributes) == {"gen_ai.request.model": "m", "gen_ai.usage.input_tokens": 5}
