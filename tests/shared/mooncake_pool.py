"""A master and an owner of Mooncake Store on free ports of 127.0.0.1, which tests kill, stop and restart."""

import os
import signal
import socket
import subprocess
import time
from contextlib import contextmanager
from pathlib import Path

START_S = 30.0


def free_port():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def wait_until(condition, what, limit_s=START_S):
    deadline_s = time.monotonic() + limit_s
    while not condition():
        assert time.monotonic() < deadline_s, f"not in {limit_s} s: {what}"
        time.sleep(0.02)


class MooncakePool:
    """One master, one owner with 512 MB. Output goes to files in `directory`."""

    def __init__(self, directory):
        import mooncake

        self._programs = Path(mooncake.__file__).parent
        self._directory = directory
        self.port, self._metrics_port = free_port(), free_port()
        self.master = self.owner = None
        self.start_master()
        self.start_owner()

    @property
    def url(self):
        return f"mooncake://127.0.0.1:{self.port}/team-a"

    def start_master(self):
        options = {"rpc_address": "127.0.0.1", "rpc_port": self.port, "metrics_host": "127.0.0.1"}
        options |= {"metrics_port": self._metrics_port, "enable_metric_reporting": "false"}
        self.master = self._start("mooncake_master", options)
        wait_until(self._answers, "the master listens")

    def start_owner(self):
        options = {"host": "127.0.0.1", "port": free_port(), "metadata_server": "P2PHANDSHAKE", "protocol": "tcp"}
        options |= {"master_server_address": f"127.0.0.1:{self.port}", "global_segment_size": "512MB"}
        self.owner = self._start("mooncake_client", options)

    def kill(self, process):
        process.kill()
        process.wait()

    def stop(self, process):
        process.send_signal(signal.SIGSTOP)

    def resume(self, process):
        process.send_signal(signal.SIGCONT)

    def close(self):
        for process in (self.owner, self.master):
            self.resume(process)
            self.kill(process)

    def change_in_owner(self, content):
        """Flip a bit wherever these bytes are in the owner's memory: buffers of the network have them too."""
        changed = 0
        with open(f"/proc/{self.owner.pid}/mem", "r+b", buffering=0) as memory:
            for start, end in self._writable():
                memory.seek(start)
                found = memory.read(end - start)
                at = found.find(content)
                while at >= 0:
                    memory.seek(start + at)
                    memory.write(bytes([content[0] ^ 1]))
                    changed += 1
                    at = found.find(content, at + 1)
        assert changed, "the owner does not have these bytes"

    def _writable(self):
        """Yield parts of the owner's memory. They overlap, so that no content is cut."""
        part = 64 << 20
        for line in Path(f"/proc/{self.owner.pid}/smaps").read_text().split("\n"):
            words = line.split()
            if len(words) >= 5 and "-" in words[0] and words[1].startswith("rw"):
                start, end = (int(word, 16) for word in words[0].split("-"))
            elif words[:1] == ["Rss:"] and int(words[1]):
                yield from ((at, min(end, at + part + 65536)) for at in range(start, end, part))

    def _answers(self):
        with socket.socket() as probe:
            return probe.connect_ex(("127.0.0.1", self.port)) == 0

    def _start(self, program, options):
        arguments = [f"--{name}={value}" for name, value in options.items()]
        with open(self._directory / f"{program}.log", "ab") as log:
            return subprocess.Popen([self._programs / program, *arguments], stdout=log, stderr=log, env=os.environ)


@contextmanager
def mooncake_pool(directory):
    pool = MooncakePool(directory)
    try:
        yield pool
    finally:
        pool.close()
