"""S28 and S60 over a whole day's worth of requests; minutes long, so `make slow` runs it."""

import pytest

from bench.soak import main


@pytest.mark.slow
def test_s28_memory_settles_and_s60_the_books_agree_over_20_000_requests(tmp_path, capsys):
    assert main(["--requests", "20000", "--out", str(tmp_path)]) == 0, capsys.readouterr().out
