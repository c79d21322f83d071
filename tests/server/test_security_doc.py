"""What docs/security.md promises is held by the tests that it names."""

import re
from pathlib import Path

ROOT = Path(__file__).parents[2]


def test_every_test_that_the_page_names_exists():
    named = set(re.findall(r"`(test_\w+)`", (ROOT / "docs/security.md").read_text(encoding="utf-8")))
    sources = [path.read_text(encoding="utf-8") for path in (ROOT / "tests").rglob("test_*.py")]
    there = {name for source in sources for name in re.findall(r"def (test_\w+)", source)}
    assert len(named) > 10
    assert named - there == set()
