"""The router's view: a request goes to prefill, its parameters to decode, and one answer back.

Between router and engines is HTTP. What can happen there: an answer is late, or lost with its
connection; the same parameters are sent to two decodes; a client leaves; a worker dies, and is
another process at the same address when the parameters arrive. Whatever happens, each request gets
one answer in time.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from kvferry.testing.simulation.serving import ClaimRecord, OfferRecord

if TYPE_CHECKING:
    from kvferry.testing.simulation.process import Process
    from kvferry.testing.simulation.world import World

HOST = "router"
LEG_S = 4.0
"""How long prefill may take to answer; then decode computes the prompt."""
REQUEST_S = 14.0
"""By then each request has its answer."""


@dataclass(eq=False, slots=True)
class Request:
    """One request of a client, and how it ended; "" while it is under way."""

    number: int
    n_tokens: int
    prefill: str
    decode: str
    rng: random.Random
    outcome: str = ""
    params: dict[str, Any] | None = None
    offered: OfferRecord | None = None
    at: str = ""


class Router:
    """Keeps nothing but the requests under way."""

    def __init__(self, world: World) -> None:
        self._world = world
        self.requests: dict[int, Request] = {}

    def start(self, number: int, n_tokens: int, prefill: str, decode: str) -> None:
        rng = random.Random(f"{self._world.seed}/request{number}")
        request = Request(number, n_tokens, prefill, decode, rng)
        self.requests[number] = request
        self._world.schedule.after(REQUEST_S, lambda: self._overdue(request))
        request.at = prefill
        expires_s = rng.choice((0.05, 0.5, 3.0, 3.0, 3.0))

        def serve(process: Process) -> None:
            def answer(how: str, params: dict[str, Any] | None) -> None:
                offered = process.serving.offers.get(number)
                self._send(request, lambda: self._prefilled(request, how, params, offered))

            process.serving.prefill(number, n_tokens, expires_s, answer)

        self._call(request, prefill, serve, lambda: self._decode(request))

        def late() -> None:
            if request.at == prefill:
                self._abandon(request)
                self._decode(request)

        self._world.schedule.after(LEG_S, late)

    def leave(self, number: int) -> None:
        """The client goes away, wherever its request is."""
        request = self.requests.get(number)
        if request is None or request.outcome:
            return
        if request.at == request.prefill:
            self._abandon(request)
        else:
            serve: Callable[[Process], None] = lambda p: p.serving.leave(number)  # noqa: E731
            self._call(request, request.decode, serve, lambda: None)
        self._finish(request, "left")

    def repeat(self, number: int, decode: str) -> None:
        """The same parameters go to another decode too, as after a retry."""
        request = self.requests.get(number)
        if request is None or request.params is None or decode == request.decode:
            return
        params, offered = request.params, request.offered

        def serve(process: Process) -> None:
            record = ClaimRecord(number, process, request.n_tokens, params, offered, _nothing)
            process.serving.decode(record)

        self._call(request, decode, serve, lambda: None)

    def lost(self, host: str) -> None:
        """A worker died: its connections end."""
        for request in list(self.requests.values()):
            if request.outcome or request.at != host:
                continue
            if host == request.prefill:
                self._send(request, lambda request=request: self._decode(request))  # type: ignore[misc]
            else:
                self._finish(request, "worker lost")

    # -- legs -----------------------------------------------------------------------------------

    def _prefilled(
        self, request: Request, how: str, params: dict[str, Any] | None, offered: OfferRecord | None
    ) -> None:
        """Prefill's answer arrives; or it is lost with its connection, and the offer abandoned."""
        if request.at != request.prefill or request.outcome:
            return
        if how == "offered" and request.rng.random() < 0.03:
            self._world.note(HOST, "loses prefill's answer for request", str(request.number))
            self._abandon(request)
            params = None
        request.params, request.offered = params, offered
        self._decode(request)

    def _decode(self, request: Request) -> None:
        if request.outcome or request.at == request.decode:
            return
        request.at = request.decode

        def serve(process: Process) -> None:
            def answer(how: str, _params: Any) -> None:
                self._send(request, lambda: self._finish(request, how))

            record = ClaimRecord(
                request.number, process, request.n_tokens, request.params, request.offered, answer
            )
            process.serving.decode(record)

        def refused() -> None:
            if request.params is not None:
                self._abandon(request)
            self._finish(request, "unreachable")

        self._call(request, request.decode, serve, refused)

    def _abandon(self, request: Request, tries: int = 8) -> None:
        """Tell prefill until it has heard, or its time is over by itself."""
        network = self._world.network
        if any(way.black for way in network.both(HOST, request.prefill)) and tries:
            again = lambda: self._abandon(request, tries - 1)  # noqa: E731
            self._world.schedule.after(1.0, again)
            return
        number = request.number
        self._call(request, request.prefill, lambda p: p.serving.abandon(number), lambda: None)

    def _finish(self, request: Request, outcome: str) -> None:
        if not request.outcome:
            request.outcome = outcome
            self._world.watch.count("request " + outcome)
            self._world.note(HOST, f"ends request {request.number}:", outcome)

    def _overdue(self, request: Request) -> None:
        """The router's own limit: a worker that hangs is answered for."""
        self._finish(request, "timeout")

    # -- HTTP -----------------------------------------------------------------------------------

    def _send(self, request: Request, work: Callable[[], None]) -> None:
        """An answer on its way to the router: nearly always soon."""
        rng = request.rng
        delay_s = rng.uniform(0.2, 3.0) if rng.random() < 0.04 else rng.uniform(0.0005, 0.005)
        self._world.schedule.after(delay_s, work)

    def _call(
        self,
        request: Request,
        host: str,
        serve: Callable[[Process], None],
        refused: Callable[[], None],
    ) -> None:
        """A request on its way to whichever process is at an address when it arrives."""

        def arrive() -> None:
            process = self._world.at(host)
            black = any(way.black for way in self._world.network.both(HOST, host))
            if process is None or process.is_gone or black:
                refused()
            else:
                process.after(0.0, lambda: serve(process))

        self._send(request, arrive)


def _nothing(_how: str, _params: Any) -> None:
    return None
