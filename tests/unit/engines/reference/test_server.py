"""The server over real sockets: answers, streams, errors, clients that leave, and its own end."""

import asyncio
import contextlib
import dataclasses
import json
import os
import signal
import threading

import aiohttp
import pytest

from kvferry.clock import SystemClock
from kvferry.engines.reference import http
from kvferry.engines.reference.connector import ClaimResult
from kvferry.engines.reference.server import Loaded, Server, ServerConfig, load, serve
from kvferry.engines.reference.tokenizer import ByteTokenizer
from kvferry.errors import ConfigError, HandoffError

from .fakes import (
    CONFIG,
    DECODE_ELSEWHERE,
    PREFILL_ELSEWHERE,
    CopyConnector,
    FakeModel,
    ManualConnector,
    expected,
)

LIMIT_S = 10.0


class Site:
    """A running server with a fake model, and a client for it."""

    def __init__(self, connector=None, eos_every=0, **settings):
        schedule = {key: settings.pop(key) for key in list(settings) if hasattr(CONFIG, key)}
        self.schedule = dataclasses.replace(CONFIG, **schedule)
        self.model = FakeModel(self.schedule, eos_every)
        self.connector = connector.side(self.model) if connector else ManualConnector()
        self.loading = lambda: None
        self.config = ServerConfig(**settings)
        self.address = None
        self.status = None
        self.outcomes = asyncio.Queue()
        self.aborted = asyncio.Event()

    def _load(self, config):
        self.loading()
        tokenizer = ByteTokenizer()
        return Loaded("fake", self.schedule, self.model.forward, tokenizer, self.connector)

    async def __aenter__(self):
        await self.begin()
        await self.is_ready()
        return self

    async def begin(self):
        loop = asyncio.get_running_loop()
        ready = loop.create_future()
        self.server = Server(self.config, ready.set_result, self._load, SystemClock())
        metrics = self.server.api.metrics
        counted = metrics.answered
        metrics.answered = lambda outcome: (
            counted(outcome),
            loop.call_soon_threadsafe(self.outcomes.put_nowait, outcome),
        )
        self.task = asyncio.create_task(self.server.run())
        self._ready = ready
        self.http = aiohttp.ClientSession()

    async def is_ready(self):
        await asyncio.wait({self._ready, self.task}, return_when=asyncio.FIRST_COMPLETED)
        self.address = self._ready.result()
        self.engine = self.server.api._engine
        abort = self.engine.abort

        def watched(sequences):
            abort(sequences)
            self.aborted.set()

        self.engine.abort = watched

    async def __aexit__(self, *error):
        await self.end()

    async def end(self):
        await self.http.close()
        self.server.stop()
        self.server.stop()
        self.status = await asyncio.wait_for(self.task, LIMIT_S)
        assert not self.engine._thread.is_alive()

    async def post(self, path="/v1/completions", **body):
        async with self.http.post(
            self.address + path, data=json.dumps({"temperature": 0, **body})
        ) as response:
            answer = await (response.text() if body.get("stream") else response.json())
            return response.status, answer, response.headers

    async def get(self, path):
        async with self.http.get(self.address + path) as response:
            return response.status, await response.text()

    async def stream(self, path="/v1/completions", **body):
        data = json.dumps({"stream": True, "temperature": 0, **body})
        async with self.http.post(self.address + path, data=data) as response:
            assert response.headers["Content-Type"] == "text/event-stream"
            return events(await response.text())

    async def empty(self):
        """Wait until the scheduler holds nothing, and say so if it holds on."""
        idle = asyncio.Event()
        scheduler = self.engine.scheduler
        self.engine._scheduler.inbox.post(lambda: self.engine._idle.append(idle.set))
        await asyncio.wait_for(idle.wait(), LIMIT_S)
        now = scheduler.statistics()
        assert now["blocks_free"] == now["blocks_total"]


def events(text):
    """The data of each event; checks the framing."""
    assert text.endswith("\n\n")
    parts = text.split("\n\n")[:-1]
    assert all(part.startswith("data: ") and "\n" not in part for part in parts)
    return [part[6:] if part == "data: [DONE]" else json.loads(part[6:]) for part in parts]


def run(body, *args, **settings):
    async def main():
        async with Site(*args, **settings) as site:
            await asyncio.wait_for(body(site), LIMIT_S)
        assert site.status == 0
        assert getattr(site.connector, "is_closed", True)

    asyncio.run(main())


def gate(site, steps):
    """Let the model do so many steps and then wait. Returns what opens it."""
    left, opened = iter(range(steps)), threading.Event()
    site.model.before = lambda: next(left, None) is None and opened.wait(LIMIT_S)
    return opened.set


def test_a_completion_and_what_the_server_says_of_itself():
    async def body(site):
        status, answer, _ = await site.post(prompt=[1, 2], max_tokens=4, return_token_ids=True)
        assert status == 200
        choice = answer["choices"][0]
        assert choice["token_ids"] == expected([1, 2], 4)
        assert choice["text"] == "".join(map(chr, expected([1, 2], 4)))
        assert (await site.get("/health"))[0] == 200
        names = [card["id"] for card in json.loads((await site.get("/v1/models"))[1])["data"]]
        assert names == ["mine", "fake"]
        state = json.loads((await site.get("/debug/state"))[1])
        assert (state["status"], state["blocks_free"]) == ("ok", 64)
        assert state["connector"] == {"offers": 0}
        metrics = (await site.get("/metrics"))[1]
        for line in (
            'kvferry_reference_sequences_total{outcome="length"} 1.0',
            'kvferry_reference_responses_total{route="/v1/completions",status="200"} 1.0',
            "kvferry_reference_prompt_tokens_total 2.0",
            "kvferry_reference_output_tokens_total 4.0",
            "kvferry_reference_time_to_first_token_seconds_count 1.0",
            "kvferry_reference_blocks_free 64.0",
            'kvferry_reference_sequences_now{state="running"} 0.0',
        ):
            assert line in metrics

    run(body, served_name="mine")


def test_chat_streams_what_it_answers_whole():
    async def body(site):
        ask = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 5, "n": 2}
        ask |= {"temperature": 0, "return_token_ids": True}
        _, whole, _ = await site.post("/v1/chat/completions", **ask)
        got = await site.stream(
            "/v1/chat/completions", **ask, stream_options={"include_usage": True}
        )
        assert got[-1] == "[DONE]"
        assert got[-2]["usage"] == whole["usage"]
        choices = [chunk["choices"][0] for chunk in got[:-2]]
        for index, wanted in enumerate(whole["choices"]):
            own = [choice for choice in choices if choice["index"] == index]
            assert own[0]["delta"] == {"role": "assistant", "content": ""}
            text = "".join(choice["delta"].get("content", "") for choice in own)
            assert text == wanted["message"]["content"]
            tokens = [token for choice in own for token in choice.get("token_ids", [])]
            assert tokens == wanted["token_ids"]
            assert own[-1]["finish_reason"] == wanted["finish_reason"] == "length"

    run(body)


def test_tokens_are_streamed_while_the_model_goes_on():
    async def body(site):
        open_gate = gate(site, 2)
        data = json.dumps({"prompt": [1], "max_tokens": 5, "stream": True})
        async with site.http.post(site.address + "/v1/completions", data=data) as response:
            first = await response.content.readuntil(b"\n\n")
            assert json.loads(first[6:])["choices"][0]["text"]
            open_gate()
            assert (await response.text()).endswith("data: [DONE]\n\n")

    run(body)


def test_64_at_once_some_leaving_and_nothing_left_over(caplog):
    async def body(site):
        async def client(number):
            prompt = [number, 2, 3]
            ask = {"prompt": prompt, "max_tokens": 12, "return_token_ids": True}
            if number % 10 == 0:
                data = json.dumps({**ask, "max_tokens": 150, "stream": True})
                async with site.http.post(site.address + "/v1/completions", data=data) as left:
                    await left.content.readuntil(b"\n\n")
                return
            if number % 2:
                chunks = (await site.stream(**ask))[:-1]
                tokens = [t for chunk in chunks for t in chunk["choices"][0]["token_ids"]]
            else:
                tokens = (await site.post(**ask))[1]["choices"][0]["token_ids"]
            assert tokens == expected(prompt, 12)

        await asyncio.gather(*(client(number) for number in range(1, 65)))
        await site.empty()

    run(body)
    # A client that leaves is nothing to shout about.
    assert not [record for record in caplog.records if record.levelname == "ERROR"]


def test_a_body_that_never_ends_is_408(monkeypatch):
    monkeypatch.setattr(http, "READ_S", 0.02)

    async def body(site):
        host, port = site.address.removeprefix("http://").split(":")
        reader, writer = await asyncio.open_connection(host, port)
        writer.write(b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 99\r\n\r\n{")
        assert b" 408 " in await reader.readline()
        writer.close()
        await writer.wait_closed()

    run(body)


def test_a_client_that_reads_nothing_is_cut_off(monkeypatch):
    monkeypatch.setattr(http, "WRITE_S", 0.02)

    async def body(site):
        site.server.api.metrics.responded = lambda _, status: statuses.put_nowait(status)
        statuses = asyncio.Queue()
        # Events larger than the socket's buffers together, so that a write has to wait.
        real = http._event
        monkeypatch.setattr(http, "_event", lambda chunk: real(chunk) + b"x" * 500_000)
        host, port = site.address.removeprefix("http://").split(":")
        reader, writer = await asyncio.open_connection(host, port, limit=1024)
        ask = json.dumps({"prompt": [1], "max_tokens": 50, "stream": True})
        head = f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: {len(ask)}\r\n\r\n"
        writer.write((head + ask).encode())
        assert await statuses.get() == http.CLIENT_GONE
        await site.empty()
        writer.close()
        with contextlib.suppress(ConnectionError):
            await writer.wait_closed()
        assert reader is not None

    run(body)


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("steps", [0, 3])
def test_a_client_that_leaves_aborts_at_once(stream, steps):
    async def body(site):
        open_gate = gate(site, steps)
        data = json.dumps({"prompt": [1], "max_tokens": 150, "stream": stream})
        started = asyncio.Event()
        submit = site.engine.submit
        site.engine.submit = lambda sequences: (submit(sequences), started.set())

        async def client():
            async with site.http.post(site.address + "/v1/completions", data=data) as response:
                await response.read()

        task = asyncio.create_task(client())
        await asyncio.wait_for(started.wait(), LIMIT_S)
        task.cancel()
        await asyncio.wait({task})
        # The model stands still, so nothing but the disconnect itself can bring this about.
        await asyncio.wait_for(site.aborted.wait(), LIMIT_S)
        open_gate()
        assert await asyncio.wait_for(site.outcomes.get(), LIMIT_S) == "aborted"
        await site.empty()
        assert len(site.model.steps) <= steps + 1

    run(body)


def test_a_client_that_leaves_while_kv_is_loading_cancels_the_claim():
    async def body(site):
        data = json.dumps({"prompt": [1, 2], "kv_transfer_params": PREFILL_ELSEWHERE})
        task = asyncio.create_task(site.http.post(site.address + "/v1/completions", data=data))
        while not site.connector.claims:
            await asyncio.sleep(0)
        task.cancel()
        await asyncio.wait({task})
        assert await asyncio.wait_for(site.outcomes.get(), LIMIT_S) == "aborted"
        (on_end,) = site.connector.claims.values()
        while not site.connector.cancelled:
            await asyncio.sleep(0)
        on_end(ClaimResult(error=HandoffError("cancelled")))
        await site.empty()

    run(body)


@pytest.mark.parametrize("stream", [False, True])
def test_prefill_and_decode_over_http_equal_one_process(stream):
    async def main():
        ferry = CopyConnector()
        async with Site(ferry, role="prefill") as one, Site(ferry, role="decode") as two:
            prompt = list(range(1, 22))
            asks = {"prompt": prompt, "max_tokens": 1, "kv_transfer_params": DECODE_ELSEWHERE}
            if stream:
                *_, last, done = await one.stream(**asks)
                assert done == "[DONE]"
                transfer = last["kv_transfer_params"]
            else:
                transfer = (await one.post(**asks))[1]["kv_transfer_params"]
            ask = {"prompt": prompt, "max_tokens": 7, "return_token_ids": True}
            _, answer, _ = await two.post(**ask, kv_transfer_params=transfer)
            assert answer["choices"][0]["token_ids"] == expected(prompt, 7)
            assert answer["usage"]["completion_tokens"] == 7
            await one.empty()
            await two.empty()
            assert "kvferry_reference_handoff_seconds_count 1.0" in (await two.get("/metrics"))[1]
            status, error, _ = await two.post(**asks)
            assert status == 400
            assert "role" in error["error"]["message"]

    asyncio.run(main())


@pytest.mark.parametrize("stream", [False, True])
def test_an_answer_says_when_its_kv_was_computed_again(stream):
    async def body(site):
        asks = {"prompt": [1], "stream": stream, "max_tokens": 3}
        asking = asyncio.create_task(site.post(**asks, kv_transfer_params=PREFILL_ELSEWHERE))
        while not site.connector.claims:
            await asyncio.sleep(0)
        (on_end,) = site.connector.claims.values()
        on_end(ClaimResult(error=HandoffError("the peer is gone")))
        status, _, headers = await asking
        assert (status, headers["x-kvferry-handoff"]) == (200, "recomputed")
        status, _, headers = await site.post(**asks)
        assert status == 200
        assert "x-kvferry-handoff" not in headers
        await site.empty()

    run(body)


def test_a_load_that_fails_is_a_clear_error_where_that_is_the_policy():
    async def body(site):
        asking = asyncio.create_task(site.post(prompt=[1], kv_transfer_params=PREFILL_ELSEWHERE))
        while not site.connector.claims:
            await asyncio.sleep(0)
        (on_end,) = site.connector.claims.values()
        on_end(ClaimResult(error=HandoffError("the peer is gone")))
        status, error, _ = await asking
        assert status == 502
        assert error["error"]["message"] == "the peer is gone"
        await site.empty()

    run(body, on_load_failure="fail")


def test_errors_before_the_first_byte():
    async def body(site):
        status, error, _ = await site.post(prompt="x" * 300)
        assert status == 400
        assert "shorten the prompt" in error["error"]["message"]
        status, error, _ = await site.post(prompt="a", model="other")
        assert (status, error["error"]["code"]) == (404, "model_not_found")
        status, error, _ = await site.post(prompt="x" * 3000)
        assert (status, error["error"]["code"]) == (413, "body_too_large")
        status, error, _ = await site.post("/v1/nothing")
        assert (status, error["error"]["type"]) == (404, "invalid_request_error")
        async with site.http.get(site.address + "/v1/completions") as response:
            assert response.status == 405
            assert response.headers["Allow"] == "POST"

    run(body, body_bytes_max=2000)


def test_a_full_queue_is_429_with_retry_after():
    async def body(site):
        open_gate = gate(site, 0)
        asks = [asyncio.create_task(site.post(prompt=[n], max_tokens=3)) for n in range(1, 5)]
        status, error, headers = await site.post(prompt=[9], max_tokens=3, n=4)
        assert (status, error["error"]["code"]) == (429, "busy")
        assert headers["Retry-After"] == "1"
        open_gate()
        await asyncio.gather(*asks)

    run(body, waiting_max=3)


@pytest.mark.parametrize("stream", [False, True])
def test_a_crash_ends_requests_and_turns_health(stream):
    async def body(site):
        steps = iter(range(3))

        def crash():
            if next(steps, None) is None:
                raise ZeroDivisionError("bad weights")

        site.model.before = crash
        if stream:
            *chunks, error = await site.stream(prompt=[1], max_tokens=9)
            assert len(chunks) == 3
        else:
            status, error, _ = await site.post(prompt=[1], max_tokens=9)
            assert status == 500
        assert "bad weights" in error["error"]["message"]
        status, health = await site.get("/health")
        assert (status, json.loads(health)["status"]) == (503, "crashed")
        assert (await site.post(prompt=[1]))[0] == 500

    run(body)


def test_metrics_that_fail_do_not_fail_requests():
    async def body(site):
        metrics = site.server.api.metrics
        for name in ("_responses", "_prompt_tokens", "_output_tokens", "_ttft_s", "_answered"):
            setattr(metrics, name, None)
        metrics._registry.collect = None
        assert (await site.post(prompt=[1]))[0] == 200
        assert await site.get("/metrics") == (200, "")

    run(body)


def test_health_while_loading_and_a_model_that_cannot_be_had(free_port):
    async def main(fails):
        site = Site(port=free_port)
        go = threading.Event()

        def loading():
            go.wait(LIMIT_S)
            if fails:
                raise ConfigError("no such model")

        site.loading = loading
        await site.begin()
        site.address = f"http://127.0.0.1:{free_port}"
        for _ in range(1000):
            with contextlib.suppress(aiohttp.ClientConnectionError):
                status, health = await site.get("/health")
                break
            await asyncio.sleep(0)
        assert (status, json.loads(health)["status"]) == (503, "loading")
        assert (await site.post(prompt=[1]))[0] == 503
        go.set()
        if fails:
            assert await asyncio.wait_for(site.task, LIMIT_S) == 1
            await site.http.close()
        else:
            await site.is_ready()
            assert (await site.post(prompt=[1]))[0] == 200
            await site.end()

    asyncio.run(main(False))
    asyncio.run(main(True))


@pytest.fixture
def free_port():
    import socket

    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def test_draining_finishes_what_runs_and_refuses_what_is_new():
    async def main():
        async with Site() as site:
            open_gate = gate(site, 1)
            running = asyncio.create_task(site.post(prompt=[1], max_tokens=9))
            while not site.model.steps:
                await asyncio.sleep(0)
            site.server.stop()
            status, error, headers = await site.post(prompt=[2])
            assert status == 503
            assert "shutting down" in error["error"]["message"]
            assert headers["Retry-After"]
            assert json.loads((await site.get("/health"))[1])["status"] == "draining"
            open_gate()
            assert (await running)[0] == 200
            assert await asyncio.wait_for(site.task, LIMIT_S) == 0

    asyncio.run(main())


def test_draining_waits_for_offers_but_not_for_ever(caplog):
    async def main():
        async with Site(drain_s=0.05) as site:
            await site.post(prompt=[1], max_tokens=1, kv_transfer_params=DECODE_ELSEWHERE)
            site.server.stop()
            assert await asyncio.wait_for(site.task, LIMIT_S) == 0
            assert len(site.connector.withdrawn) == 1
            assert site.connector.is_closed

    asyncio.run(main())
    assert "'offered': 1" in caplog.text


def test_serve_says_ready_and_ends_on_sigterm(capsys):
    addresses = []

    def ready(address):
        addresses.append(address)
        os.kill(os.getpid(), signal.SIGTERM)

    site_model = FakeModel()
    loaded = Loaded("fake", CONFIG, site_model.forward, ByteTokenizer(), ManualConnector())
    assert serve(ServerConfig(), ready=ready, loader=lambda _: loaded) == 0
    assert capsys.readouterr().out == f"ready {addresses[0]}\n"
    assert addresses[0].startswith("http://127.0.0.1:")
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL


def test_a_port_that_is_taken_is_status_1(free_port):
    import socket

    with socket.socket() as taken:
        taken.bind(("127.0.0.1", free_port))
        taken.listen()
        assert serve(ServerConfig(port=free_port), loader=lambda _: None) == 1


@pytest.mark.parametrize("bad", [{"port": -1}, {"drain_s": 0}, {"body_bytes_max": 0}])
def test_bad_settings_name_the_key(bad):
    with pytest.raises(ConfigError, match=next(iter(bad))):
        ServerConfig(**bad)


@pytest.mark.slow
def test_the_built_in_model_answers_the_same_alone_and_in_company():
    async def main():
        ready = asyncio.get_running_loop().create_future()
        server = Server(ServerConfig(), ready.set_result, load, SystemClock())
        task = asyncio.create_task(server.run())
        address = await ready
        async with aiohttp.ClientSession() as http:

            async def ask(number):
                body = {"prompt": f"{number} is " * 30, "max_tokens": 8, "temperature": 0.7}
                body |= {"seed": number, "return_token_ids": True}
                async with http.post(address + "/v1/completions", json=body) as response:
                    return (await response.json())["choices"][0]["token_ids"]

            alone = [await ask(number) for number in range(6)]
            assert await asyncio.gather(*(ask(number) for number in range(6))) == alone
        server.stop()
        assert await task == 0

    asyncio.run(main())
