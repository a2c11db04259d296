"""What of a job runs on this machine: read as it was meant, or refused with what was probably meant."""

import socket
from collections.abc import Iterator

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxrdma import hosts
from jaxrdma.errors import ConfigError
from jaxrdma.hosts import Share, check_place, listen_address, parse_share, route_address

WORKER = Share(False, (), (1,))
# One for documentation: nobody has it.
NOT_OURS = "192.0.2.77"


@pytest.fixture
def address() -> Iterator[str]:
    """Of this machine, and no loopback."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(("192.0.2.1", 1))
        except OSError:
            pytest.skip("not run: this machine has loopback alone")
        yield probe.getsockname()[0]


@pytest.mark.parametrize(
    ("text", "share"),
    [
        ("coordinator", Share(True, (), ())),
        ("worker:1", WORKER),
        ("coordinator,server:0,worker:0", Share(True, (0,), (0,))),
        (" worker:0-2 , server:1 ,", Share(False, (1,), (0, 1, 2))),
        ("worker:0,worker:2-3,coordinator", Share(True, (), (0, 2, 3))),
    ],
)
def test_a_share_is_read(text, share):
    assert parse_share(text, 2, 4) == share


def test_a_share_of_spare_places_alone_can_be_done_without():
    assert Share(False, (), (2, 3)).is_spare(2)
    assert not Share(False, (), (1, 2)).is_spare(2)
    assert not Share(False, (0,), (2,)).is_spare(2)
    assert not Share(True, (), ()).is_spare(2)


@given(st.booleans(), st.sets(st.integers(0, 9)), st.sets(st.integers(0, 9)))
def test_a_share_is_read_as_it_is_written(coordinator, servers, workers):
    share = Share(coordinator, tuple(sorted(servers)), tuple(sorted(workers)))
    if str(share):
        assert parse_share(str(share), 10, 10) == share


@pytest.mark.parametrize(
    ("text", "refusal"),
    [
        ("", "--here is empty: what runs on this machine? All of the job is coordinator,server:0,"),
        (" , ", "--here is empty"),
        ("sever:0", "there is no 'sever'; did you mean server:0?"),
        ("corodinator", "there is no 'corodinator'; did you mean coordinator?"),
        ("gpu:0", "there is no 'gpu'; all of the job is coordinator,server:0,worker:0-2"),
        ("coordinator:0", "there is one coordinator; did you mean coordinator?"),
        ("worker", "expected worker:INDEX or worker:FIRST-LAST; did you mean worker:0-2?"),
        ("server:x", "expected server:INDEX or server:FIRST-LAST; did you mean server:0?"),
        ("worker:-1", "expected worker:INDEX"),
        ("worker:3", "a job of 3 workers has worker:0-2; did you mean worker:2?"),
        ("worker:1-7", "a job of 3 workers has worker:0-2; did you mean worker:1-2?"),
        ("server:1", "a job of 1 server has server:0; did you mean server:0?"),
        ("worker:2-1", "the first comes first; did you mean worker:1-2?"),
        ("worker:0-1,worker:1", "--here names worker:1 twice; did you mean worker:2?"),
        ("server:0,server:0", "--here names server:0 twice; once is enough"),
        ("coordinator,coordinator", "--here names the coordinator twice; once is enough"),
    ],
)
def test_a_wrong_share_is_refused_with_the_nearest_right_one(text, refusal):
    with pytest.raises(ConfigError) as caught:
        parse_share(text, 1, 3)
    assert refusal in str(caught.value)


def test_loopback_needs_neither_a_secret_nor_the_coordinator():
    check_place(WORKER, "127.0.0.1:7", "")
    check_place(WORKER, "[::1]:7", "")
    check_place(WORKER, "localhost:7", "")


def test_beyond_loopback_there_must_be_a_secret():
    with pytest.raises(ConfigError, match="set JAXRDMA_SECRET, or --secret-file"):
        check_place(WORKER, f"{NOT_OURS}:7", "")
    check_place(WORKER, f"{NOT_OURS}:7", "s")


def test_a_name_that_cannot_be_resolved_yet_is_no_mistake():
    check_place(WORKER, "nowhere.invalid:7", "s")


def test_the_coordinator_cannot_be_elsewhere_if_the_address_is_here(address):
    with pytest.raises(ConfigError, match="did you mean --here coordinator,worker:1"):
        check_place(WORKER, f"{address}:1", "s")
    with socket.create_server((address, 0)) as by_hand:
        check_place(WORKER, f"{address}:{by_hand.getsockname()[1]}", "s")
    check_place(Share(True, (), ()), f"{address}:1", "s")


def test_the_coordinator_cannot_be_here_if_the_address_is_elsewhere(address):
    with pytest.raises(ConfigError) as caught:
        check_place(Share(True, (), ()), f"{NOT_OURS}:7", "s")
    assert f"did you mean --coordinator {address}:7?" in str(caught.value)


@pytest.mark.parametrize(
    ("text", "listen"),
    [
        ("127.0.0.1", "127.0.0.1:0"),
        ("localhost", "localhost:0"),
        ("::1", "[::1]:0"),
        ("[::1]",) * 2,
    ],
)
def test_where_servers_listen_may_be_said(text, listen):
    assert listen_address(text) == (listen if ":0" in listen else "[::1]:0")


@pytest.mark.parametrize(
    ("text", "refusal"),
    [
        ("0.0.0.0", "workers are told this address, and cannot reach it"),
        ("::", "workers are told this address, and cannot reach it"),
        (NOT_OURS, "that is no address of this machine"),
        ("10.0.0.1:80", "expected a host, without a port; did you mean 10.0.0.1?"),
    ],
)
def test_servers_listen_only_where_workers_reach_them(text, refusal):
    with pytest.raises(ConfigError) as caught:
        listen_address(text)
    assert refusal in str(caught.value)


def never(text: str) -> None:
    pytest.fail(text)


def test_servers_listen_at_the_source_of_the_route_to_the_coordinator(address):
    assert route_address("127.0.0.1:7", 0, never) == "127.0.0.1:0"
    assert route_address("[::1]:7", 0, never) == "[::1]:0"
    assert route_address("192.0.2.1:7", 0, never) == f"{address}:0"


def test_a_name_and_a_route_are_waited_for(monkeypatch):
    answers = [ConfigError("peer 'a' has no address"), (None, None), (None, "10.0.0.2")]
    monkeypatch.setattr(hosts, "_RETRY_SECONDS", 0.0)

    def find_route(host: str):
        answer = answers.pop(0)
        if isinstance(answer, Exception):
            raise answer
        return answer

    monkeypatch.setattr(hosts, "find_route", find_route)
    assert route_address("a:7", 30, never) == "10.0.0.2:0"
    answers.append((None, None))
    with pytest.raises(ConfigError, match="there is no route to the coordinator at a:7, for 0 s"):
        route_address("a:7", 0, never)
