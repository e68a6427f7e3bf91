"""CONTRIBUTING.md gives no figure of a run as if it were today's: each has the day on which it was seen."""

import re
from pathlib import Path


def test_shares_of_the_code_have_the_day_on_which_they_were_measured(repository: Path) -> None:
    section = (repository / "CONTRIBUTING.md").read_text().partition("## Coverage\n")[2].partition("\n## ")[0]
    sentences = re.split(r"(?<=\.)\s", section.replace("\n", " "))
    measured = [sentence for sentence in sentences if re.search(r"\d %", sentence)]
    assert measured
    assert [sentence for sentence in measured if not re.search(r"On 20\d\d-\d\d-\d\d", sentence)] == []
