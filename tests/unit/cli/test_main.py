"""The command line: quick help, errors without a trace, and flags that reach their settings."""

import json
import os
import subprocess
import sys

import pytest
from click.testing import CliRunner

from kvferry.cli.main import SUBCOMMANDS, cli
from kvferry.errors import BusyError


def run(*arguments):
    return CliRunner().invoke(cli, list(arguments))


def test_help_lists_every_command_and_imports_none_of_them():
    script = (
        "import sys\n"
        "from kvferry.cli.main import cli\n"
        "try: cli(['--help'])\n"
        "except SystemExit: pass\n"
        "heavy = {'numpy', 'aiohttp', 'rich', 'msgspec', 'kvferry.cli.serve'} & set(sys.modules)\n"
        "sys.exit(f'imported {heavy}' if heavy else 0)\n"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    for name, known in SUBCOMMANDS.items():
        assert f"  {name} " in done.stdout
        assert known.summary in done.stdout


@pytest.mark.parametrize("name", SUBCOMMANDS)
def test_each_command_teaches_by_an_example(name):
    done = run(name, "--help")
    assert done.exit_code == 0
    assert "Example" in done.output
    assert f"kvferry {name}" in done.output


def test_version():
    from kvferry import __version__

    assert run("version").output == f"kvferry {__version__}\n"
    assert json.loads(run("version", "--json").output) == {"kvferry": __version__}


def test_errors_are_two_lines_without_a_trace():
    done = run("route", "--decode", "nonsense")
    assert done.exit_code == 2
    first, second = done.output.splitlines()
    assert first == "error: decode: 'nonsense' is not a base URL"
    assert second == "  fix: write http://host:port"


def test_an_error_is_whole_again_after_it_was_printed():
    from kvferry.cli import main

    error = BusyError("full", fix="wait")
    main.print_error(error)
    assert str(error) == "full; wait"


def test_a_missing_flag_is_a_usage_error():
    done = run("route")
    assert done.exit_code == 2
    assert "--decode" in done.output


def test_an_unknown_command_is_a_usage_error():
    assert run("sail").exit_code == 2


def test_route_passes_its_flags_on(monkeypatch):
    seen = {}
    monkeypatch.setattr(
        "kvferry.router.serve.serve",
        lambda config, on_ready: (seen.update(config=config), on_ready("http://h:1")),
    )
    done = run(
        *("route", "--prefill", "http://p:1", "--decode", "http://d:1", "--decode", "http://d:2"),
        *("--on-no-prefill", "error", "--inflight-max", "7", "--drain-s", "2", "--port", "0"),
    )
    assert done.output == "ready http://h:1\n"
    config = seen["config"]
    assert config.prefill == ("http://p:1",)
    assert config.decode == ("http://d:1", "http://d:2")
    assert (config.on_no_prefill, config.inflight_max, config.drain_s, config.port) == (
        "error",
        7,
        2.0,
        0,
    )


def test_route_says_when_it_cannot_listen(monkeypatch):
    def refuse(_config, **_options):
        raise OSError(98, "Address already in use")

    monkeypatch.setattr("kvferry.router.serve.serve", refuse)
    done = run("route", "--decode", "http://d:1")
    assert done.exit_code == 2
    assert "cannot listen on 127.0.0.1:8000: Address already in use" in done.output
    assert "--port" in done.output


@pytest.fixture
def engine_settings(monkeypatch):
    seen = {}
    monkeypatch.setattr(
        "kvferry.engines.reference.handoff.kvferry_connector",
        lambda config: seen.update(ferry=config),
    )
    monkeypatch.setattr(
        "kvferry.engines.reference.server.serve",
        lambda config: seen.update(server=config) or seen.get("status", 0),
    )
    return seen


def test_engine_passes_its_flags_on(engine_settings, tmp_path):
    done = run(
        *("engine", "--role", "prefill", "--blocks", "9", "--on-load-failure", "fail"),
        *("--transport", "shm", "--transport", "tcp", "--socket-dir", str(tmp_path)),
        *("--lease-s", "3"),
    )
    assert done.exit_code == 0, done.output
    server, ferry = engine_settings["server"], engine_settings["ferry"]
    assert (server.model, server.role, server.blocks, server.on_load_failure) == (
        "tiny",
        "prefill",
        9,
        "fail",
    )
    assert (ferry.transports, ferry.directory, ferry.lease_s) == (
        ("shm", "tcp"),
        str(tmp_path),
        3.0,
    )


def test_the_environment_fills_what_the_command_line_leaves_open(engine_settings, monkeypatch):
    monkeypatch.setenv("KVFERRY_LEASE_S", "7")
    monkeypatch.setenv("KVFERRY_TRANSPORTS", "tcp")
    run("engine", "--transport", "shm")
    ferry = engine_settings["ferry"]
    assert ferry.lease_s == 7.0
    assert ferry.transports == ("shm",)


def test_the_status_of_an_engine_is_the_exit_code(engine_settings):
    engine_settings["status"] = 1
    assert run("engine").exit_code == 1


@pytest.mark.slow
def test_serve_ends_in_good_order_and_says_so(tmp_path):
    """One signal to the launcher ends real processes, and the exit code is 0."""
    import signal

    with subprocess.Popen(
        [sys.executable, "-m", "kvferry.cli.main", "serve", "tiny", "--port", "0"],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env={**os.environ, "PYTHONUNBUFFERED": "1", "TMPDIR": str(tmp_path)},
    ) as serve:
        seen = []
        for line in serve.stdout:
            seen.append(line)
            if "curl" in line:
                break
        serve.send_signal(signal.SIGINT)
        seen += list(serve.stdout)
        assert serve.wait(20.0) == 0, "".join(seen)
    text = "".join(seen)
    for name in ("prefill-0", "decode-0", "router"):
        assert f"[{name}] ready http://127.0.0.1:" in text
    assert "[kvferry] all processes have ended" in text
    assert list(tmp_path.iterdir()) == []
