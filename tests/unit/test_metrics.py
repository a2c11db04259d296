"""The histograms hold every step once, of the length that it had, however its records come."""

import re
from pathlib import Path
from types import SimpleNamespace

import jax.monitoring
import numpy as np
import pytest
from prometheus_client import generate_latest

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
