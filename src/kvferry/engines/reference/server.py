"""The engine as a process: load a model, serve it, and on SIGTERM finish what was begun.

The listener is up first, so that ``/health`` can say ``loading``. ``serve`` returns when everything
is given back: requests, the engine's thread, the connector, the sockets.
"""

from __future__ import annotations

import asyncio
import logging
import signal
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from aiohttp import web

from kvferry.clock import Clock, SystemClock
from kvferry.engines.reference import model as reference_model
from kvferry.engines.reference import weights
from kvferry.engines.reference.api import Served
from kvferry.engines.reference.config import ModelConfig
from kvferry.engines.reference.connector import KVConnector, NullConnector
from kvferry.engines.reference.http import Api
from kvferry.engines.reference.kvcache import PagedKV
from kvferry.engines.reference.limits import SchedulerConfig
from kvferry.engines.reference.loop import EngineLoop
from kvferry.engines.reference.observer import Observer
from kvferry.engines.reference.scheduler import Forward, Scheduler
from kvferry.engines.reference.tokenizer import Tokenizer
from kvferry.errors import ConfigError, KVFerryError

log = logging.getLogger(__name__)

CLEANUP_S = 2.0
"""How long connections may take to close after their requests have ended."""


def run_alone(config: ServerConfig, model: ModelConfig) -> tuple[PagedKV, KVConnector]:
    """A connector factory: KV in plain memory, and nothing that moves it."""
    kv = PagedKV(model, block_tokens=config.block_tokens, blocks=config.blocks)
    return kv, NullConnector()


ConnectorFactory = Callable[["ServerConfig", ModelConfig], tuple[PagedKV, KVConnector]]
"""Makes the KV, in memory that the connector can move, and the connector. May block; any thread."""


@dataclass(frozen=True, slots=True)
class ServerConfig:
    """How one engine process is set up.

    model: ``"tiny"``, ``"smollm2"``, a GGUF file or a folder.
    served_name: a name for clients besides the model's own, or "".
    host, port: where to listen; port 0 takes any free one.
    role, on_load_failure, blocks, block_tokens, step_tokens, running_max, waiting_max and the
        limits in seconds: see SchedulerConfig.
    drain_s: how long SIGTERM lets requests and offers go on.
    body_bytes_max: largest request body.
    chat_max_tokens: what a chat gets that names no limit.
    connector: makes the KV memory and the connector.
    """

    model: str = "tiny"
    served_name: str = ""
    host: str = "127.0.0.1"
    port: int = 0
    role: str = "both"
    on_load_failure: str = "recompute"
    blocks: int = 512
    block_tokens: int = 16
    step_tokens: int = 512
    running_max: int = 32
    waiting_max: int = 256
    queue_s: float = 60.0
    load_s: float = 30.0
    total_s: float = 600.0
    offer_s: float = 120.0
    stop_s: float = 10.0
    drain_s: float = 30.0
    body_bytes_max: int = 1 << 20
    chat_max_tokens: int = 256
    connector: ConnectorFactory = run_alone

    def __post_init__(self) -> None:
        if not 0 <= self.port <= 65535:
            raise ConfigError(f"port={self.port}: must be 0 to 65535")
        for key in ("drain_s", "body_bytes_max", "chat_max_tokens"):
            if getattr(self, key) <= 0:
                raise ConfigError(f"{key}={getattr(self, key)!r}: must be greater than 0")

    def schedule(self, model: ModelConfig, chunk_tokens: int) -> SchedulerConfig:
        """The scheduler's part, for a model."""
        return SchedulerConfig(
            vocab_size=model.vocab_size,
            context_tokens=model.max_tokens,
            eos_ids=model.eos_ids,
            chunk_tokens=chunk_tokens,
            blocks=self.blocks,
            block_tokens=self.block_tokens,
            step_tokens=self.step_tokens,
            running_max=self.running_max,
            waiting_max=self.waiting_max,
            role=self.role,
            on_load_failure=self.on_load_failure,
            queue_s=self.queue_s,
            load_s=self.load_s,
            total_s=self.total_s,
            offer_s=self.offer_s,
            stop_s=self.stop_s,
        )


@dataclass(frozen=True, slots=True)
class Loaded:
    """A model that is ready to run."""

    name: str
    schedule: SchedulerConfig
    forward: Forward
    tokenizer: Tokenizer
    connector: KVConnector


Loader = Callable[[ServerConfig], Loaded]


def load(config: ServerConfig) -> Loaded:
    """Read the model and make its KV. Blocks for seconds. Raises ConfigError and others."""
    model, parameters, tokenizer = weights.load(config.model)
    schedule = config.schedule(model, reference_model.PREFILL_CHUNK_TOKENS)
    runner = reference_model.Model(model, parameters)
    kv, connector = config.connector(config, model)
    return Loaded(model.name, schedule, partial(runner.forward, kv), tokenizer, connector)


def serve(
    config: ServerConfig,
    *,
    ready: Callable[[str], None] | None = None,
    loader: Loader = load,
    clock: Clock | None = None,
) -> int:
    """Serve until SIGTERM or SIGINT; a second one cuts the draining short. Main thread only.

    ready: called in the event loop with ``http://host:port`` when requests are served; the same
        is printed on stdout.
    Returns: exit status, 0 after a clean end, 1 if the model or the socket could not be had.
    """
    return asyncio.run(Server(config, ready, loader, clock or SystemClock()).run())


class Server:
    """One life of the process, in one event loop."""

    def __init__(
        self,
        config: ServerConfig,
        ready: Callable[[str], None] | None,
        loader: Loader,
        clock: Clock,
    ) -> None:
        self._config = config
        self._ready = ready
        self._loader = loader
        self._clock = clock
        self._stop = asyncio.Event()
        self._hurry = asyncio.Event()
        self.api = Api(body_bytes_max=config.body_bytes_max)

    def stop(self) -> None:
        """Begin to drain; called again, end at once. In the event loop's thread."""
        if self._stop.is_set():
            self._hurry.set()
        self.api.is_draining = True
        self._stop.set()

    async def run(self) -> int:
        """Serve until :meth:`stop`. Returns the exit status."""
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self.stop)
        loop.add_signal_handler(signal.SIGUSR1, lambda: loop.run_in_executor(None, self.api.dump))
        runner = web.AppRunner(
            self.api.app,
            handler_cancellation=True,
            access_log=None,
            shutdown_timeout=CLEANUP_S,
        )
        try:
            await runner.setup()
            return await self._serve(runner)
        except (KVFerryError, OSError) as error:
            log.error("cannot serve %s: %s", self._config.model, error)
            return 1
        finally:
            await runner.cleanup()
            for number in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1):
                loop.remove_signal_handler(number)

    async def _serve(self, runner: web.AppRunner) -> int:
        await web.TCPSite(runner, self._config.host, self._config.port).start()
        loaded = await asyncio.to_thread(self._loader, self._config)
        engine = self._start(loaded)
        try:
            if not self._stop.is_set():
                self._announce(runner)
            await self._stop.wait()
            await self._drain(engine)
        finally:
            # The engine first: it must not start a claim in a connector that is closed.
            await asyncio.to_thread(engine.close)
            await asyncio.to_thread(loaded.connector.close)
        return 0

    def _start(self, loaded: Loaded) -> EngineLoop:
        observer: Observer = self.api.metrics
        scheduler = Scheduler(
            loaded.schedule, loaded.forward, loaded.connector, self._clock, observer
        )
        engine = EngineLoop(scheduler, asyncio.get_running_loop())
        own = self._config.served_name
        served = Served(
            models=(own, loaded.name) if own and own != loaded.name else (loaded.name,),
            tokenizer=loaded.tokenizer,
            sequence_tokens_max=loaded.schedule.sequence_tokens_max,
            chat_max_tokens=self._config.chat_max_tokens,
        )
        engine.start()
        self.api.attach(engine, served, loaded.connector)
        return engine

    def _announce(self, runner: web.AppRunner) -> None:
        host, port = runner.addresses[0][:2]
        address = f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"
        log.info("serving %s as %s on %s", self._config.model, self._config.role, address)
        print(f"ready {address}", flush=True)
        if self._ready is not None:
            self._ready(address)

    async def _drain(self, engine: EngineLoop) -> None:
        """Let requests and offers end by themselves, up to ``drain_s`` or the second signal."""
        draining = asyncio.create_task(engine.drain(self._config.drain_s))
        hurry = asyncio.create_task(self._hurry.wait())
        await asyncio.wait({draining, hurry}, return_when=asyncio.FIRST_COMPLETED)
        for task in (draining, hurry):
            task.cancel()
        await asyncio.gather(draining, hurry, return_exceptions=True)
        left = engine.scheduler.statistics()["sequences"]
        if any(left.values()):
            log.warning("stopping although these sequences have not ended: %s", left)
