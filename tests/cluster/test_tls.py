"""A whole job over TLS: it trains, is observed, traced, followed; who has no certificate of its CA is turned away."""

import json
import os
import subprocess
from collections.abc import Callable
from pathlib import Path

import grpc
import jax
import numpy as np
import pytest

import jaxrdma
from jaxrdma import control
from tests.certificates import Authority, settings, variables
from tests.cluster.job import SCRIPTS, Job, free_address
from tests.cluster.job import ask as run_command
from tests.cluster.scripts import model
from tests.cluster.test_follow import stop_at
from tests.cluster.test_siege import wait_until

SECRET, NAME = "open sesame", "sealed"


def ask(command: str, address: str, **env: str) -> "subprocess.CompletedProcess[str]":
    known = {"JAXRDMA_SECRET": SECRET, "JAXRDMA_JOB": NAME}
    return run_command(command, address, "--json", **known | env)


@pytest.mark.timeout(180)
def test_a_job_trains_over_tls_and_a_stranger_gets_no_further_than_the_handshake(
    make_job: Callable[..., Job], tmp_path: Path
) -> None:
    ours, theirs = Authority(tmp_path, "Ours"), Authority(tmp_path, "Theirs")
    mine = ours.issue("127.0.0.1")
    address, stop, out, job = free_address(), tmp_path / "stop", tmp_path / "p", make_job(1, 2)
    job.at(address)
    job.spawn(
        "launch",
        [
            *("-m", "jaxrdma", "launch", "--servers", "1", "--workers", "2", "--ordered"),
            *("--coordinator", address, "--here", "coordinator,server:0,worker:0-1"),
            *map(str, (SCRIPTS / "besieged.py", out, stop)),
        ],
        os.environ | variables(mine) | {"JAXRDMA_SECRET": SECRET, "JAXRDMA_JOB": NAME},
    )

    def step() -> int:
        asked = ask("status", address, **variables(ours.issue("observer")))
        if asked.returncode != 0:
            assert "cannot be reached" in asked.stderr, asked.stderr
            return -1
        status = json.loads(asked.stdout)
        return min((p["step"] for p in status["processes"] if "worker" in p["name"]), default=-1)

    wait_until(lambda: step() > 10, job)
    traced = ask("trace", address, **variables(mine))
    assert traced.returncode == 0, traced.stderr
    assert json.loads(traced.stdout)["missing"] == []
    with jaxrdma.follow(
        coordinator=address, secret=SECRET, job=NAME, **settings(ours.issue("follower"))
    ) as follower:
        assert follower.pull(model.parameters(), newer_than=10).step > 10

    # Who has the secret, but no certificate, or one of another CA.
    for command in ("status", "trace"):
        stranger = ask(command, address)
        assert stranger.returncode == 1
        assert f"cannot speak with the coordinator at {address}: " in stranger.stderr
        assert "it expects TLS" in stranger.stderr and "JAXRDMA_TLS_CERT" in stranger.stderr
        stranger = ask(command, address, **variables(theirs.issue("127.0.0.1")))
        assert stranger.returncode == 1
        assert "issued by Ours" in stranger.stderr and "of another CA" in stranger.stderr
    for certificate in (None, theirs.issue("127.0.0.1")):
        key, chain = (
            (None, None)
            if certificate is None
            else (Path(certificate.key).read_bytes(), Path(certificate.cert).read_bytes())
        )
        credentials = grpc.ssl_channel_credentials(ours.file.read_bytes(), key, chain)
        with grpc.secure_channel(address, credentials) as channel:
            metadata = ((control.SECRET_KEY, SECRET.encode()),)
            stream = channel.stream_stream(control.METHOD)(iter([b"\x80"]), metadata=metadata)
            with pytest.raises(grpc.RpcError) as caught:
                next(stream)
            assert caught.value.code() == grpc.StatusCode.UNAVAILABLE

    begun = step()
    wait_until(lambda: step() > begun, job)
    stop_at(stop, step() + 100)
    job.succeed(100)
    # None of them was heard: gRPC closed their connections, and does not tell.
    assert "stranger" not in job.output("launch")
    with np.load(f"{out}0.npz") as first, np.load(f"{out}1.npz") as second:
        steps = int(first["step"])
        for i, leaf in enumerate(jax.tree.leaves(model.reference("momentum", 2, steps))):
            for got in (first, second):
                np.testing.assert_array_equal(got[f"arr_{i}"], np.asarray(leaf))


@pytest.mark.timeout(120)
def test_a_job_of_one_machine_and_a_local_cluster_take_tls_from_the_environment(
    make_job: Callable[..., Job], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ours = Authority(tmp_path, "Ours")
    job = make_job(1, 1)
    launch = ["-m", "jaxrdma", "launch", str(SCRIPTS / "one_layer.py"), "50"]
    job.spawn("named", launch, os.environ | variables(ours.issue("127.0.0.1")))
    job.spawn("other", launch, os.environ | variables(ours.issue("node7")))
    assert job.wait(60) == {"named": 0, "other": 2}, job.outputs()
    assert "the others know it as 127.0.0.1. Expected a certificate with" in job.output("other")
    for name, value in variables(ours.issue("127.0.0.1")).items():
        monkeypatch.setenv(name, value)
    with jaxrdma.local_cluster() as cluster, jaxrdma.connect(**cluster) as session:
        assert cluster["tls_ca"] == str(ours.file)
        assert session.num_workers == 1
