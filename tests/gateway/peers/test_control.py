"""The rate that GetLoads tells."""

from octavo.gateway.peers.control import Throughput


def test_it_is_the_rate_of_the_last_whole_window() -> None:
    throughput = Throughput(now_s=100.0)
    assert throughput.read(50, now_s=100.5) == 0.0
    assert throughput.read(300, now_s=102.0) == 150.0
    assert throughput.read(900, now_s=102.5) == 150.0
    assert throughput.read(900, now_s=112.0) == 60.0
    assert throughput.read(900, now_s=122.0) == 0.0
