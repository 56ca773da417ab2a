"""A disk that obeys a file: found by every interpreter that has this directory in PYTHONPATH, and at work in the
process that does an engine's disk I/O.

The file, named by KVBM_TEST_DISK_FAULTS, holds a JSON object; what is absent from it does not happen:

    {"error": "EIO"}             reads and writes fail so; {"error": "short"}: after their first part
    {"error": "lost"}            they fail, and may still be running
    {"lie": true}                reads bring another byte than they should and report success
    {"hold": true}               I/O, making it durable, and forgetting all wait until the file says otherwise
    {"bytes_per_s": 1e6}         the disk moves no more than that, whatever is done at the same time
    {"delay_s": 0.5}             each read and write takes that much longer
    {"commit": "text"}           changes of the index fail with this text
    {"chance": 0.3}              errors, lies and failing commits happen only to this part of the calls
    {"for": "read"}              and all this is so for reads alone; "write" likewise
    {"limits": {"stall_s": 1}}   when the tier gives the disk up; is read once, at its start
"""

import sys

if "kvbm.tiers.disk.service.server" in sys.orig_argv:
    import errno
    import json
    import os
    import random
    import sqlite3
    import threading
    import time
    from pathlib import Path

    from kvbm.tiers.disk import storage
    from kvbm.tiers.disk.files import Arena
    from kvbm.tiers.disk.health import HealthLimits
    from kvbm.tiers.disk.index import BlockIndex
    from kvbm.tiers.disk.io.threads import EndOfArena, IoNotEnded, ThreadsIO

    FILE = Path(os.environ["KVBM_TEST_DISK_FAULTS"])
    POLL_S = 0.01

    def orders(kind):
        found = json.loads(FILE.read_text())
        return found if found.get("for", kind) == kind else {}

    def strikes(found):
        return random.random() < found.get("chance", 1)

    class ObedientIO(ThreadsIO):
        def __init__(self, *arguments, **keys):
            super().__init__(*arguments, **keys)
            self._lock = threading.Lock()
            self._busy_until_s = 0.0

        def read(self, runs):
            self._obey("read", super().read, runs)
            if (found := orders("read")).get("lie") and strikes(found):
                runs[-1].buffers[-1][100] ^= 1

        def write(self, runs):
            self._obey("write", super().write, runs)

        def _obey(self, kind, call, runs):
            wait_while_held(kind)
            found = orders(kind)
            time.sleep(found.get("delay_s", 0))
            if speed := found.get("bytes_per_s"):
                self._take_time(sum(len(buffer) for run in runs for buffer in run.buffers) / speed)
            if not strikes(found):
                found.pop("error", None)
            if found.get("error") == "short":
                call(runs[:1])
                raise EndOfArena(runs[-1].offset)
            if found.get("error") == "lost":
                raise IoNotEnded("a fault")
            if name := found.get("error"):
                number = getattr(errno, name)
                raise OSError(number, os.strerror(number))
            call(runs)

        def _take_time(self, seconds):
            with self._lock:
                self._busy_until_s = max(self._busy_until_s, time.monotonic()) + seconds
                until_s = self._busy_until_s
            time.sleep(max(0.0, until_s - time.monotonic()))

    def wait_while_held(kind):
        while orders(kind).get("hold"):
            time.sleep(POLL_S)

    sync = Arena.sync

    def obedient_sync(arena):
        wait_while_held("write")
        sync(arena)

    clear = BlockIndex.clear

    def obedient_clear(index, *arguments, **keys):
        wait_while_held("write")
        return clear(index, *arguments, **keys)

    change = BlockIndex.change

    def obedient_change(index, *arguments, **keys):
        found = orders("write")
        if "commit" in found and strikes(found):
            raise sqlite3.OperationalError(found["commit"])
        return change(index, *arguments, **keys)

    Arena.sync, BlockIndex.clear, BlockIndex.change = obedient_sync, obedient_clear, obedient_change
    storage.ThreadsIO = ObedientIO
    limits = json.loads(FILE.read_text()).get("limits")
    if limits:
        storage.HealthLimits = lambda: HealthLimits(**limits)
