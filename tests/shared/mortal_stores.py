"""Real stores whose processes tests kill, stop, resume and restart."""

import signal
from pathlib import Path

import servers


class Ceph:
    """The gateway can be killed, stopped and restarted; its data is in another process."""

    def __init__(self, server):
        self._server, self.url, self.environment = server, server.url, server.environment

    def kill_gateway(self):
        self._server.signal(signal.SIGKILL)

    def restart_gateway(self):
        dead = self._server.processes.pop()
        self._server.processes.append(servers.start(dead.args, Path(dead.args[2]).parent))
        servers.await_port(self._server)

    def stop_gateway(self):
        self._server.signal(signal.SIGSTOP)

    def resume_gateway(self):
        self._server.signal(signal.SIGCONT)


class Mooncake:
    """Whoever kills the master or the owner loses what the pool holds."""

    def __init__(self, pool):
        self._pool, self.url = pool, pool.url

    def kill_master(self):
        self._pool.kill(self._pool.master)

    def restart_master(self):
        self._pool.start_master()

    def kill_owner(self):
        self._pool.kill(self._pool.owner)

    def restart_owner(self):
        self._pool.start_owner()

    def stop_owner(self):
        self._pool.stop(self._pool.owner)

    def resume_owner(self):
        self._pool.resume(self._pool.owner)
