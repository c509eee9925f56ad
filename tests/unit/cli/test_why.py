"""``kvferry why``: asks everybody, puts the sides together, and says what it could not learn."""

from __future__ import annotations

import contextlib
import http.server
import json
import threading
import urllib.parse

import pytest
from click.testing import CliRunner

from kvferry.cli.main import cli
from kvferry.errors import StallError
from kvferry.telemetry.recorder import Recorder
from kvferry.testing import FakeClock

OFFER = bytes(range(16))


class Engine(http.server.BaseHTTPRequestHandler):
    """Answers /debug/why as an engine or a router does; ``answer`` is its server's."""

    def do_GET(self):
        where = urllib.parse.urlsplit(self.path)
        assert where.path == "/debug/why"
        name = urllib.parse.parse_qs(where.query)["id"][0]
        self.server.asked.append(name)
        body = self.server.answer(name)
        body = body if isinstance(body, bytes) else json.dumps(body).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_):
        return None


@pytest.fixture
def serve():
    """``serve(answer)``: (URL of a server that answers so, names that it was asked)."""
    with contextlib.ExitStack() as stack:

        def start(answer):
            server = stack.enter_context(http.server.HTTPServer(("127.0.0.1", 0), Engine))
            server.answer, server.asked = answer, []
            thread = threading.Thread(target=server.serve_forever, args=(0.01,))
            thread.start()
            stack.callback(thread.join)
            stack.callback(server.shutdown)
            return f"http://127.0.0.1:{server.server_port}", server.asked

        yield start


@pytest.fixture
def sides():
    """Recorders of prefill and decode after one hand-off that stalled."""
    prefill, decode = Recorder(FakeClock(5.0), "prefill-0"), Recorder(FakeClock(9e5), "decode-0")
    offer = prefill.begin("offer", OFFER, handoff=OFFER, labels=("cmpl-p-0", "a1b2-1"))
    offer.note("offered", 37, 3, 60.0)
    claim = decode.begin("claim", b"c" * 16, handoff=OFFER, labels=("cmpl-d-0", "a1b2-1"))
    claim.note("claimed", 37, 30.0)
    claim.note("claim_asked", "prefill-0")
    offer.note("claim_arrived", "decode-0")
    offer.note("claim_granted")
    claim.note("granted", 5.0)
    decode.finish(b"c" * 16, "stall", StallError("nothing moved\x1b[2J", fix="see the firewall"))
    other = decode.begin("claim", b"d" * 16, handoff=b"\xee" * 16, labels=("cmpl-dx-0", "ffff-1"))
    other.note("claimed", 1, 30.0)
    return prefill, decode


def run(*arguments):
    return CliRunner().invoke(cli, ["why", *arguments])


def test_one_side_names_what_the_other_knows(serve, sides):
    prefill, decode = sides
    first, asked = serve(prefill.why)
    second, _ = serve(decode.why)
    done = run("cmpl-d-0", "--url", first, "--url", second)
    assert done.exit_code == 0, done.output
    assert "0001020304050607" in asked
    paragraph, _, rest = done.stdout.partition("\n\n")
    assert paragraph.startswith("decode-0 claimed KV from prefill")
    assert "Try this: see the firewall." in " ".join(paragraph.split())
    assert "prefill prefill-0  hears the claim of decode-0" in rest
    assert "prefill prefill-0: aligned by its messages, to within 0 us" in rest
    assert "\x1b" not in done.output


def test_a_router_names_its_engines(serve, sides):
    prefill, decode = sides
    urls = [serve(side.why)[0] for side in (prefill, decode)]
    request = {
        "kind": "request", "id": "a1b2", "labels": ["a1b2-1", "mine"], "engine": "router",
        "outcome": "ok", "seconds": 1.0, "ended_ago_s": 0.0, "error": None,
        "events": [{"at_s": 0.0, "event": "arrived", "path": "/v1/completions"}],
    }  # fmt: skip
    url, asked = serve(
        lambda name: {"trails": [request] if name in ("mine", "a1b2-1") else [], "workers": urls}
    )
    done = run("cmpl-p-0", "--url", url, "--json")
    assert done.exit_code == 0, done.output
    body = json.loads(done.stdout)
    assert {trail["kind"] for trail in body["trails"]} == {"offer", "claim", "request"}
    assert "a1b2-1" in asked
    assert body["story"].startswith("decode-0 claimed")
    assert body["silent"] == []
    assert run("mine", "--url", url).exit_code == 0


def test_the_last_failure_of_everybody(serve, sides):
    urls = [serve(side.why)[0] for side in sides]
    done = run("last-failure", "--url", urls[0], "--url", urls[1])
    assert done.exit_code == 0, done.output
    assert "hears the claim of decode-0" in done.stdout
    assert "cmpl-dx" not in done.stdout


def test_dumps_of_both_sides(sides, tmp_path):
    files = [str(side.dump(tmp_path / side.name)) for side in sides]
    done = run("00010203", "--dump", files[0], "--dump", files[1])
    assert done.exit_code == 0, done.output
    assert "hears the claim" in done.stdout
    assert "nothing moved" in done.stdout
    assert run(OFFER.hex(), "--dump", files[0]).exit_code == 0
    assert "nobody who was asked knows" in run("zz", "--dump", files[0]).output
    assert "0001020304050607" in run("last-failure", "--dump", *files[1:]).stdout


def test_a_beginning_of_several_is_told_apart(serve, sides):
    url, _ = serve(sides[1].why)
    done = run("cmpl-d", "--url", url)
    assert done.exit_code == 2
    assert "begins the names of 2 requests: 0001020304050607, eeeeeeeeeeeeeeee" in done.output
    assert run("cmpl-dx-0", "--url", url).exit_code == 0


def test_who_does_not_answer_is_named(serve, sides):
    url, _ = serve(sides[1].why)
    gone = "http://127.0.0.1:9"
    done = run("cmpl-d-0", "--url", url, "--url", gone)
    assert done.exit_code == 0
    assert f"{gone} was asked and did not answer: its side is missing" in done.output


@pytest.mark.parametrize(
    "answer",
    [
        b"\xff not JSON",
        [],
        {"trails": 3, "workers": "x"},
        {"trails": [3, {}, {"events": [1], "labels": []}], "workers": ["file:///etc/passwd"]},
        {"trails": [{"events": [{"at_s": "x"}], "labels": [], "error": 5}]},
    ],
)
def test_an_answer_of_a_stranger_is_no_answer(serve, answer):
    url, _ = serve(lambda _name: answer)
    done = run("x", "--url", url)
    assert done.exit_code == 2
    assert "nobody who was asked knows 'x'" in done.output


@pytest.mark.parametrize("text", ["", "no JSON", "[1, 2]"])
def test_a_file_that_is_no_dump(tmp_path, text):
    path = tmp_path / "d.json"
    path.write_text(text)
    assert run("x", "--dump", str(path)).exit_code == 2
    assert run("x", "--dump", str(tmp_path / "none")).exit_code == 2


def test_a_url_is_a_url():
    done = run("x", "--url", "localhost:8000")
    assert done.exit_code == 2
    assert "write http://host:port" in done.output
