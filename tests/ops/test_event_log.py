"""The event log keeps every line in order through rotations and outages, and never holds up who writes to it."""

import contextlib
import errno
import json
import logging
import os
import shutil
import subprocess
import threading
import time

import pytest

from ops.event_log import EventLog, EventLogError
from ops.events import RequestStart
from tests.ops.event_samples import SAMPLES, record
from tests.waiting import PATIENCE_SECONDS

NOTHING_LOST = 0


@pytest.fixture
def path(tmp_path):
    folder = tmp_path / "log"
    folder.mkdir()
    return folder / "events.jsonl"


@pytest.fixture
def open_log():
    opened = []

    def start(path, **options):
        opened.append(EventLog(str(path), **options))
        return opened[-1]

    yield start
    for log in opened:
        log.close()


@pytest.fixture
def said():
    """What the event log has said in the daemon's log; `said.wait(text)` waits until it has."""

    class Said(logging.Handler):
        def __init__(self):
            super().__init__()
            self.lines = []
            self.changed = threading.Condition()

        def emit(self, line):
            with self.changed:
                self.lines.append(line.getMessage())
                self.changed.notify_all()

        def count(self, text):
            return sum(text in line for line in self.lines)

        def wait(self, text):
            with self.changed:
                assert self.changed.wait_for(lambda: self.count(text), timeout=PATIENCE_SECONDS), self.lines

    handler = Said()
    logger = logging.getLogger("dalsegno.events")
    logger.addHandler(handler)
    yield handler
    logger.removeHandler(handler)


def tell(log, numbers):
    for number in numbers:
        log.write(record(RequestStart(f"req-{number}", "chatcmpl-1", "/v1/chat/completions"), number))


def numbers_in(*paths):
    """What the files hold, line by line; every line has to be a whole one."""
    content = b"".join(path.read_bytes() for path in paths)
    assert content == b"" or content.endswith(b"\n")
    return [json.loads(line)["timestamp_unix_ms"] for line in content.splitlines()]


def until(condition):
    deadline = time.monotonic() + 20
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.002)


def until_written(path, count):
    until(lambda: path.exists() and path.read_bytes().count(b"\n") >= count)


# -- order and completeness


def test_every_kind_of_event_is_a_line_and_all_are_in_order(path, open_log):
    log = open_log(path)
    for number, event in enumerate(SAMPLES):
        log.write(record(event, number))
    log.close()
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    assert [line["event"] for line in lines] == [event.KIND for event in SAMPLES]
    assert numbers_in(path) == list(range(len(SAMPLES)))
    assert log.lost_total == NOTHING_LOST


def test_a_line_can_be_read_while_the_daemon_runs(path, open_log):
    log = open_log(path)
    tell(log, range(3))
    until_written(path, 3)
    assert numbers_in(path) == [0, 1, 2]


def test_a_second_daemon_goes_on_behind_the_first(path, open_log):
    for start in (0, 3):
        log = open_log(path)
        tell(log, range(start, start + 3))
        log.close()
    assert numbers_in(path) == list(range(6))


def test_what_is_told_after_the_end_is_counted_as_lost(path, open_log):
    log = open_log(path)
    log.close()
    tell(log, range(2))
    assert log.lost_total == 2
    assert numbers_in(path) == []


# -- rotation


def test_a_renamed_file_is_left_at_reopen_and_no_line_is_lost(path, open_log):
    log, old = open_log(path), path.with_suffix(".1")
    tell(log, range(50))
    path.rename(old)
    tell(log, range(50, 100))
    until_written(old, 100)
    log.reopen()
    until(path.exists)
    tell(log, range(100, 150))
    log.close()
    assert numbers_in(old) == list(range(100))
    assert numbers_in(path) == list(range(100, 150))


@pytest.fixture
def steady_writer():
    """Tells the numbers from 0 on in a thread of its own; `steady_writer(log)` returns what stops it: it returns how
    many it was."""
    stopped = threading.Event()

    def start(log):
        told = 0

        def run():
            nonlocal told
            while not stopped.wait(0.0001):
                tell(log, range(told, told + 5))
                told += 5

        thread = threading.Thread(target=run)
        thread.start()

        def stop():
            stopped.set()
            thread.join()
            return told

        return stop

    yield start
    stopped.set()


def test_rotations_in_the_midst_of_writing_lose_nothing(path, open_log, steady_writer):
    log = open_log(path, held_records=1_000_000)
    stop = steady_writer(log)
    olds = [path.with_suffix(f".{number}") for number in range(10)]
    for old in olds:
        until_written(path, 20)
        path.rename(old)
        log.reopen()
    until(path.exists)
    count = stop()
    log.close()
    assert log.lost_total == NOTHING_LOST
    assert numbers_in(*olds, path) == list(range(count))


def test_a_file_that_is_truncated_in_place_goes_on_from_its_start(path, open_log):
    log, copied = open_log(path), path.with_suffix(".1")
    tell(log, range(100))
    until_written(path, 100)
    shutil.copyfile(path, copied)
    os.truncate(path, 0)
    tell(log, range(100, 200))
    log.close()
    assert numbers_in(copied) == list(range(100))
    assert numbers_in(path) == list(range(100, 200))


def test_truncations_in_the_midst_of_writing_leave_whole_lines_in_order(path, open_log, steady_writer):
    log = open_log(path, held_records=1_000_000)
    stop = steady_writer(log)
    for _ in range(10):
        until_written(path, 20)
        os.truncate(path, 0)
    count = stop()
    tell(log, [count])
    log.close()
    assert log.lost_total == NOTHING_LOST
    found = numbers_in(path)
    assert found == list(range(count + 1 - len(found), count + 1))


def test_another_file_at_the_path_is_taken_without_a_signal(path, open_log):
    log, old = open_log(path), path.with_suffix(".1")
    tell(log, [0])
    until_written(path, 1)
    path.rename(old)
    path.touch()
    tell(log, [1])
    log.close()
    assert (numbers_in(old), numbers_in(path)) == ([0], [1])


def test_a_deleted_file_is_made_again(path, open_log):
    log = open_log(path)
    tell(log, [0])
    until_written(path, 1)
    path.unlink()
    tell(log, [1])
    log.close()
    assert numbers_in(path) == [1]


def test_a_renamed_file_is_left_without_a_signal_after_a_while(path, open_log):
    now = 0.0
    log, old = open_log(path, clock=lambda: now), path.with_suffix(".1")
    path.rename(old)
    tell(log, [0])
    until_written(old, 1)
    now = 1.9
    tell(log, [1])
    until_written(old, 2)
    now = 2.0
    tell(log, [2])
    log.close()
    assert (numbers_in(old), numbers_in(path)) == ([0, 1], [2])


# -- outages


@pytest.fixture
def small_disk(tmp_path):
    """A real file system of 64 KiB."""
    folder = tmp_path / "disk"
    folder.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=64k", "tmpfs", str(folder)]
    if subprocess.run(mount, capture_output=True, check=False).returncode:
        pytest.skip("only root can mount a file system of its own; /dev/full stands in for it below")
    yield folder
    subprocess.run(["umount", "--lazy", str(folder)], check=True)


def fill(folder):
    """Take what is left of a disk; the last page of another file may have room for a part of a line."""
    with (folder / "filler").open("wb", buffering=0) as file, contextlib.suppress(OSError):
        while True:
            file.write(bytes(4096))


def test_a_full_disk_costs_no_line_that_can_be_held(small_disk, open_log, said):
    path = small_disk / "events.jsonl"
    log = open_log(path, retry_seconds=0.005)
    tell(log, range(5))
    until_written(path, 5)
    fill(small_disk)
    tell(log, range(5, 200))
    said.wait("cannot be written: No space left on device")
    assert numbers_in(path) == list(range(len(numbers_in(path))))
    (small_disk / "filler").unlink()
    said.wait("is written again")
    log.close()
    assert numbers_in(path) == list(range(200))
    assert (said.count("cannot be written"), said.count("is written again"), said.count("lost")) == (1, 1, 0)


def test_what_a_full_disk_leaves_no_room_for_is_counted_and_told(small_disk, open_log, said):
    path = small_disk / "events.jsonl"
    log = open_log(path, retry_seconds=0.005, held_records=20)
    fill(small_disk)
    tell(log, range(20))
    said.wait("cannot be written")
    tell(log, range(20, 300))
    lost = log.lost_total
    assert lost >= 280 - 20
    (small_disk / "filler").unlink()
    said.wait("events were lost")
    tell(log, range(300, 310))
    log.close()
    found = numbers_in(path)
    assert found == sorted(found)
    assert found[-10:] == list(range(300, 310))
    assert len(found) == 310 - lost
    assert said.count(f"{lost} events were lost") == 1


def test_a_full_device_stops_nobody_and_is_told_once(open_log, said):
    log = open_log("/dev/full", retry_seconds=0.001)
    tell(log, range(10))
    said.wait("cannot be written: No space left on device")
    tell(log, range(10, 20))
    log.close()
    assert log.lost_total == 20
    assert (said.count("cannot be written"), said.count("20 events were lost")) == (1, 1)


@pytest.mark.parametrize("can_truncate", [True, False])
def test_a_line_that_was_written_in_part_does_not_spoil_the_next(path, open_log, said, monkeypatch, can_truncate):
    real_write = os.write
    allowed_bytes = iter([1000, 20, 0])  # the first line is whole, the second is cut, the rest of it finds no room

    def fail():
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    def write(descriptor, data):
        allowed = next(allowed_bytes, 1000)
        return real_write(descriptor, data[:allowed]) if allowed else fail()

    log = open_log(path, retry_seconds=0.005)
    monkeypatch.setattr(os, "write", write)
    if not can_truncate:
        monkeypatch.setattr(os, "ftruncate", lambda descriptor, size: fail())
    tell(log, range(4))
    said.wait("is written again")
    log.close()
    lines = path.read_bytes().splitlines()
    whole = [line for line in lines if line.endswith(b"}")]
    assert [json.loads(line)["timestamp_unix_ms"] for line in whole] == [0, 1, 2, 3]
    assert [len(line) for line in lines if line not in whole] == ([] if can_truncate else [20])


def test_a_cut_line_takes_nothing_of_another_daemon_with_it(path, open_log, said, monkeypatch):
    real_write, allowed_bytes = os.write, iter([20, 0])
    foreign = b'{"event":"of another daemon"}\n'

    def write(descriptor, data):
        allowed = next(allowed_bytes, 1000)
        if not allowed:
            with path.open("ab", buffering=0) as file:
                file.write(foreign)
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return real_write(descriptor, data[:allowed])

    log = open_log(path, retry_seconds=0.005)
    monkeypatch.setattr(os, "write", write)
    tell(log, [0])
    said.wait("is written again")
    log.close()
    cut, last = path.read_bytes().splitlines()
    assert cut.endswith(foreign.strip())
    assert json.loads(last)["timestamp_unix_ms"] == 0


def test_what_a_killed_daemon_left_of_a_line_stays_on_a_line_of_its_own(path, open_log):
    path.write_bytes(b'{"event":"request_st')
    log = open_log(path)
    tell(log, [7])
    log.close()
    first, second = path.read_bytes().splitlines()
    assert first == b'{"event":"request_st'
    assert json.loads(second)["timestamp_unix_ms"] == 7


NOBODY = 65534


def _lose_folder(path):
    shutil.rmtree(path.parent)


def _put_folder_there(path):
    path.unlink()
    path.mkdir()


def _forbid(path):
    """Nobody may write there; root may write anywhere, so that it has to be somebody else meanwhile."""
    path.unlink()
    path.parent.chmod(0o500)
    if os.geteuid() == 0:
        os.seteuid(NOBODY)


def _bring_folder_back(path):
    path.parent.mkdir()


def _take_folder_away(path):
    path.rmdir()


def _permit(path):
    if os.getuid() == 0:
        os.seteuid(0)
    path.parent.chmod(0o700)


@pytest.fixture
def own_user():
    """Whoever ran the tests runs the next one too."""
    user = os.geteuid()
    yield
    if os.geteuid() != user:
        os.seteuid(user)


@pytest.mark.parametrize(
    ("breaks", "mends", "cause"),
    [
        (_lose_folder, _bring_folder_back, "No such file or directory"),
        (_put_folder_there, _take_folder_away, "Is a directory"),
        (_forbid, _permit, "Permission denied"),
    ],
)
@pytest.mark.usefixtures("own_user")
def test_a_path_that_cannot_be_written_for_a_while_costs_nothing(path, open_log, said, breaks, mends, cause):
    log = open_log(path, retry_seconds=0.005)
    tell(log, [0])
    until_written(path, 1)
    breaks(path)
    tell(log, range(1, 50))
    said.wait(f"cannot be written: {cause}")
    mends(path)
    said.wait("is written again")
    log.close()
    assert numbers_in(path) == list(range(1, 50))
    assert log.lost_total == NOTHING_LOST


def test_the_end_comes_even_during_an_outage_and_tells_what_is_lost(path, open_log, said):
    log = open_log(path, retry_seconds=3600)
    _lose_folder(path)
    tell(log, range(7))
    said.wait("cannot be written")
    log.close()
    assert not log._thread.is_alive()
    assert log.lost_total == 7
    assert said.count("7 events were lost") == 1


def test_a_last_try_at_the_end_saves_what_is_held(path, open_log, said):
    log = open_log(path, retry_seconds=3600)
    _lose_folder(path)
    tell(log, range(7))
    said.wait("cannot be written")
    _bring_folder_back(path)
    log.close()
    assert numbers_in(path) == list(range(7))


def test_a_reader_that_is_stuck_holds_up_neither_who_tells_nor_the_end(path, open_log, said):
    os.mkfifo(path)
    reader = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
    writer = os.open(path, os.O_WRONLY | os.O_NONBLOCK)
    with contextlib.suppress(BlockingIOError):
        while True:
            os.write(writer, bytes(4096))
    try:
        log = open_log(path, held_records=10)
        tell(log, range(1000))
        assert log.lost_total == 990
        log.close(limit_seconds=0.01)
        assert said.count("10 events were not written in time") == 1
    finally:
        os.close(reader)
        os.close(writer)
    log._thread.join(20)
    assert not log._thread.is_alive()


def test_an_event_that_has_no_form_as_json_costs_itself_alone(path, open_log, said):
    log = open_log(path)
    log.write(record(RequestStart("\udc80", "a", "/"), 0))
    tell(log, [1])
    log.close()
    assert numbers_in(path) == [1]
    assert log.lost_total == 1
    assert said.count("has no form as JSON") == 1


# -- at the start


@pytest.mark.parametrize(
    ("name", "cause"),
    [("missing/events.jsonl", "No such file or directory"), (".", "Is a directory"), ("pipe", "No such device")],
)
def test_a_path_that_cannot_be_opened_is_an_error_that_names_the_flag(tmp_path, name, cause):
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(EventLogError) as caught:
        EventLog(str(tmp_path / name))
    assert str(caught.value).startswith(f"--event-log {tmp_path / name}: cannot be opened for writing: {cause}")
