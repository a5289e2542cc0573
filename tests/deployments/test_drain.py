"""A node of Ray is emptied before it ends."""

import json

from tests.conftest import REPOSITORY, python
from tests.support.choices import by_night

_ENVIRONMENT = {
    "RAY_AUTH_MODE": "disabled",
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0",
    "PYTHONPATH": str(REPOSITORY),
}


@by_night
def test_a_drained_node_answers_what_is_under_way_and_its_work_goes_on_elsewhere():
    program = python("-m", "tests.support.deployments.drained_cluster", **_ENVIRONMENT)
    assert program.returncode == 0, program.stderr[-3000:]
    (line,) = (each for each in program.stdout.splitlines() if each.startswith('{"before"'))
    found = json.loads(line)
    assert found["after"] != found["before"]
    # Its replica went only after it had answered, and the hook only after the replica.
    assert found["answered"] == found["before"]
    assert not found["had_ended"]
    assert found["code"] == 0, found["told"]
    assert "processes are left" in found["told"]
