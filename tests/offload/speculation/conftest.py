"""An engine whose draws can be compared with its target's own distribution."""

import pytest
from joint_distribution import load_three_tiers


@pytest.fixture(scope="module")
def engine_and_target(tmp_path_factory):
    return load_three_tiers(tmp_path_factory.mktemp("pair"))
