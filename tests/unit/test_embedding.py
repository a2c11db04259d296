"""What a table may be, and what is said where it may not."""

import re
from typing import Any

import msgspec
import pytest

from jaxrdma import _native
from jaxrdma.embedding import (
    MOST_ROWS,
    RowAdagrad,
    RowAdam,
    RowConstant,
    RowNormal,
    RowSGD,
    RowUniform,
    TableSettings,
    check_settings,
    native_spec,
    table_policy,
)
from jaxrdma.errors import ConfigError, MismatchError
from jaxrdma.policy import Async, BoundedStaleness, Policy, SyncReplicas

GOOD = TableSettings("words", 100, 8, RowAdagrad(0.1), RowNormal())


def replaced(**changes: Any) -> TableSettings:
    return msgspec.structs.replace(GOOD, **changes)


@pytest.mark.parametrize("optimizer", [RowSGD(1), RowSGD(0.1, 0.9), RowAdagrad(0.1), RowAdam(1e-3)])
@pytest.mark.parametrize("init", [RowConstant(), RowUniform(-1, 1, seed=2**64 - 1), RowNormal()])
def test_what_can_be_is_taken_and_survives_the_wire(optimizer: Any, init: Any) -> None:
    settings = replaced(optimizer=optimizer, init=init)
    check_settings(settings, 1 << 20)
    assert TableSettings.from_fingerprint(settings.fingerprint()) == settings
    spec = native_spec(3, settings, SyncReplicas())
    assert spec.id == 3
    assert _native.check_table(spec, 1 << 20).ok


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"name": ""}, "name: expected 1 to 128 characters"),
        ({"name": 7}, "name: expected str, got 7"),
        ({"rows": 0}, "rows: expected 1 to"),
        ({"rows": MOST_ROWS + 1}, "rows: expected 1 to 2,147,483,647"),
        ({"rows": 1.5}, "rows: expected int, got 1.5"),
        ({"rows": True}, "rows: expected int, got True"),
        ({"columns": 0}, "columns: expected 1 to 253"),
        ({"columns": 254}, "fits JAXRDMA_PARTITION_BYTES=1024, got 254"),
        ({"optimizer": "adam"}, "optimizer: expected RowSGD or RowAdagrad or RowAdam, got 'adam'"),
        ({"init": 0.0}, "init: expected RowConstant or RowUniform or RowNormal"),
        ({"optimizer": RowSGD(0.0)}, "RowSGD(learning_rate=): expected more than 0, got 0.0"),
        ({"optimizer": RowSGD(float("nan"))}, "expected a finite number, got nan"),
        ({"optimizer": RowSGD(1e39)}, "expected a float32"),
        (
            {"optimizer": RowSGD(0.1, momentum=1.0)},
            "RowSGD(momentum=): expected from 0 on, below 1",
        ),
        ({"optimizer": RowAdam(0.1, b2=-0.1)}, "RowAdam(b2=): expected from 0 on, below 1"),
        ({"optimizer": RowAdagrad(0.1, eps=0.0)}, "RowAdagrad(eps=): expected more than 0"),
        ({"optimizer": RowAdagrad(0.1, -1.0)}, "RowAdagrad(initial_accumulator=): expected from 0"),
        ({"init": RowNormal(stddev=-1.0)}, "RowNormal(stddev=): expected from 0 on"),
        ({"init": RowNormal(seed=-1)}, "RowNormal(seed=): expected an integer from 0 on"),
        ({"init": RowUniform(1.0, -1.0)}, "RowUniform(high=): expected at least low=1.0, got -1.0"),
    ],
)
def test_what_cannot_be_is_refused_by_name(changes: dict[str, Any], says: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(says)) as caught:
        check_settings(replaced(**changes), 1024)
    assert "embedding " in str(caught.value)


def test_the_widest_row_is_what_the_engines_take() -> None:
    check_settings(replaced(columns=253), 1024)
    assert _native.check_table(native_spec(0, replaced(columns=253), SyncReplicas()), 1024).ok
    assert not _native.check_table(native_spec(0, replaced(columns=254), SyncReplicas()), 1024).ok
    assert _native.MOST_ROWS == MOST_ROWS


@pytest.mark.parametrize(
    ("policy", "says"),
    [
        (SyncReplicas(2), "one push of each of the 3 workers"),
        (SyncReplicas(on_loss="shrink"), "on_loss='shrink'"),
        (SyncReplicas(on_loss="wait"), "on_loss='wait'"),
        (BoundedStaleness(1), "bounded_staleness"),
    ],
)
def test_policies_that_tables_lack_are_refused_with_those_they_have(
    policy: Policy, says: str
) -> None:
    with pytest.raises(ConfigError, match=re.escape(says)) as caught:
        table_policy("words", policy, 3)
    assert "use SyncReplicas(), with on_loss='fail', or Async()" in str(caught.value)


def test_policies_that_tables_have_are_complete() -> None:
    assert table_policy("words", None, 3) == SyncReplicas().complete(3)
    assert table_policy("words", Async(), 3).on_loss == "shrink"


def test_digests_differ_where_rows_lie_or_travel_otherwise() -> None:
    digests = {
        GOOD.digest(1, 1024),
        GOOD.digest(2, 1024),
        GOOD.digest(1, 2048),
        replaced(rows=101).digest(1, 1024),
        replaced(columns=9).digest(1, 1024),
    }
    assert len(digests) == 5
    assert replaced(name="others").digest(1, 1024) == GOOD.digest(1, 1024)


@pytest.mark.parametrize("text", ["", "{}", '{"name":"x","rows":1,"columns":1,"optimizer":{}}'])
def test_what_is_no_table_is_told(text: str) -> None:
    with pytest.raises(MismatchError, match="install the same jaxrdma everywhere"):
        TableSettings.from_fingerprint(text)


def test_it_is_described_for_people() -> None:
    assert "row r on server r % 3; 3,200 bytes" in GOOD.text(3)
    assert "on one server" in GOOD.text(1)
