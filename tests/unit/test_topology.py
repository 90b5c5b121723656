"""A place in the world survives the environment, and can be neither half nor wrong."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from refusals import refusal
from syrupy.assertion import SnapshotAssertion

from nbddp import ArgumentError, Topology
from nbddp.topology import describe_overload

PLACE = Topology(
    rank=3, local_rank=1, node_rank=1, world_size=4, local_world_size=2, master_port=29500
)


@st.composite
def places(draw: st.DrawFn) -> Topology:
    """Any place that does not contradict itself."""
    world_size = draw(st.integers(1, 10_000))
    local_world_size = draw(st.integers(1, world_size))
    return Topology(
        rank=draw(st.integers(0, world_size - 1)),
        local_rank=draw(st.integers(0, local_world_size - 1)),
        world_size=world_size,
        local_world_size=local_world_size,
        node_rank=draw(st.integers(0, 1000)),
        master_addr=draw(st.sampled_from(["127.0.0.1", "::1", "node-0.cluster.local"])),
        master_port=draw(st.integers(0, 65535)),
    )


@given(places(), st.integers(1, 1000))
def test_a_topology_survives_a_round_trip_through_the_environment(
    place: Topology, attempt: int
) -> None:
    env = place.to_env(attempt=attempt)
    assert Topology.from_env(env) == place
    assert all(isinstance(value, str) for value in env.values())


def test_the_environment_equals_that_of_torchrun() -> None:
    assert PLACE.to_env(attempt=3, run_id="today") == {
        "RANK": "3",
        "LOCAL_RANK": "1",
        "GROUP_RANK": "1",
        "WORLD_SIZE": "4",
        "LOCAL_WORLD_SIZE": "2",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": "29500",
        "ROLE_NAME": "default",
        "ROLE_RANK": "3",
        "ROLE_WORLD_SIZE": "4",
        "GROUP_WORLD_SIZE": "2",
        "TORCHELASTIC_RESTART_COUNT": "2",
        "TORCHELASTIC_MAX_RESTARTS": "0",
        "TORCHELASTIC_RUN_ID": "today",
    }


@pytest.mark.parametrize("nproc", [1, 5])
def test_a_local_topology_puts_all_ranks_on_this_machine_in_order(nproc: int) -> None:
    sizes = {"world_size": nproc, "local_world_size": nproc, "master_port": 1234}
    expected = [Topology(rank=rank, local_rank=rank, **sizes) for rank in range(nproc)]
    assert Topology.local(nproc, master_port=1234) == expected
    assert (expected[0].node_rank, expected[0].master_addr) == (0, "127.0.0.1")


REFUSED = {
    "world_size": (0,),
    "local_world_size": (0, 5),
    "rank": (-1, 4),
    "local_rank": (-1, 2),
    "master_port": (-1, 65536),
}


def test_an_inconsistent_topology_is_refused_with_its_numbers(snapshot: SnapshotAssertion) -> None:
    numbers = {"rank": 1, "local_rank": 1, "world_size": 4, "local_world_size": 2}
    texts = {
        f"{name}={value}": refusal(ArgumentError, Topology, **numbers | {name: value})
        for name, values in REFUSED.items()
        for value in values
    }
    assert texts == snapshot


def test_a_missing_environment_variable_is_named_with_the_next_step(
    snapshot: SnapshotAssertion,
) -> None:
    env = PLACE.to_env()
    reasons = {}
    for name in [*env]:
        try:
            Topology.from_env({key: value for key, value in env.items() if key != name})
        except ValueError as error:
            reasons[name] = str(error)
    assert reasons == snapshot
    with pytest.raises(ValueError, match="'one'"):
        Topology.from_env(env | {"RANK": "one"})


def test_only_a_load_far_above_the_cores_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.cpu_count", lambda: 2)
    monkeypatch.setattr("os.getloadavg", lambda: (6.0, 90.0, 90.0))
    assert describe_overload() == ""
    monkeypatch.setattr("os.getloadavg", lambda: (6.1, 0.0, 0.0))
    assert describe_overload() == "this machine is busy: load 6 on 2 cores"
