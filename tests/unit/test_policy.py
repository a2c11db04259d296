"""SyncReplicas: all of all, and a refusal of anything else."""

import pytest

from jaxrdma.errors import ConfigError
from jaxrdma.policy import SyncReplicas


@pytest.mark.parametrize(
    "policy", [SyncReplicas(), SyncReplicas(3), SyncReplicas(None, 3), SyncReplicas(3, 3)]
)
def test_all_of_all_is_resolved(policy):
    assert policy.resolve(3) == SyncReplicas(3, 3)
    assert policy.resolve(3).describe() == "sync_replicas(3 of 3)"


@pytest.mark.parametrize("field", ["replicas_to_aggregate", "total_replicas"])
@pytest.mark.parametrize("value", [0, 2, 4, -1])
def test_backup_replicas_are_refused_by_name(field, value):
    with pytest.raises(ConfigError, match=f"{field}={value}.*3 workers"):
        SyncReplicas(**{field: value}).resolve(3)


def test_descriptions_differ_where_policies_do():
    assert len({SyncReplicas(*v).describe() for v in [(), (1,), (None, 1), (1, 1)]}) == 4
