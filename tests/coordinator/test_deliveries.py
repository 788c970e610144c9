"""What is told of a tree on its way: how far, how quick, how long still. Pure, on a clock of the test's own."""

from __future__ import annotations

from fleetd.coordinator.deliveries import RATE_SECONDS, Deliveries
from fleetd.coordinator.tree_delivery import BULK_BYTES_MIN, CONTROL, SSH, choose_road
from policies.facts import MIB


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def test_a_delivery_tells_its_pace_of_the_last_seconds_and_one_that_stands_still_shows_it() -> None:
    clock = Clock()
    deliveries = Deliveries(clock)
    with deliveries.under_way("spark-a", "datasets", "d" * 64, 1000) as delivery:
        (found,) = deliveries.shown()["spark-a"]
        assert (found["phase"], found["bytes_per_second"], found["seconds_left"]) == ("looking", None, None)
        delivery.goes_by(SSH, "it is large")
        delivery.begins(400)
        for _ in range(4):
            clock.now += 1.0
            delivery.sent(50)
        (found,) = deliveries.shown()["spark-a"]
        assert (found["bytes"], found["bytes_there_before"], found["road"], found["because"]) == (600, 400, SSH, "it is large")
        assert (found["bytes_per_second"], found["seconds_left"]) == (50.0, 8.0)

        clock.now += 4.0
        assert deliveries.shown()["spark-a"][0]["bytes_per_second"] == 25.0
        clock.now += RATE_SECONDS
        (found,) = deliveries.shown()["spark-a"]
        assert (found["bytes_per_second"], found["seconds_left"]) == (0.0, None), "no end is in sight"

    assert deliveries.shown() == {}


def test_a_second_try_counts_its_own_bytes() -> None:
    clock = Clock()
    deliveries = Deliveries(clock)
    with deliveries.under_way("spark-a", "datasets", "d" * 64, 1000) as delivery:
        delivery.begins(0)
        delivery.sent(300)
        delivery.begins(300)
        clock.now += 1.0
        delivery.sent(100)
        (found,) = deliveries.shown()["spark-a"]

    assert (found["bytes"], found["bytes_there_before"], found["bytes_per_second"]) == (400, 300, 100.0)


def test_the_road_follows_from_the_size_and_from_what_the_systems_ssh_can_do() -> None:
    assert choose_road(BULK_BYTES_MIN - 1, None).word == CONTROL
    assert choose_road(BULK_BYTES_MIN, None).word == SSH
    because = "there is no ssh on the coordinator's PATH"
    assert (choose_road(900 * MIB, because).word, choose_road(900 * MIB, because).because) == (CONTROL, because)
