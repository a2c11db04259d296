"""The histograms hold every step once, of the length that it had, however its records come."""

import contextlib
import http.client
import io
import re
import select
import socket
import threading
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import jax.monitoring
import numpy as np
import pytest
from prometheus_client import CollectorRegistry, Gauge, generate_latest

from jaxrdma import metrics as module
from jaxrdma import monitoring, trace
from jaxrdma.cluster import metrics_address
from jaxrdma.errors import ConfigError
from jaxrdma.metrics import Endpoint, ServerMetrics
from tests.unit.records import MS, Life, job

PAGE = (Path(__file__).parents[2] / "docs" / "metrics.md").read_text()


class Engine:
    """Has as many of the records as it is told to."""

    def __init__(self, life: Life) -> None:
        self.all = life.dump().records
        self.first, self.last = 0, 0

    def records(self) -> bytes:
        size = trace.RECORD_DTYPE.itemsize
        return self.all[self.first * size : self.last * size]

    def record_counts(self) -> tuple[int, int]:
        return self.last, 2

    def stats(self) -> SimpleNamespace:
        return SimpleNamespace(
            bytes_pushed=100,
            bytes_pulled=70,
            bytes_followed=7,
            duplicates=1,
            steps=3,
            accepted=[5, 6],
            gradients_dropped=[0, 4],
        )


def value(metrics: ServerMetrics, name: str, **labels: str) -> float | None:
    return metrics.registry.get_sample_value(f"jaxrdma_{name}", {"server": "1", **labels})


def server(steps: int, **late: int) -> Engine:
    life = job(steps=steps, **late)[3]
    assert (life.role, life.index) == ("server", 1)
    # Answers, which the other tests do without.
    for at, step, partition, _, _, stage in list(life.rows):
        if trace.STAGES[stage] == "published":
            life.rows.append((at + 2 * MS, step, partition, 0, 0, trace.STAGES.index("answered")))
    return Engine(life)


@pytest.mark.parametrize("pieces", [1, 7, 1000])
def test_every_step_is_counted_once_in_whatever_pieces_it_is_read(pieces):
    engine, metrics = server(steps=6, compute_1=40, update_1=5), ServerMetrics(1)
    total = len(engine.all) // trace.RECORD_DTYPE.itemsize
    for last in range(0, total + pieces, pieces):
        engine.last = min(last, total)
        metrics.read(engine)
        metrics.read(engine)  # nothing is new
    # Versions 1 to 6 were published, so steps 0 to 4 are followed by another; step 0 has no version 0 before it.
    for name, count, seconds in (
        ("push", 5, 0.040),
        ("reduce", 5, 0.001),
        ("update", 5, 0.008),
        ("pull", 5, 0.002),
        ("step", 4, 0.063),
    ):
        assert value(metrics, f"{name}_seconds_count") == count, name
        assert value(metrics, f"{name}_seconds_sum") == pytest.approx(count * seconds), name
    assert value(metrics, "recorder_events_total") == total
    assert value(metrics, "recorder_events_missed_total") == 0


def test_what_was_gone_before_it_was_read_is_counted_as_missed():
    engine, metrics = server(steps=6), ServerMetrics(1)
    engine.last = 10
    metrics.read(engine)
    engine.first, engine.last = 25, 40
    metrics.read(engine)
    assert value(metrics, "recorder_events_missed_total") == 15
    assert value(metrics, "recorder_events_lost_total") == 2


def test_counts_come_from_the_engine():
    metrics = ServerMetrics(1)
    assert value(metrics, "steps_total") is None
    metrics.read(server(steps=1))
    assert value(metrics, "received_bytes_total") == 100
    assert value(metrics, "sent_bytes_total") == 77
    assert value(metrics, "gradients_accepted_total", worker="1") == 6
    assert value(metrics, "gradients_dropped_total", worker="1") == 4


def test_an_endpoint_on_an_address_that_is_taken_says_so():
    metrics = ServerMetrics(0)
    with Endpoint(("127.0.0.1", 0), metrics.registry) as first:
        port = int(re.search(r":(\d+)/", first.url).group(1))
        with pytest.raises(ConfigError, match=f"cannot be shown at 127.0.0.1:{port}"):
            Endpoint(("127.0.0.1", port), metrics.registry)


@pytest.mark.parametrize(
    ("setting", "offset", "address"),
    [
        ("9400", 0, ("127.0.0.1", 9400)),
        ("9400", 3, ("127.0.0.1", 9403)),
        ("0", 3, ("127.0.0.1", 0)),
        ("192.0.2.1:80", 1, ("192.0.2.1", 81)),
        ("[::1]:80", 0, ("::1", 80)),
    ],
)
def test_metrics_are_on_loopback_unless_another_host_is_given(setting, offset, address):
    assert metrics_address(setting, offset) == address


@pytest.mark.parametrize(("setting", "offset"), [("soon", 0), ("65535", 1), (":", 0)])
def test_what_is_no_address_for_metrics_is_refused(setting, offset):
    with pytest.raises(ConfigError, match="metrics address"):
        metrics_address(setting, offset)


def test_the_newest_exchange_that_is_over_is_told_once():
    heard: list[tuple[str, float, dict]] = []

    def listen(event: str, seconds: float, **facts) -> None:
        if event.startswith("/jaxrdma/"):
            heard.append((event, seconds, facts))

    life = job(steps=3)[0]
    life.forget("consumed", step=2)
    jax.monitoring.register_event_duration_secs_listener(listen)
    try:
        monitor = monitoring.Monitor()
        for _ in range(2):
            monitor.tell(life.dump().records)
    finally:
        jax.monitoring.unregister_event_duration_listener(listen)
    assert [(event, facts) for event, _, facts in heard] == [
        (event, {"model": 0}) for event in monitoring.EVENTS
    ]
    assert [seconds for _, seconds, _ in heard] == pytest.approx([0.002, 0.006, 0.008])
    assert all(f"`{event}`" in PAGE for event in monitoring.EVENTS)


def test_of_nothing_nothing_is_told():
    assert monitoring.newest_exchange(np.zeros(0, trace.RECORD_DTYPE)) is None


def test_the_text_is_what_prometheus_reads():
    metrics = ServerMetrics(1)
    metrics.read(server(steps=1))
    text = generate_latest(metrics.registry).decode()
    assert "# TYPE jaxrdma_step_seconds histogram" in text
    assert 'jaxrdma_steps_total{server="1"} 3.0' in text


def test_who_rests_reads_no_records():
    reads = 0

    class Counting(Engine):
        def records(self) -> bytes:
            nonlocal reads
            reads += 1
            return super().records()

    engine, monitor = Counting(job(steps=2)[0]), monitoring.Monitor()
    for last in (10, 10, 20, 20, 20):
        engine.last = last
        monitor.look(engine)
    assert reads == 2


# --- who asks and does not go on ---


@pytest.fixture
def endpoint(capsys: pytest.CaptureFixture[str], no_leftovers: None) -> Iterator[Endpoint]:
    with Endpoint(("127.0.0.1", 0), ServerMetrics(0).registry) as made:
        yield made
    assert capsys.readouterr().err == "", "strangers fill the log"


@contextlib.contextmanager
def connections(endpoint: Endpoint, count: int) -> Iterator[list[socket.socket]]:
    port = int(re.search(r":(\d+)/", endpoint.url).group(1))
    with contextlib.ExitStack() as stack:
        yield [
            stack.enter_context(socket.create_connection(("127.0.0.1", port))) for _ in range(count)
        ]


def ended(connection: socket.socket) -> bool:
    """Whether the other side has ended it, which has said that it can be read."""
    try:
        return connection.recv(65536) == b""
    except ConnectionError:
        return True


def wait_for_ends(waiting: list[socket.socket], count: int, say: bytes = b"") -> set[socket.socket]:
    """Until so many were ended by the other side. `say`: what each says twenty times a second meanwhile."""
    gone: set[socket.socket] = set()
    deadline = time.monotonic() + 30
    while len(gone) < count:
        assert time.monotonic() < deadline, f"{len(gone)} of {count}"
        left = [each for each in waiting if each not in gone]
        readable, _, _ = select.select(left, [], [], 0.05 if say else 30)
        gone.update(each for each in readable if ended(each))
        for each in set(left) - gone if say else ():
            with contextlib.suppress(ConnectionError):
                each.send(say)
    return gone


def scrape(endpoint: Endpoint) -> str:
    with urllib.request.urlopen(endpoint.url, timeout=20) as answer:
        return answer.read().decode()


def scrape_at_last(endpoint: Endpoint) -> str:
    """Once there is a place."""
    deadline = time.monotonic() + 20
    while True:
        try:
            return scrape(endpoint)
        except OSError:  # urllib's errors are such
            assert time.monotonic() < deadline


def threads() -> int:
    return sum(thread.name == "jaxrdma-scrape" for thread in threading.enumerate())


def test_many_strangers_get_few_threads_and_the_others_nothing(endpoint, monkeypatch):
    monkeypatch.setattr(module._Handler, "timeout", 100.0)
    monkeypatch.setattr(module, "_REQUEST_SECONDS", 100.0)
    with connections(endpoint, 300) as silent:
        wait_for_ends(silent, 300 - module._CONNECTIONS)
        assert threads() == module._CONNECTIONS
    assert "jaxrdma_recorder_events_total" in scrape_at_last(endpoint)


def test_who_is_silent_is_sent_away(endpoint, monkeypatch):
    monkeypatch.setattr(module._Handler, "timeout", 0.5)
    monkeypatch.setattr(module, "_REQUEST_SECONDS", 100.0)
    with connections(endpoint, module._CONNECTIONS) as silent:
        silent[0].send(b"GET /metrics HTTP/1.0\r\nHost:")
        wait_for_ends(silent, len(silent))
        assert "jaxrdma_recorder_events_total" in scrape_at_last(endpoint)


def test_a_scrape_is_answered_beside_strangers_and_once_one_of_too_many_goes(endpoint):
    with connections(endpoint, module._CONNECTIONS - 1):
        with connections(endpoint, 1), pytest.raises(OSError):
            scrape(endpoint)  # accepted after all of these
        for _ in range(3):
            assert "jaxrdma_recorder_events_total" in scrape_at_last(endpoint)


def test_who_sends_byte_by_byte_is_sent_away_too(endpoint, monkeypatch):
    monkeypatch.setattr(module, "_REQUEST_SECONDS", 1.0)
    begin = time.monotonic()
    with connections(endpoint, module._CONNECTIONS) as slow:
        wait_for_ends(slow, len(slow), say=b"G")
        assert time.monotonic() - begin >= 1.0
        assert "jaxrdma_recorder_events_total" in scrape_at_last(endpoint)


def test_who_does_not_take_the_answer_is_sent_away_too(capsys, monkeypatch, no_leftovers):
    monkeypatch.setattr(module, "_REQUEST_SECONDS", 1.0)
    monkeypatch.setattr(module._Handler, "timeout", 0.5)
    registry = CollectorRegistry()
    # More than the buffers of both ends have room for.
    Gauge("large", "x" * 16_000_000, registry=registry)
    with (
        Endpoint(("127.0.0.1", 0), registry) as endpoint,
        connections(endpoint, module._CONNECTIONS) as slow,
    ):
        for each in slow:
            each.sendall(b"GET /metrics HTTP/1.0\r\n\r\n")
        with contextlib.suppress(OSError, http.client.HTTPException):
            scrape(endpoint)  # its turn comes after all of these, whatever it is told
        monkeypatch.setattr(module, "_REQUEST_SECONDS", 100.0)
        assert len(scrape_at_last(endpoint)) > 16_000_000
    assert capsys.readouterr().err == ""


def test_an_endpoint_that_closes_ends_what_is_open(endpoint):
    with connections(endpoint, 3) as silent:
        begin = time.monotonic()
        scrape_at_last(endpoint)  # those before it have been accepted
        endpoint.close()
        wait_for_ends(silent, 3)
        assert time.monotonic() - begin < module._SILENT_SECONDS


def test_of_a_request_only_so_much_is_read(endpoint):
    source = io.BytesIO(bytes(1_000_000))
    reader = io.BufferedReader(module._Bounded(source))
    assert len(reader.read()) == source.tell() == module._REQUEST_BYTES
    long = urllib.request.Request(endpoint.url, headers={"Cookie": "x" * 8000})
    with urllib.request.urlopen(long, timeout=20) as answer:
        assert answer.status == 200


def test_the_limits_are_those_that_are_documented():
    assert f"at most {module._CONNECTIONS} connections" in PAGE
    assert f"{module._SILENT_SECONDS:.0f} s of silence" in PAGE
    assert f"{module._REQUEST_SECONDS:.0f} s" in PAGE
    assert f"{module._REQUEST_BYTES >> 10} KiB" in PAGE
