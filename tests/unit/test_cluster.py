"""ClusterSpec: what environments give it, and what it refuses."""

import json
import re
from dataclasses import replace
from typing import get_args

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxrdma.cluster import (
    MISSABLE,
    ClusterSpec,
    Missed,
    TlsFiles,
    VerbsSettings,
    check_listen,
    format_address,
    is_loopback,
    jaxrdma_settings,
    parse_address,
    tf_config_settings,
    tls_files,
)
from jaxrdma.control import ClientMessage, CoordinatorMessage
from jaxrdma.errors import ConfigError

ENV = {
    "JAXRDMA_COORDINATOR": "127.0.0.1:7000",
    "JAXRDMA_INDEX": "1",
    "JAXRDMA_NUM_WORKERS": "2",
    "JAXRDMA_NUM_SERVERS": "1",
}


def test_defaults_are_the_documented_ones():
    spec = ClusterSpec.from_environment(ENV)
    assert (spec.role, spec.index, spec.num_workers, spec.num_servers) == ("worker", 1, 2, 1)
    assert (spec.transport, spec.connect_timeout, spec.heartbeat_timeout) == ("auto", 300, 15)
    assert (spec.partition_bytes, spec.ordered, spec.spin_us) == (1 << 20, False, None)
    assert (spec.checkpoint, spec.checkpoint_steps, spec.checkpoint_seconds) == (None, None, None)
    assert (spec.checkpoint_keep, spec.checkpoint_restore) == (3, "auto")


def test_overrides_go_before_variables_and_none_means_not_given():
    spec = ClusterSpec.from_environment(ENV, index=0, num_workers=None, ordered=True)
    assert (spec.index, spec.num_workers, spec.ordered) == (0, 2, True)


def test_empty_variables_count_as_not_given():
    assert ClusterSpec.from_environment({**ENV, "JAXRDMA_TRANSPORT": " "}).transport == "auto"


def test_missing_fields_are_all_named():
    with pytest.raises(ConfigError, match=r"index, num_servers not given.*JAXRDMA_INDEX"):
        ClusterSpec.from_environment(
            {"JAXRDMA_COORDINATOR": "localhost:1", "JAXRDMA_NUM_WORKERS": "2"}
        )


@pytest.mark.parametrize(
    ("variable", "meant"),
    [
        ("JAXRDMA_NUM_WORKER", "JAXRDMA_NUM_WORKERS"),
        ("JAXRDMA_PARTITIONBYTES", "JAXRDMA_PARTITION_BYTES"),
        ("JAXRDMA_Transport", "JAXRDMA_TRANSPORT"),
    ],
)
def test_unknown_variable_is_refused_with_the_nearest_name(variable, meant):
    with pytest.raises(ConfigError, match=f"{variable} does not exist; did you mean {meant}"):
        jaxrdma_settings({variable: "1"})


def test_unknown_override_is_refused_with_the_nearest_name():
    with pytest.raises(ConfigError, match="'num_worker'; did you mean num_workers"):
        ClusterSpec.from_environment(ENV, num_worker=2)


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"JAXRDMA_INDEX": "2"}, r"index 2 of a worker in a job of 2 workers: expected 0 to 1"),
        ({"JAXRDMA_INDEX": "-1"}, "index -1"),
        ({"JAXRDMA_MOST_WORKERS": "1"}, "most_workers is 1: expected at least num_workers, 2"),
        (
            {"JAXRDMA_MOST_WORKERS": "4", "JAXRDMA_INDEX": "4"},
            "index 4 of a worker in a job of at most 4 workers: expected 0 to 3",
        ),
        (
            {"JAXRDMA_MOST_WORKERS": "4", "JAXRDMA_REPLICATE": "1", "JAXRDMA_NUM_SERVERS": "2"},
            "replicate=1 in a job to which workers may be added, up to 4",
        ),
        ({"JAXRDMA_INDEX": "one"}, "JAXRDMA_INDEX='one': expected a whole number"),
        ({"JAXRDMA_ROLE": "sever"}, "did you mean server"),
        ({"JAXRDMA_ROLE": "server"}, "index 1 of a server in a job of 1 servers"),
        ({"JAXRDMA_NUM_SERVERS": "0"}, "num_servers is 0: expected at least 1"),
        ({"JAXRDMA_COORDINATOR": "nowhere"}, "expected host:port"),
        ({"JAXRDMA_COORDINATOR": "a:70000"}, "expected a port of 0 to 65535"),
        ({"JAXRDMA_COORDINATOR": "a:0"}, "port 0"),
        ({"JAXRDMA_TRANSPORT": "verb"}, "transport 'verb' is not there: expected one of auto"),
        ({"JAXRDMA_GID_INDEX": "-1"}, "JAXRDMA_GID_INDEX is -1: expected 0 to 65535"),
        ({"JAXRDMA_TIMEOUT": "32"}, "JAXRDMA_TIMEOUT is 32: expected 1 to 31"),
        ({"JAXRDMA_RETRY_COUNTS": "3"}, "did you mean JAXRDMA_RETRY_COUNT?"),
        ({"JAXRDMA_PORT": "first"}, "JAXRDMA_PORT='first': expected a whole number"),
        ({"JAXRDMA_CONNECT_TIMEOUT": "0"}, "connect_timeout is 0"),
        ({"JAXRDMA_HEARTBEAT_TIMEOUT": "nan"}, "heartbeat_timeout is nan"),
        ({"JAXRDMA_ORDERED": "maybe"}, "expected 0 or 1"),
        ({"JAXRDMA_PARTITION_BYTES": "1"}, "partition_bytes is 1"),
        ({"JAXRDMA_JOB": "x" * 65}, "1 to 64 bytes"),
        ({"JAXRDMA_ATTEMPT": "-1"}, "attempt is -1: expected at least 0"),
    ],
)
def test_impossible_values_are_refused_by_name(change, text):
    with pytest.raises(ConfigError, match=text):
        ClusterSpec.from_environment({**ENV, **change})


def test_a_follower_needs_to_know_the_coordinator_alone_and_is_nobody_of_its_environment():
    spec = ClusterSpec.from_environment({}, role="follower", coordinator="h:1")
    assert spec.shared_settings() == {}
    inside = ClusterSpec.from_environment(
        {**ENV, "JAXRDMA_PARTITION_BYTES": "4096"}, role="follower"
    )
    assert (inside.role, inside.index, inside.coordinator) == (
        "follower",
        0,
        ENV["JAXRDMA_COORDINATOR"],
    )
    with pytest.raises(ConfigError, match="no job to follow: coordinator not given"):
        ClusterSpec.from_environment({}, role="follower")


def test_the_secret_is_never_shown():
    spec = ClusterSpec.from_environment({**ENV, "JAXRDMA_SECRET": "hunter2"})
    assert spec.secret == "hunter2"
    assert "hunter2" not in repr(spec)


@given(
    st.builds(
        ClusterSpec,
        coordinator=st.sampled_from(["localhost:1", "[::1]:9", "10.1.2.3:65535"]),
        role=st.sampled_from(["worker", "server"]),
        index=st.integers(0, 3),
        num_workers=st.integers(4, 9),
        num_servers=st.integers(4, 9),
        secret=st.text("abc123", max_size=8),
        job=st.text("xyz", min_size=1, max_size=8),
        tls_cert=st.sampled_from(["/etc/tls/own.pem", "own certificate.pem"]),
        tls_key=st.just("own.key"),
        tls_ca=st.just("ca.pem"),
        transport=st.sampled_from(["auto", "tcp", "verbs"]),
        verbs=st.builds(
            VerbsSettings,
            device=st.none() | st.sampled_from([("rxe0",), ("mlx5_1", "mlx5_0")]),
            gid_index=st.none() | st.integers(0, 65535),
            timeout=st.none() | st.integers(1, 31),
            link_timeout=st.none() | st.floats(0, 86400),
        ),
        connect_timeout=st.floats(0.5, 1e6),
        heartbeat_timeout=st.floats(0.5, 1e6),
        attempt=st.integers(0, 99),
        partition_bytes=st.integers(64, 1 << 40),
        ordered=st.booleans(),
        spin_us=st.none() | st.integers(0, 1000),
        fault=st.sampled_from([None, "worker 1: lost 40", "server 0: missed landed 3"]),
        checkpoint=st.sampled_from(["/mnt/run 1", "runs"]),
        checkpoint_steps=st.none() | st.integers(1, 10**9),
        checkpoint_seconds=st.none() | st.floats(0.1, 1e6),
        checkpoint_keep=st.integers(1, 9),
        checkpoint_restore=st.sampled_from(["auto", "new-update"]),
        replicate=st.sampled_from([0, 1]),
    )
)
def test_a_spec_survives_the_environment(spec):
    assert ClusterSpec.from_environment(spec.to_environment()) == spec


def test_places_are_as_many_as_workers_or_more_and_alike_in_every_process():
    spec = ClusterSpec("a:1", "worker", 1, 2, 1)
    assert (spec.places, spec.grows) == (2, False)
    assert spec.shared_settings() == replace(spec, most_workers=2).shared_settings()
    more = replace(spec, most_workers=4, index=3)
    assert (more.places, more.grows, more.shared_settings()["most_workers"]) == (4, True, 4)
    assert ClusterSpec.from_environment(more.to_environment()) == more


def test_tls_is_all_of_its_files_or_none():
    assert ClusterSpec.from_environment(ENV).tls is None
    files = {"JAXRDMA_TLS_CERT": "a.pem", "JAXRDMA_TLS_KEY": "a.key", "JAXRDMA_TLS_CA": "ca.pem"}
    assert ClusterSpec.from_environment(ENV | files).tls == TlsFiles("a.pem", "a.key", "ca.pem")
    for missing in files:
        rest = {name: path for name, path in files.items() if name != missing}
        told = " and ".join(f"{name}={path}" for name, path in rest.items())
        text = re.escape(f"{told} without {missing}: expected all three, to speak TLS, or none")
        with pytest.raises(ConfigError, match=text):
            ClusterSpec.from_environment(ENV | rest)
        # Commands that ask a job have no spec.
        with pytest.raises(ConfigError, match=text):
            tls_files(jaxrdma_settings(rest))
    with pytest.raises(
        ConfigError, match="JAXRDMA_TLS_CRT does not exist; did you mean JAXRDMA_TLS_C"
    ):
        jaxrdma_settings({"JAXRDMA_TLS_CRT": "a.pem"})


def test_devices_are_named_with_commas_between():
    def named(text: str) -> tuple[str, ...] | None:
        return ClusterSpec.from_environment({**ENV, "JAXRDMA_DEVICE": text}).verbs.device

    assert named("") is None
    assert named("mlx5_0") == ("mlx5_0",)
    assert named(" mlx5_1, mlx5_0 ") == ("mlx5_1", "mlx5_0")
    for text, told in (
        (
            "mlx5_0,",
            "JAXRDMA_DEVICE=mlx5_0,: a name is empty. Expected one device, or several with",
        ),
        (",", "a name is empty"),
        ("a,b,a", "a is there twice. Name each device once"),
        ("a,b,c,d,e", "5 devices. Name the best 4 of them"),
    ):
        with pytest.raises(ConfigError, match=re.escape(told)):
            named(text)
    with pytest.raises(ConfigError, match="a name is empty"):
        VerbsSettings(device=())


COPIES = {"REPLICATE": "1", "ROLE": "server", "NUM_SERVERS": "2"}


@pytest.mark.parametrize(
    ("settings", "text"),
    [
        ({"CHECKPOINT_STEPS": "5"}, "no folder to save in: set JAXRDMA_CHECKPOINT"),
        ({"CHECKPOINT": "d", "CHECKPOINT_STEPS": "0"}, "checkpoint_steps is 0: expected at least"),
        ({"CHECKPOINT": "d", "CHECKPOINT_SECONDS": "inf"}, "checkpoint_seconds is inf"),
        ({"CHECKPOINT": "d", "CHECKPOINT_KEEP": "0"}, "checkpoint_keep is 0: expected at least 1"),
        ({"CHECKPOINT": "d", "CHECKPOINT_RESTORE": "nevr"}, "did you mean never"),
        ({"REPLICATE": "2"}, "replicate is 2: expected 0, or 1 for one copy"),
        ({"REPLICATE": "1", "NUM_SERVERS": "1"}, "needs at least 2 servers, .* there is 1"),
        (COPIES, "needs a folder .* set JAXRDMA_CHECKPOINT"),
        (
            {**COPIES, "CHECKPOINT": "d", "CHECKPOINT_RESTORE": "never"},
            "replicate=1 with checkpoint_restore never",
        ),
    ],
)
def test_checkpoints_that_cannot_be_are_refused(settings, text):
    env = ENV | {f"JAXRDMA_{name}": value for name, value in settings.items()}
    with pytest.raises(ConfigError, match=text):
        ClusterSpec.from_environment(env)


# --- TF_CONFIG ---


def tf(task, **cluster):
    return {"TF_CONFIG": json.dumps({"cluster": cluster, "task": task})}


def test_tf_config_gives_a_worker_its_place():
    env = tf({"type": "worker", "index": 1}, ps=["a:1", "b:1"], worker=["c:1", "d:1"])
    spec = ClusterSpec.from_environment(env)
    assert (spec.role, spec.index, spec.num_workers, spec.num_servers) == ("worker", 1, 2, 2)
    assert spec.coordinator == "a:1"


def test_tf_config_counts_the_chief_as_worker_0():
    cluster = {"ps": ["a:1"], "chief": ["b:1"], "worker": ["c:1", "d:1"]}
    chief = tf_config_settings(tf({"type": "chief", "index": 0}, **cluster))
    worker = tf_config_settings(tf({"type": "worker", "index": 0}, **cluster))
    assert (chief["index"], worker["index"], worker["num_workers"]) == (0, 1, 3)


def test_tf_config_makes_servers_of_ps_tasks():
    env = tf({"type": "ps", "index": 1}, ps=["a:1", "b:1"], worker=["c:1"], coordinator=["z:5"])
    spec = ClusterSpec.from_environment(env)
    assert (spec.role, spec.index, spec.coordinator) == ("server", 1, "z:5")


def test_jaxrdma_variables_go_before_tf_config():
    env = tf({"type": "worker", "index": 0}, ps=["a:1"], worker=["c:1", "d:1"])
    assert ClusterSpec.from_environment({**env, "JAXRDMA_INDEX": "1"}).index == 1


@pytest.mark.parametrize(
    ("env", "text"),
    [
        ({"TF_CONFIG": "{"}, "not JSON"),
        ({"TF_CONFIG": "[1]"}, 'no "cluster"'),
        (tf({"type": "worker", "index": 2}, ps=["a:1"], worker=["b:1"]), "no worker 2 among the 1"),
        (tf({"type": "worker", "index": -1}, ps=["a:1"], worker=["b:1"]), "no worker -1"),
        (
            tf({"type": "worker", "index": 0}, ps=["a:1"], worker=["a:1"]),
            "a:1 to both ps 0 and worker 0",
        ),
        (tf({"type": "worker", "index": 0}, worker=["a:1"]), 'no "ps"'),
        (tf({"type": "cook", "index": 0}, ps=["a:1"], worker=["b:1"]), "task: expected"),
        (tf({"type": "worker", "index": 0}, ps=["a"], worker=["b:1"]), "ps 0 'a': expected host"),
        (tf({"type": "worker", "index": 0}, ps="a:1", worker=["b:1"]), "cluster.ps: expected"),
        (tf({"type": "worker", "index": 0}, pss=["a:1"]), "did you mean ps"),
    ],
)
def test_a_wrong_tf_config_is_refused_by_name(env, text):
    with pytest.raises(ConfigError, match=text):
        ClusterSpec.from_environment(env)


# --- addresses ---


@pytest.mark.parametrize(
    ("text", "parts"),
    [("a:1", ("a", 1)), ("[::1]:80", ("::1", 80)), ("10.0.0.1:0", ("10.0.0.1", 0))],
)
def test_addresses_are_read_and_written(text, parts):
    assert parse_address(text) == parts
    assert format_address(*parts) == text


@pytest.mark.parametrize("text", ["", ":", ":1", "a", "a:", "a:x", "::1:80", "a:-1", "a:٣"])
def test_bad_addresses_are_refused(text):
    with pytest.raises(ConfigError, match="thing"):
        parse_address(text, "thing")


@pytest.mark.parametrize("host", ["localhost", "127.0.0.1", "127.9.9.9", "::1"])
def test_loopback_needs_no_secret(host):
    assert is_loopback(host)
    check_listen(format_address(host, 0), "")


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "10.0.0.1", "localhost.evil.org", "myhost"])
def test_other_addresses_need_a_secret(host):
    with pytest.raises(ConfigError, match="JAXRDMA_SECRET"):
        check_listen(format_address(host, 0), "")
    check_listen(format_address(host, 0), "secret")


def test_what_a_drill_may_lose_are_messages_of_the_control_plane():
    kinds = {
        message.__struct_config__.tag
        for message in get_args(ClientMessage) + get_args(CoordinatorMessage)
    }
    assert set(MISSABLE) <= kinds


def test_a_fault_is_for_one_process():
    def spec(role: str = "worker", index: int = 0, fault: str | None = None) -> ClusterSpec:
        return ClusterSpec("127.0.0.1:7000", role, index, 2, 2, fault=fault)

    cluster = spec(role="worker", index=1, fault="worker 1: delayed 3 500")
    assert cluster.own_fault == "delayed 3 500"
    for others in ({"index": 0}, {"role": "server", "index": 1}):
        assert spec(fault="worker 1: lost 40", **others).own_fault == ""
    assert spec().own_fault == ""
    assert cluster.missed is None
    missed = spec(role="server", index=1, fault="server 1: missed decided 9")
    assert (missed.missed, missed.own_fault) == (Missed("decided", 9), "")
    assert spec(fault="server 1: missed decided 9").missed is None
    for bad in (
        "lost 40",
        "worker 1: lost",
        "worker 1: lost 0",
        "launcher 0: lost 1",
        "worker 1: missed 9",
        "worker 1: missed heartbeat 9",
        "worker 1: missed decided 0",
        "worker 1 lost 40",
    ):
        with pytest.raises(ConfigError, match="'worker 1: lost 40'"):
            spec(fault=bad)
