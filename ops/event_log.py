"""The event log: a file of JSON lines that outlives rotation and a full disk, and never holds up the daemon.

Writing is a thread's work. A disk that is slow for a second would stop every stream if the event loop wrote by itself;
so it only appends to a queue, and what the queue cannot hold is counted and told, not waited for.
"""

from __future__ import annotations

import contextlib
import logging
import os
import stat
import threading
import time
from collections import deque
from collections.abc import Callable

import orjson

from ops.event_json import as_json
from ops.events import Record

_HELD_RECORDS = 4096
"""Memory of some 15 MB when all are throughput events, and 3 MB when all are of requests."""
_RETRY_SECONDS = 5.0
_RENAME_SECONDS = 2.0
"""How long a file that was renamed is still written: whoever rotates it makes a new one, or says SIGHUP, by then."""
_CLOSE_SECONDS = 5.0

logger = logging.getLogger("dalsegno.events")


class EventLogError(OSError):
    """The file cannot be opened at the start; the message names the flag."""


class EventLog:
    """A sink that appends to one file. Any thread may call it, and none waits for the disk but in `close`.

    During an outage (full disk, lost folder, no permission) what is told is held, and the file tried again every few
    seconds. Lost is only what comes when the queue is full, and what is still held at the end.
    """

    def __init__(
        self,
        path: str,
        *,
        held_records: int = _HELD_RECORDS,
        retry_seconds: float = _RETRY_SECONDS,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Raises EventLogError when the file cannot be opened now."""
        self._file = _File(path, clock)
        try:
            self._file.open()
        except OSError as error:
            raise EventLogError(f"--event-log {path}: cannot be opened for writing: {error.strerror}") from error
        self._path = path
        self._most = held_records
        self._retry_seconds = retry_seconds
        self._changed = threading.Condition()
        self._held: deque[Record] = deque()
        self._is_closing = self._must_reopen = self._is_out = False
        self._lost_total = self._lost_untold = 0
        self._thread = threading.Thread(target=self._run, name="dalsegno-event-log", daemon=True)
        self._thread.start()

    @property
    def lost_total(self) -> int:
        """Events that are in no file."""
        return self._lost_total

    def write(self, record: Record) -> None:
        """Hand over a record; it is in the file within moments, unless the file cannot be written."""
        with self._changed:
            if self._is_closing or len(self._held) >= self._most:
                self._lose(1)
                return
            self._held.append(record)
            self._changed.notify()

    def reopen(self) -> None:
        """Go on in the file that the path leads to now: for SIGHUP, when the old one has been renamed."""
        with self._changed:
            self._must_reopen = True
            self._changed.notify()

    def close(self, limit_seconds: float = _CLOSE_SECONDS) -> None:
        """Write what is held, with one last try when there is an outage. Waits until it is done, or the limit over."""
        with self._changed:
            self._is_closing = True
            self._changed.notify()
        self._thread.join(limit_seconds)
        if self._thread.is_alive():
            logger.error("%d events were not written in time to the event log %s", len(self._held), self._path)

    def _run(self) -> None:
        while self._wait():
            self._work()
        self._work()
        with self._changed:
            self._lose(len(self._held))
            self._held.clear()
        self._tell_lost()
        self._file.close()

    def _wait(self) -> bool:
        """Until there is something to do, or during an outage until it is time to try again. False at the end."""
        with self._changed:
            if self._is_out:
                self._changed.wait_for(lambda: self._must_reopen or self._is_closing, timeout=self._retry_seconds)
            else:
                self._changed.wait_for(lambda: self._held or self._must_reopen or self._is_closing)
            return not self._is_closing

    def _work(self) -> None:
        """Write all that is held, or find out that it cannot be."""
        try:
            if self._must_reopen or self._is_out:
                self._must_reopen = False
                self._file.open()
            while self._held:
                # Before each line: what is written to a file that is no longer there is lost.
                self._file.follow()
                self._append(self._held[0])
                self._held.popleft()
        except OSError as error:
            if not self._is_out:
                self._is_out = True
                logger.error(
                    "the event log %s cannot be written: %s; the daemon goes on, and it is tried again every %g s",
                    self._path,
                    error.strerror,
                    self._retry_seconds,
                )
            return
        if self._is_out:
            self._is_out = False
            logger.warning("the event log %s is written again", self._path)
        self._tell_lost()

    def _append(self, record: Record) -> None:
        try:
            line = orjson.dumps(as_json(record), option=orjson.OPT_APPEND_NEWLINE)
        except Exception as error:
            logger.error("a %s has no form as JSON", record.event.KIND, exc_info=error)
            with self._changed:
                self._lose(1)
            return
        self._file.append(line)

    def _lose(self, count: int) -> None:
        """To be called with the lock."""
        self._lost_total += count
        self._lost_untold += count

    def _tell_lost(self) -> None:
        with self._changed:
            lost, self._lost_untold = self._lost_untold, 0
        if lost:
            logger.error("%d events were lost: they are not in the event log %s", lost, self._path)


class _File:
    """The file at a path, whichever it is at the moment. Mutable: one thread at a time may touch it."""

    def __init__(self, path: str, clock: Callable[[], float]) -> None:
        self._path = path
        self._clock = clock
        self._descriptor: int | None = None
        self._is_regular = True
        self._renamed_at: float | None = None
        self._is_within_a_line = False
        """Whether the file ended with a part of a line when it was opened."""

    def open(self) -> None:
        """Open what the path leads to, and close what was open before. Raises OSError, and nothing is open then."""
        self.close()
        # A pipe that nobody reads is an error, rather than a wait.
        descriptor = os.open(self._path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC | os.O_NONBLOCK, 0o644)
        os.set_blocking(descriptor, True)
        self._descriptor, self._renamed_at = descriptor, None
        self._is_regular = stat.S_ISREG(os.fstat(descriptor).st_mode)
        self._is_within_a_line = self._is_regular and _ends_within_a_line(self._path)

    def close(self) -> None:
        if self._descriptor is not None:
            os.close(self._descriptor)
        self._descriptor = None

    def follow(self) -> None:
        """Open the path anew if the file that is open is no longer there. Raises OSError."""
        if self._descriptor is None or (self._is_regular and self._has_moved(os.fstat(self._descriptor))):
            self.open()

    def append(self, line: bytes) -> None:
        """Write a whole line, or none of it. Raises OSError."""
        if self._is_within_a_line:
            self._write(b"\n")
            self._is_within_a_line = False
        self._write(line)

    def _has_moved(self, opened: os.stat_result) -> bool:
        try:
            if os.path.samestat(os.stat(self._path), opened):
                self._renamed_at = None
                return False
        except OSError:
            if opened.st_nlink:
                # Renamed. To make a new one at once would stand in the way of whoever rotates and is about to make it.
                if self._renamed_at is None:
                    self._renamed_at = self._clock()
                return self._clock() - self._renamed_at >= _RENAME_SECONDS
        return True

    def _write(self, data: bytes) -> None:
        assert self._descriptor is not None
        written = 0
        try:
            while written < len(data):
                written += os.write(self._descriptor, data[written:])
        except OSError:
            if written:
                self._take_back(written)
            raise

    def _take_back(self, count: int) -> None:
        """Cut off what was written last, unless it is not the end of the file any more. Where that cannot be done, it
        is seen when the file is opened anew."""
        assert self._descriptor is not None
        with contextlib.suppress(OSError):
            end = os.lseek(self._descriptor, 0, os.SEEK_CUR)
            if os.fstat(self._descriptor).st_size == end:
                os.ftruncate(self._descriptor, end - count)


def _ends_within_a_line(path: str) -> bool:
    """Whether a full disk, or a daemon that was killed, has left a part of a line behind."""
    try:
        with open(path, "rb") as file:
            if file.seek(0, os.SEEK_END) == 0:
                return False
            file.seek(-1, os.SEEK_END)
            return file.read(1) != b"\n"
    except OSError:
        return False
