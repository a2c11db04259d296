"""What a server and the coordinator tell Prometheus. docs/metrics.md describes every name.

A heartbeat feeds a server's numbers, about once a second; a scrape only writes them down. So no scrape ever holds what
a step may wait for. Nor may those who ask: whoever reaches the endpoint gets a bounded number of threads, descriptors
and bytes, for a bounded time.
"""

import contextlib
import io
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from socketserver import ThreadingMixIn
from typing import TYPE_CHECKING, Any, Protocol
from wsgiref.simple_server import WSGIRequestHandler, WSGIServer

from prometheus_client import CollectorRegistry, Histogram, make_wsgi_app
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from jaxrdma.cluster import format_address
from jaxrdma.control import IN_STEP, JobStatus
from jaxrdma.dump import Engine
from jaxrdma.errors import ConfigError

if TYPE_CHECKING:
    from jaxrdma import _native

# A step of a small model on one machine takes a tenth of a millisecond, one of a large model minutes.
_BUCKETS = tuple(base * 10.0**power for power in range(-5, 3) for base in (1.0, 2.5, 5.0))


# A job has one Prometheus, perhaps two, and somebody with a browser: each has one connection for a moment.
_CONNECTIONS = 8
# Who asks says so at once. The whole answer has to be taken within the longer one; it is that of Prometheus's own
# `scrape_timeout`, and longer than a coordinator is asked for its numbers.
_SILENT_SECONDS = 5.0
_REQUEST_SECONDS = 10.0
_REQUEST_BYTES = 16 << 10  # Prometheus sends some 500, a browser with many cookies some thousands


class Endpoint:
    """Answers `GET /metrics` with what `registry` has, on a thread of its own. A context manager.

    A connection has `_REQUEST_SECONDS` until it has its answer, of which it may be silent for `_SILENT_SECONDS`; at
    most `_CONNECTIONS` are open, and those beyond are closed at once.

    **Raises:** `ConfigError`, naming the address, if it cannot be had.
    """

    def __init__(self, address: tuple[str, int], registry: CollectorRegistry) -> None:
        host, port = address
        try:
            self._server = _HttpServer(host, port, registry)
        except OSError as error:
            raise ConfigError(
                f"metrics cannot be shown at {format_address(host, port)}: {error.strerror or error}"
            ) from None
        self._thread = threading.Thread(
            target=self._server.serve_forever, name="jaxrdma-metrics", daemon=True
        )
        self._thread.start()
        self.url = f"http://{format_address(host, self._server.server_port)}/metrics"

    def __enter__(self) -> "Endpoint":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Free the port, and end what is open. Idempotent."""
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()


class _HttpServer(ThreadingMixIn, WSGIServer):
    """A thread for each connection, and a bound of connections and of their time."""

    # Those that wait to be accepted, and closed for the most part: of more than socketserver's 5 that come at once, the
    # rest is not heard before it tries again after a second.
    request_queue_size = 128

    def __init__(self, host: str, port: int, registry: CollectorRegistry) -> None:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
        self.address_family, _, _, _, address = found[0]
        self._lock = threading.Lock()  # of the next one
        self._ends: dict[socket.socket, float] = {}  # by connection: when its time is up
        super().__init__((str(address[0]), port), _Handler)
        self.set_app(make_wsgi_app(registry))

    def process_request(self, request: Any, client_address: Any) -> None:
        with self._lock:
            free = len(self._ends) < _CONNECTIONS
            if free:
                self._ends[request] = time.monotonic() + _REQUEST_SECONDS
        if not free:
            self.shutdown_request(request)
            return
        # Not joined: who closes the endpoint of a coordinator may be whom a scrape is waiting for.
        threading.Thread(
            target=self.process_request_thread,
            args=(request, client_address),
            name="jaxrdma-scrape",
            daemon=True,
        ).start()

    def shutdown_request(self, request: Any) -> None:
        # First forgotten: the descriptor's number may be another's as soon as it is closed.
        with self._lock:
            self._ends.pop(request, None)
        super().shutdown_request(request)

    def service_actions(self) -> None:
        """Called twice a second, and after every connection that comes."""
        self._end_until(time.monotonic())

    def server_close(self) -> None:
        super().server_close()
        self._end_until(float("inf"))

    def handle_error(self, request: Any, client_address: Any) -> None:
        # Who went away, or was silent for too long, is nobody's fault here.
        if not isinstance(sys.exc_info()[1], OSError):
            super().handle_error(request, client_address)

    def _end_until(self, now: float) -> None:
        """End the connections whose time was up by then: their threads wake, and close them."""
        with self._lock:
            for connection in [each for each, end in self._ends.items() if end <= now]:
                with contextlib.suppress(OSError):
                    connection.shutdown(socket.SHUT_RDWR)


class _Handler(WSGIRequestHandler):
    """Reads a request and writes its answer."""

    timeout = _SILENT_SECONDS
    rbufsize = 0

    def setup(self) -> None:
        super().setup()
        self.rfile = io.BufferedReader(_Bounded(self.rfile))

    def parse_request(self) -> bool:
        good = super().parse_request()
        # All is read. Who does not take the answer is cut off when his time is up, without a trace in the log.
        self.connection.settimeout(None)
        return good

    def log_message(self, format: str, *args: Any) -> None:
        """A scrape is nothing to be told."""


class _Bounded(io.RawIOBase):
    """What a connection sends, which seems to end after `_REQUEST_BYTES`."""

    def __init__(self, source: Any) -> None:
        self._source = source
        self._left = _REQUEST_BYTES

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        count = self._source.readinto(memoryview(buffer)[: self._left])
        self._left -= count
        return count

    def close(self) -> None:
        self._source.close()  # the socket is open as long as this is
        super().close()


class _Server(Engine, Protocol):
    def stats(self) -> "_native.ServerStats": ...


class _Asked:
    """A collector that makes its metrics when it is asked."""

    def __init__(self, make: Callable[[], Iterable[Metric]]) -> None:
        self._make = make

    def describe(self) -> Iterable[Metric]:
        return ()  # or it would be asked when it is registered

    def collect(self) -> Iterable[Metric]:
        return self._make()


@dataclass
class _Version:
    """What a server recorded of one version of a model's parameters, and of the step from it. Nanoseconds."""

    landed: tuple[int, int] | None = None
    reduced: int | None = None
    updating: int | None = None
    published: tuple[int, int] | None = None
    answered: int | None = None


class ServerMetrics:
    """One server's numbers. `read` is for the heartbeat, `registry` for the endpoint."""

    def __init__(self, index: int) -> None:
        self.registry = CollectorRegistry(auto_describe=False)
        self._index = str(index)
        texts = {
            "step": "from one version of a model's parameters to the next",
            "push": "from the first gradient of a step that lands to the last",
            "reduce": "from the last gradient of a step that lands to the last sum",
            "update": "from the last sum of a step to its new parameters",
            "pull": "from new parameters to the end of the last answer with them",
        }
        self._times = {
            name: Histogram(
                f"jaxrdma_{name}_seconds",
                text,
                ["server"],
                registry=self.registry,
                buckets=_BUCKETS,
            ).labels(self._index)
            for name, text in texts.items()
        }
        self._lock = threading.Lock()  # of the next two, between heartbeat and scrape
        self._stats: _native.ServerStats | None = None
        self._counts = (0, 0, 0)
        self._open: dict[int, dict[int, _Version]] = {}  # by model and version
        self.registry.register(_Asked(self._families))

    def read(self, engine: _Server) -> None:
        """What happened since the last time. From one thread at a time."""
        from jaxrdma import trace

        records = trace.decode(engine.records())
        # Counted afterwards: what came in between is read twice, which changes nothing, rather than never.
        added, lost = engine.record_counts()
        before, _, missed = self._counts
        new = records[max(0, len(records) - (added - before)) :]
        names = ("flow", "step", "stage", "time_ns")
        for flow, step, stage, now in zip(*(new[name].tolist() for name in names), strict=True):
            self._add(flow, step, trace.STAGES[stage], now)
        with self._lock:
            self._counts = added, lost, missed + added - before - len(new)
            self._stats = engine.stats()

    def _add(self, flow: int, step: int, stage: str, now: int) -> None:
        versions = self._open.setdefault(flow, {})
        version = versions.setdefault(step, _Version())
        match stage:
            case "landed":
                first, _ = version.landed or (now, now)
                version.landed = first, now
            case "reduced":
                version.reduced = now
            case "updating":
                version.updating = now
            case "answered":
                version.answered = now
            case "published":
                if version.published is None and step - 2 in versions:
                    self._observe(versions, step - 2)
                for old in [each for each in versions if each < step - 1]:
                    del versions[old]
                if version.published is None:
                    version.landed = None  # what came before was the chief's parameters
                first, _ = version.published or (now, now)
                version.published = first, now
            case _:
                pass

    def _observe(self, versions: dict[int, _Version], step: int) -> None:
        """A step is over for all partitions once the first one has ended the next."""
        this, after = versions[step], versions.get(step + 1, _Version())
        there = after.published
        ends: dict[str, tuple[int | None, int | None]] = {
            "push": this.landed or (None, None),
            "reduce": (this.landed[1] if this.landed else None, this.reduced),
            "update": (this.updating, there[1] if there else None),
            "pull": (there[0] if there else None, after.answered),
            "step": (this.published[1] if this.published else None, there[1] if there else None),
        }
        for name, (begin, end) in ends.items():
            if begin is not None and end is not None:
                self._times[name].observe(max(0, end - begin) / 1e9)

    def _families(self) -> Iterable[Metric]:
        with self._lock:
            stats, (added, lost, missed) = self._stats, self._counts
        mine = [self._index]

        def counter(name: str, text: str, value: float) -> Metric:
            family = CounterMetricFamily(f"jaxrdma_{name}", text, labels=["server"])
            family.add_metric(mine, value)
            return family

        yield counter("recorder_events", "records of the flight recorder", added)
        yield counter("recorder_events_lost", "records that were never kept", lost)
        yield counter("recorder_events_missed", "records gone before they were counted", missed)
        if stats is None:
            return
        received, sent = stats.bytes_pushed, stats.bytes_pulled + stats.bytes_followed
        yield counter("received_bytes", "bytes of gradients and first parameters", received)
        yield counter("sent_bytes", "bytes of parameters and means", sent)
        yield counter("partitions_repeated", "partitions that came twice", stats.duplicates)
        yield counter("steps", "steps of all models", stats.steps)
        for name, text, values in (
            ("gradients_accepted", "gradients that entered a mean", stats.accepted),
            ("gradients_dropped", "gradients that came too late", stats.gradients_dropped),
        ):
            family = CounterMetricFamily(f"jaxrdma_{name}", text, labels=["server", "worker"])
            for worker, count in enumerate(values):
                family.add_metric([*mine, str(worker)], count)
            yield family


def coordinator_registry(status: Callable[[], JobStatus]) -> CollectorRegistry:
    """The coordinator's numbers. `status` is called at each scrape, on the endpoint's threads."""
    registry = CollectorRegistry(auto_describe=False)
    registry.register(_Asked(lambda: _job_families(status())))
    return registry


def _job_families(status: JobStatus) -> Iterable[Metric]:
    waits = [p.seconds for p in status.processes if p.state == IN_STEP]
    failed = float(status.phase == "failed")
    yield GaugeMetricFamily("jaxrdma_job_failed", "1: the job has failed", value=failed)
    yield GaugeMetricFamily("jaxrdma_job_attempt", "which start of the job, from 0", status.attempt)
    yield GaugeMetricFamily(
        "jaxrdma_spare_places", "places for workers that nobody has taken yet", len(status.spare)
    )
    yield GaugeMetricFamily(
        "jaxrdma_stall_seconds", "how long a worker is in its step at most", max(waits, default=0.0)
    )
    values: dict[str, tuple[str, Callable[[Any], float]]] = {
        "step": ("the last step that it has done, -1: none", lambda p: p.step),
        "silent_seconds": ("since it was heard", lambda p: p.silent),
        "sent_bytes_per_second": ("lately", lambda p: p.sent),
        "received_bytes_per_second": ("lately", lambda p: p.received),
    }
    for name, (text, value) in values.items():
        family = GaugeMetricFamily(f"jaxrdma_process_{name}", text, labels=["process"])
        for process in status.processes:
            family.add_metric([process.name], value(process))
        yield family
