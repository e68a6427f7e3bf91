from pathlib import Path

import grpc

from octavo.cli.settings.config_show import configuration_page
from octavo.cli.settings.groups import ALL_KEYS
from octavo.gateway.errors import ERROR_TABLE, Retry


def test_the_page_is_current(repository: Path) -> None:
    assert (repository / "docs/configuration.md").read_text() == configuration_page(), "run: octavo config docs"


def test_every_setting_for_people_is_on_the_page_once() -> None:
    hidden = {
        "runner", "oracle_vocab_size", "oracle_step_delay_s", "oracle_eos_every", "preempt_every_steps",
        "status_socket", "front_socket", "supervisor_socket", "front_target",
    }  # fmt: skip
    page = configuration_page()
    assert [name for name in sorted(ALL_KEYS - hidden) if page.count(f"| `{name}` |") != 1] == []
    assert [name for name in hidden if f"`{name}`" in page] == []


def test_the_table_of_statuses_is_the_gateways_own(repository: Path) -> None:
    expected = {
        (row.code.name, row.reason, "yes" if row.retry is Retry.LATER else "no") for row in ERROR_TABLE.values()
    }
    lines = (repository / "docs/operations.md").read_text().splitlines()
    cells = [[cell.strip(" `") for cell in line.strip("|").split("|")] for line in lines if line.startswith("| `")]
    found = {(row[0], row[1], row[2]) for row in cells if row[0] in grpc.StatusCode.__members__}
    assert found == expected
