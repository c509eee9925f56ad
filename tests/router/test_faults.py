"""Workers that refuse, die, stall and freeze; clients that leave."""

import asyncio
import json
import socket

import aiohttp
import pytest
from fake_workers import (
    PARAMS,
    answers,
    dies_after_head,
    dies_in_body,
    dies_in_stream,
    ignores_cancel,
    offers,
    rejects,
    resets,
    run,
    site,
    stalls,
    streams,
    until,
)

SKIPPED_FAILED = 'kvferry_router_prefill_skipped_total{reason="failed"}'
NEVER_CHECK = {"health_interval_s": 60.0}


async def rest_before_cut(answer) -> bytes:
    """What still comes before the answer is cut; fails when it ends as if it were whole."""
    got = b""
    try:
        while chunk := await answer.content.readany():
            got += chunk
    except aiohttp.ClientPayloadError:
        return got
    raise AssertionError(f"a clean end after {got!r}")


# Prefill


def test_a_prefill_that_refuses_is_replaced_by_another_with_a_new_attempt():
    async def body():
        async with site([offers, offers], [answers], **NEVER_CHECK) as made:
            first = made.router.table.of("prefill")[0]
            await made.prefill[0].stop()
            async with made.post() as answer:
                assert answer.headers["x-kvferry-handoff"] == "remote"
            assert made.prefill[1].seen[0].headers["x-kvferry-attempt"].endswith("-2")
            assert not first.up
            refused = 'kvferry_router_legs_total{role="prefill",status="unreachable"}'
            assert await made.metric(refused) == 1

    run(body())


@pytest.mark.parametrize("script", [rejects(500), rejects(503), resets, dies_in_body])
def test_a_prefill_that_accepted_is_not_replaced_and_decode_does_the_work(script):
    async def body():
        async with site([script, script], [answers]) as made:
            for worker in made.prefill:
                worker.go_on.set()
            async with made.post() as answer:
                assert answer.status == 200
                assert answer.headers["x-kvferry-handoff"] == "local"
            assert sum(len(each.seen) for each in made.prefill) == 1
            assert "kv_transfer_params" not in made.decode[0].seen[0].json
            assert await made.metric(SKIPPED_FAILED) == 1

    run(body())


@pytest.mark.parametrize("script", [rejects(500), resets])
def test_the_strict_policy_makes_it_an_error(script):
    async def body():
        async with site([script], [answers], on_no_prefill="error") as made:
            async with made.post() as answer:
                assert answer.status == 503
                assert "prefill" in (await answer.json())["error"]["message"]
            assert made.decode[0].seen == []

    run(body())


@pytest.mark.parametrize("policy", ["local", "error"])
def test_no_prefill_at_all_follows_the_policy(policy):
    async def body():
        async with site([offers], [answers], on_no_prefill=policy) as made:
            await made.prefill[0].stop()
            await until(lambda: not made.router.table.of("prefill")[0].up)
            async with made.post() as answer:
                assert answer.status == (200 if policy == "local" else 503)
            assert len(made.decode[0].seen) == (1 if policy == "local" else 0)

    run(body())


# Decode, before the first byte


def test_a_decode_that_refuses_is_replaced_with_the_same_params():
    async def body():
        async with site([offers], [answers, answers], **NEVER_CHECK) as made:
            await made.decode[0].stop()
            async with made.post() as answer:
                assert answer.status == 200
                assert answer.headers["x-kvferry-decode"] == f"127.0.0.1:{made.decode[1].port}"
            assert PARAMS in made.decode[1].seen[0].body
            assert len(made.prefill[0].seen) == 1

    run(body())


def test_every_decode_refusing_is_503_and_names_them():
    async def body():
        async with site([], [answers, answers], **NEVER_CHECK) as made:
            for worker in made.decode:
                await worker.stop()
            for _ in range(2):
                async with made.post() as answer:
                    assert answer.status == 503
                    message = (await answer.json())["error"]["message"]
                    assert f"127.0.0.1:{made.decode[1].port}" in message

    run(body())


def test_no_decode_means_that_prefill_is_not_troubled():
    async def body():
        async with site([offers], [answers]) as made:
            await made.decode[0].stop()
            await until(lambda: not made.router.table.of("decode")[0].up)
            async with made.post() as answer:
                assert answer.status == 503
            assert made.prefill[0].seen == []

    run(body())


@pytest.mark.parametrize("script", [resets, dies_after_head])
@pytest.mark.parametrize("stream", [False, True])
def test_a_decode_that_dies_before_the_first_byte_is_502_and_run_once(script, stream):
    async def body():
        async with site([offers], [script, script]) as made:
            async with made.post({"prompt": "a", "stream": stream}) as answer:
                assert answer.status == 502
                error = (await answer.json())["error"]
                assert error["code"] == "peer_lost"
                assert error["type"] == "server_error"
                assert answer.headers["x-kvferry-handoff"] == "remote"
            assert sum(len(each.seen) for each in made.decode) == 1

    run(body())


def test_a_decode_that_never_begins_is_504_and_told_to_stop():
    async def body():
        async with site([], [stalls], first_byte_s=0.05) as made:
            async with made.post() as answer:
                assert answer.status == 504
                assert "0.05 s" in (await answer.json())["error"]["message"]
            await made.decode[0].cancelled.wait()

    run(body())


# Decode, after the first byte


def test_death_in_a_stream_is_an_error_event_and_no_clean_end():
    async def body():
        async with site([offers], [dies_in_stream]) as made:
            async with made.post({"prompt": "a", "stream": True}) as answer:
                assert answer.status == 200
                got = await answer.content.readany()
                made.decode[0].go_on.set()
                got += await rest_before_cut(answer)
            last = got.rstrip().split(b"\n\n")[-1]
            error = json.loads(last.removeprefix(b"data: "))["error"]
            assert error["code"] == "peer_lost"
            assert b"[DONE]" not in got
            await until(lambda: not made.router._running)
            assert await made.metric('kvferry_router_requests_total{outcome="cut"}') == 1

    run(body())


def test_death_in_a_body_cuts_the_connection():
    async def body():
        async with site([], [dies_in_body]) as made, made.post() as answer:
            assert await answer.content.readany() == b'{"text":'
            made.decode[0].go_on.set()
            with pytest.raises(aiohttp.ClientError):
                await answer.content.read()

    run(body())


async def raw_answer(worker_says: bytes, request_head: bytes) -> tuple[bytes, bool]:
    """What a client that speaks HTTP by hand reads, and whether the end was a reset.

    The worker answers ``worker_says`` and closes; it has no length and no chunks.
    """

    async def serve(reader, writer):
        await reader.readuntil(b"\r\n\r\n")
        writer.write(worker_says)
        writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    try:
        port = server.sockets[0].getsockname()[1]
        async with site([], [answers], **NEVER_CHECK) as made:
            worker = made.router.table.of("decode")[0]
            worker.url = f"http://127.0.0.1:{port}"
            address = made.url.removeprefix("http://").split(":")
            reader, writer = await asyncio.open_connection(*address)
            writer.write(request_head + b"\r\nContent-Length: 2\r\n\r\n{}")
            got, was_reset = b"", False
            try:
                while chunk := await reader.read(4096):
                    got += chunk
            except ConnectionResetError:
                was_reset = True
            writer.close()
            return got, was_reset
    finally:
        server.close()
        await server.wait_closed()


def test_a_stream_that_ends_by_closing_before_done_is_announced():
    async def body():
        head = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\n\r\n"
        got, _ = await raw_answer(
            head + b'data: {"text":"one"}\n\n', b"POST /v1/completions HTTP/1.1\r\nHost: r"
        )
        assert b'data: {"error":' in got
        assert not got.endswith(b"0\r\n\r\n")

    run(body())


def test_a_client_that_reads_until_close_sees_a_reset():
    async def body():
        head = b"HTTP/1.1 200 OK\r\nContent-Type: a/json\r\nTransfer-Encoding: chunked\r\n\r\n"
        _, was_reset = await raw_answer(
            head + b'5\r\n{"te', b"POST /v1/completions HTTP/1.0\r\nHost: r"
        )
        assert was_reset

    run(body())


def test_a_pause_over_the_limit_ends_a_stream():
    async def body():
        async with site([], [streams], between_bytes_s=0.05) as made:
            async with made.post({"prompt": "a", "stream": True}) as answer:
                got = await rest_before_cut(answer)
            assert b'"code":"deadline"' in got
            await made.decode[0].cancelled.wait()

    run(body())


# Frozen workers


def test_a_frozen_decode_ends_its_requests_and_comes_back_by_itself():
    async def body():
        settings = {"worker_lost_s": 0.1, "health_timeout_s": 0.05}
        async with site([offers], [streams, answers], **settings) as made:
            made.prefill[0].models = ()
            async with made.post({"prompt": "a", "stream": True}) as answer:
                got = await answer.content.readany()
                made.decode[0].health_freezes = True
                got += await rest_before_cut(answer)
            assert b"health checks" in got
            await made.decode[0].cancelled.wait()
            async with made.post() as answer:
                assert answer.headers["x-kvferry-decode"] == f"127.0.0.1:{made.decode[1].port}"
            made.decode[0].health_freezes = False
            await until(lambda: made.router.table.of("decode")[0].up)

    run(body())


@pytest.mark.parametrize("policy", ["local", "error"])
def test_a_frozen_prefill_follows_the_policy(policy):
    async def body():
        settings = {"worker_lost_s": 0.1, "health_timeout_s": 0.05, "on_no_prefill": policy}
        async with site([stalls], [answers], **settings) as made:
            running = asyncio.ensure_future(made.post())
            await made.prefill[0].arrived.wait()
            made.prefill[0].health_freezes = True
            async with await running as answer:
                assert answer.status == (200 if policy == "local" else 503)
            await made.prefill[0].cancelled.wait()

    run(body())


def test_a_frozen_decode_before_its_first_byte_is_504():
    async def body():
        settings = {"worker_lost_s": 0.1, "health_timeout_s": 0.05}
        async with site([], [stalls], **settings) as made:
            running = asyncio.ensure_future(made.post())
            await made.decode[0].arrived.wait()
            made.decode[0].health_freezes = True
            async with await running as answer:
                assert answer.status == 504
                assert "health checks" in (await answer.json())["error"]["message"]

    run(body())


def test_a_worker_that_refuses_newcomers_may_finish_what_it_has():
    async def body():
        async with (
            site([], [streams], worker_lost_s=0.05) as made,
            made.post({"prompt": "a", "stream": True}) as answer,
        ):
            await answer.content.readany()
            worker = made.decode[0]
            for each in worker._runner.sites:
                await each.stop()
            row = made.router.table.of("decode")[0]
            await until(lambda: not row.up)
            worker.go_on.set()
            assert (await answer.content.read()).endswith(b"data: [DONE]\n\n")

    run(body())


def test_a_restarted_worker_on_the_same_port_is_used_again():
    async def body():
        async with site([], [answers]) as made:
            worker, row = made.decode[0], made.router.table.of("decode")[0]
            await worker.stop()
            await until(lambda: not row.up)
            await worker.start()
            await until(lambda: row.up)
            async with made.post() as answer:
                assert answer.status == 200

    run(body())


# Clients that leave


@pytest.mark.parametrize("script", [stalls, ignores_cancel])
def test_leaving_during_prefill_cancels_it(script):
    async def body():
        async with site([script], [answers]) as made:
            running = asyncio.ensure_future(made.post())
            await made.prefill[0].arrived.wait()
            running.cancel()
            await made.prefill[0].cancelled.wait()
            await until(lambda: not made.router._running)
            assert made.decode[0].seen == []
            left = 'kvferry_router_requests_total{outcome="client_left"}'
            assert await made.metric(left) == 1
            assert made.router.table.of("prefill")[0].inflight == 0

    run(body())


@pytest.mark.parametrize("script", [stalls, ignores_cancel])
def test_leaving_before_the_first_byte_cancels_decode(script):
    async def body():
        async with site([offers], [script]) as made:
            running = asyncio.ensure_future(made.post())
            await made.decode[0].arrived.wait()
            running.cancel()
            await made.decode[0].cancelled.wait()
            await until(lambda: not made.router._running)

    run(body())


def test_leaving_in_a_stream_cancels_decode():
    async def body():
        async with site([offers], [streams]) as made:
            async with made.post({"prompt": "a", "stream": True}) as answer:
                await answer.content.readany()
                answer.close()
            await made.decode[0].cancelled.wait()
            await until(lambda: not made.router._running)
            assert made.router.table.of("decode")[0].inflight == 0

    run(body())


# Kept connections


def test_a_kept_connection_that_was_closed_is_retried_once():
    async def body():
        counts = {"accepted": 0, "requests": 0}

        async def serve(reader, writer):
            # Answers one request and keeps the connection, then closes it when the second comes.
            counts["accepted"] += 1
            head = await reader.readuntil(b"\r\n\r\n")
            if not head.startswith(b"GET"):
                counts["requests"] += 1
            length = [line for line in head.split(b"\r\n") if b"ontent-Length" in line]
            if length:
                await reader.readexactly(int(length[0].split(b":")[1]))
            writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\n{}")
            await reader.read(1)
            writer.close()

        server = await asyncio.start_server(serve, "127.0.0.1", 0)
        port = server.sockets[0].getsockname()[1]
        async with site([], [answers], **NEVER_CHECK) as made:
            made.router.table.of("decode")[0].url = f"http://127.0.0.1:{port}"
            for _ in range(2):
                async with made.post() as answer:
                    assert answer.status == 200
            assert counts == {"accepted": 2, "requests": 2}
        server.close()
        await server.wait_closed()

    run(body())


def test_a_port_that_nobody_listens_on_at_the_start_is_tolerated():
    async def body():
        # Bound and not listening: it refuses, and nobody else can take it.
        with socket.socket() as taken:
            taken.bind(("127.0.0.1", 0))
            async with site([], [answers], **NEVER_CHECK) as made:
                row = made.router.table.of("decode")[0]
                row.url = f"http://127.0.0.1:{taken.getsockname()[1]}"
                async with made.post() as answer:
                    assert answer.status == 503
                assert not row.up

    run(body())
