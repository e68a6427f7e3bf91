"""What the pages say of restarts is what the supervisor does."""

import re
from pathlib import Path

import pytest

from octavo.cli.serve.supervisor import GiveUp, Restart, RestartHistory, RestartPolicy
from octavo.worker.main import EXIT_FAILED
from octavo.worker.runners.group import EXIT_LOST
from octavo.worker.shutdown import EXIT_REFUSED
from octavo.worker.transport.watchdog import EXIT_STALLED

PAGES = ("docs/operations.md", "docs/decisions/0003-supervisor-and-settings.md")


@pytest.mark.parametrize("page", PAGES)
def test_a_page_has_the_waits_that_are_in_force(repository: Path, page: str) -> None:
    text = " ".join((repository / page).read_text().split())
    sentence = re.search(
        r"after ([\d.]+) s, then, while it dies within ([\d.]+) s of its start, .*? up to ([\d.]+) s", text
    )
    assert sentence is not None
    policy = RestartPolicy()
    said = tuple(float(number) for number in sentence.groups())
    assert said == (policy.first_delay_s, policy.fast_death_s, policy.max_delay_s)
    assert "as often as it" in text[: sentence.start()]


def test_what_has_served_is_never_given_up_as_both_pages_say() -> None:
    life = RestartHistory(name="worker 0", policy=RestartPolicy())
    life.on_start(0.0)
    assert isinstance(RestartHistory(name="w", policy=RestartPolicy()).on_exit(1, 0.0), GiveUp)
    life.on_ready()
    for death in range(50):
        life.on_start(float(death))
        assert isinstance(life.on_exit(1, float(death)), Restart)


def test_operations_tell_the_exit_codes_that_only_workers_have(repository: Path) -> None:
    assert EXIT_STALLED == EXIT_LOST
    told = f"{EXIT_FAILED} its engine failed, {EXIT_STALLED} it hung or lost a rank, {EXIT_REFUSED} a gateway refused"
    assert told in " ".join((repository / "docs/operations.md").read_text().split())
