"""Where a worker stands with one gateway."""

from octavo.worker.transport.registration import REGISTER_INTERVAL_S, LinkState, Registration


def presenting() -> Registration:
    registration = Registration()
    registration.on_connected()
    return registration


def welcomed() -> Registration:
    registration = presenting()
    assert not registration.on_welcome("g1")
    return registration


def test_it_presents_itself_at_once_and_again_until_it_is_welcome() -> None:
    registration = presenting()
    times = [0.0, 0.1, REGISTER_INTERVAL_S, REGISTER_INTERVAL_S + 0.1, 2 * REGISTER_INTERVAL_S]
    assert [registration.takes_register(now_s) for now_s in times] == [True, False, True, False, True]
    registration.on_welcome("g1")
    assert not registration.takes_register(9.0)


def test_it_says_nothing_while_there_is_no_connection() -> None:
    assert not Registration().takes_register(0.0)


def test_after_a_break_it_presents_itself_at_once() -> None:
    registration = presenting()
    registration.takes_register(0.0)
    registration.on_disconnected()
    registration.on_connected()
    assert registration.takes_register(0.01)


def test_a_break_loses_a_gateway_only_if_it_had_welcomed_us() -> None:
    assert [each.on_disconnected() for each in (Registration(), presenting(), welcomed())] == [False, False, True]


def test_a_repeated_welcome_changes_nothing_and_one_of_another_life_does() -> None:
    registration = welcomed()
    assert [registration.on_welcome(gateway) for gateway in ("g1", "g1", "g2", "g2")] == [False, False, True, False]
    assert (registration.state, registration.gateway_id) == (LinkState.WELCOMED, "g2")


def test_the_first_welcome_after_a_break_loses_nobody_a_second_time() -> None:
    registration = welcomed()
    assert registration.on_disconnected()
    registration.on_connected()
    assert not registration.on_welcome("g2")
