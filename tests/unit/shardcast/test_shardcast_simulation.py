"""A simulated broadcast is never faster than its links, and close to them at any size."""

import pytest
from scripts import load_script

simulation = load_script("benchmarks/shardcast/shardcast_simulation.py")


def over_bound(*, seed: int = 0, **shape: object) -> float:
    chosen = simulation.Shape(**{"chunks": 32, "latency_s": 0.01, **shape})
    done = simulation.Simulation(chosen, seed=seed).run()
    assert len(done) == chosen.clients
    return float(max(done.values()) / simulation.bound_s(chosen))


@pytest.mark.parametrize("layers", [(1,), (4,), (2, 8), (2, 4, 8)])
@pytest.mark.parametrize("clients", [1, 40])
def test_broadcast_is_close_to_the_bound_of_its_links(
    layers: tuple[int, ...], clients: int
) -> None:
    assert 0.99 <= over_bound(clients=clients, layers=layers) <= 1.6


def test_another_layer_costs_chunks_not_versions() -> None:
    shallow = over_bound(clients=8, layers=(2,))
    deep = over_bound(clients=8, layers=(2, 2, 2))
    assert deep - shallow < 3 * 8 / 32


def test_same_seed_gives_the_same_broadcast() -> None:
    assert over_bound(clients=20, layers=(3,), seed=5) == over_bound(
        clients=20, layers=(3,), seed=5
    )
