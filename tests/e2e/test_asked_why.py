"""``kvferry why`` over real processes: one that went well, and one whose prefill was killed."""

import json
import os
import signal
import threading
import time
import urllib.request

import pytest
from click.testing import CliRunner

from kvferry.cli.main import cli
from kvferry.launcher import Fleet

BODY = {"model": "tiny", "prompt": "a prompt that fills more than one block", "max_tokens": 4}
OFFER = {"do_remote_decode": True, "do_remote_prefill": False}
LIMIT_S = 10.0


def post(url, body, **headers):
    request = urllib.request.Request(
        url + "/v1/completions",
        json.dumps(body).encode(),
        {"Content-Type": "application/json", **headers},
    )
    with urllib.request.urlopen(request, timeout=LIMIT_S) as answer:
        return json.load(answer)


def why(*arguments):
    done = CliRunner().invoke(cli, ["why", *arguments, "--json"])
    assert done.exit_code == 0, done.output
    return json.loads(done.stdout)


@pytest.mark.slow
def test_requests_are_explained(tmp_path, monkeypatch):
    monkeypatch.setenv("KVFERRY_DUMP_DIR", str(tmp_path))
    lines = []
    with Fleet("tiny", prefill=1, decode=1, log=lambda _name, line: lines.append(line)) as fleet:
        (prefill,), (decode,) = fleet.prefill_urls, fleet.decode_urls
        answer = post(fleet.router_url, BODY)
        told = why(answer["id"], "--url", fleet.router_url)
        assert {trail["kind"] for trail in told["trails"]} == {"claim", "offer", "request"}
        assert all(line["aligned"] for line in told["timeline"])
        assert "went well" in told["story"]
        assert BODY["prompt"] not in json.dumps(told)

        label = {"x-request-id": "doomed"}
        offered = post(prefill, {**BODY, "max_tokens": 1, "kv_transfer_params": OFFER}, **label)
        params = offered["kv_transfer_params"]
        with urllib.request.urlopen(f"{prefill}/debug/why?id=doomed", timeout=LIMIT_S) as found:
            pid = int(json.load(found)["name"].rpartition("-")[2])
        os.kill(pid, signal.SIGUSR1)
        give_up_at = time.monotonic() + LIMIT_S
        while not list(tmp_path.glob("kvferry-*.json")):
            assert time.monotonic() < give_up_at, "\n".join(lines)
            threading.Event().wait(0.01)
        os.kill(pid, signal.SIGKILL)
        post(decode, {**BODY, "kv_transfer_params": params}, **label)
        (dump,) = tmp_path.glob("kvferry-*.json")
        told = why("doomed", "--url", decode, "--dump", str(dump))
        assert {trail["kind"] for trail in told["trails"]} == {"claim", "offer"}
        assert "failed after" in told["story"]
        assert "Try this: " in told["story"]
        assert any("it failed after" in line for line in lines)
