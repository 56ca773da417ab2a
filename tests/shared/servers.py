"""Real servers of object stores on free ports of 127.0.0.1, for tests. All of their data is in a temporary directory.

    moto       PyPI (extra `dev`)
    ceph       Debian: ceph-mon ceph-osd radosgw ceph-common
    s3rver     npm, ignores conditional writes
    azurite    npm

The packages of npm are installed on first use, into a cache directory outside the repository. A server that is not
installed raises NotInstalled.
"""

import base64
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
import uuid
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path

ACCESS_KEY, SECRET_KEY = "kvbmaccesskey", "kvbm-secret-key-of-the-tests"
BUCKET = "kv-cache"
AZURE_ACCOUNT, AZURE_KEY = "devstoreaccount1", base64.b64encode(b"kvbm-secret-key-of-the-tests").decode()
START_LIMIT_S = 120.0
END_LIMIT_S = 1.0  # s3rver and Azurite wait for open connections
PACKAGES = {"s3rver": "s3rver@3.7.1", "azurite": "azurite@3.35.0"}
NAMES = ("moto", "ceph", "s3rver", "azurite")
CEPH_CONFIG = """[global]
fsid = {fsid}
mon_host = v2:127.0.0.1:{mon_port}
mon_initial_members = a
keyring = {home}/keyring
osd_pool_default_size = 1
osd_pool_default_min_size = 1
osd_pool_default_pg_num = 8
osd_crush_chooseleaf_type = 0
osd_crush_update_on_start = false
mon_max_pg_per_osd = 1000
osd_objectstore = memstore
memstore_device_bytes = 2147483648
osd_data = {home}/osd
mon_data = {home}/mon
run_dir = {home}/run
admin_socket = {home}/run/$name.asok
log_file = {home}/$name.log
public_addr = 127.0.0.1
rgw_frontends = beast endpoint=127.0.0.1:{port} tcp_nodelay=1
"""


class NotInstalled(Exception):
    """What is missing on this machine."""


@dataclass(slots=True)
class Server:
    """A running server. `environment` holds the credentials that obstore reads, and its endpoint."""

    name: str
    port: int
    url: str
    environment: dict[str, str]
    processes: list[subprocess.Popen[bytes]] = field(default_factory=list)

    def through(self, port):
        """The environment of a client that connects to a proxy on another port."""
        old, new = f"127.0.0.1:{self.port}", f"127.0.0.1:{port}"
        return {name: value.replace(old, new) for name, value in self.environment.items()}

    def signal(self, number):
        """Send a signal to the process that answers requests."""
        self.processes[-1].send_signal(number)
        if number == signal.SIGKILL:
            self.processes[-1].wait()

    def end(self):
        for process in reversed(self.processes):
            with suppress(ProcessLookupError):
                process.send_signal(signal.SIGCONT)
                process.terminate()
        for process in reversed(self.processes):
            try:
                process.wait(END_LIMIT_S)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


@contextmanager
def running(name, home: Path):
    """A server with an empty bucket. Raises NotInstalled."""
    home.mkdir(parents=True, exist_ok=True)
    server = STARTS[name](home)
    try:
        await_port(server)
        create_bucket(server)
        yield server
    finally:
        server.end()


def free_port():
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return sock.getsockname()[1]


def await_port(server):
    """Wait until the server accepts connections."""
    deadline_s = time.monotonic() + START_LIMIT_S
    while True:
        with suppress(OSError), socket.create_connection(("127.0.0.1", server.port), 1.0):
            return
        assert server.processes[-1].poll() is None, f"{server.name} has exited with {server.processes[-1].returncode}"
        assert time.monotonic() < deadline_s, f"{server.name} has not started in {START_LIMIT_S} s"
        time.sleep(0.05)


def create_bucket(server):
    """Create the bucket with signed requests of the server's own kind."""
    import boto3
    from botocore.config import Config

    if server.name == "azurite":
        create_container(server)
        return
    client = boto3.client(
        "s3",
        endpoint_url=server.environment["AWS_ENDPOINT_URL"],
        region_name=server.environment["AWS_REGION"],
        aws_access_key_id=server.environment["AWS_ACCESS_KEY_ID"],
        aws_secret_access_key=server.environment["AWS_SECRET_ACCESS_KEY"],
        config=Config(retries={"max_attempts": 8}, s3={"addressing_style": "path"}),
    )
    client.create_bucket(Bucket=BUCKET)
    client.close()


def create_container(server):
    """Create the container, with a request that the shared key signs."""
    import hmac
    import http.client
    from email.utils import formatdate

    date = formatdate(usegmt=True)
    path = f"/{AZURE_ACCOUNT}/{BUCKET}"
    headers = f"x-ms-date:{date}\nx-ms-version:2021-08-06\n"
    signed = "PUT\n" + "\n" * 11 + headers + f"/{AZURE_ACCOUNT}{path}\nrestype:container"
    tag = base64.b64encode(hmac.digest(base64.b64decode(AZURE_KEY), signed.encode(), "sha256")).decode()
    connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=10)
    connection.request(
        "PUT",
        f"{path}?restype=container",
        headers={
            "x-ms-date": date,
            "x-ms-version": "2021-08-06",
            "Content-Length": "0",
            "Authorization": f"SharedKey {AZURE_ACCOUNT}:{tag}",
        },
    )
    answer = connection.getresponse()
    assert answer.status == 201, (answer.status, answer.read())
    connection.close()


def s3_environment(port, access_key=ACCESS_KEY, secret_key=SECRET_KEY):
    return {
        "AWS_ENDPOINT_URL": f"http://127.0.0.1:{port}",
        "AWS_REGION": "us-east-1",
        "AWS_ACCESS_KEY_ID": access_key,
        "AWS_SECRET_ACCESS_KEY": secret_key,
    }


def start(command, home, environment=None):
    """Start a process, whose output goes to a file."""
    with (home / f"{Path(command[0]).name}.out").open("ab") as output:
        return subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            cwd=home,
            env={**os.environ, **(environment or {})},
        )


def start_moto(home):
    port = free_port()
    command = [sys.executable, "-W", "ignore", "-m", "moto.server", "-H", "127.0.0.1", "-p", str(port)]
    processes = [start(command, home)]
    return Server("moto", port, f"s3://{BUCKET}/team", s3_environment(port), processes)


def start_s3rver(home):
    port = free_port()
    access_key, secret_key = "S3RVER", "S3RVER"  # the only user that it has
    command = [npm_program("s3rver"), "-d", str(home / "data"), "-a", "127.0.0.1", "-p", str(port)]
    (home / "data").mkdir()
    return Server(
        "s3rver", port, f"s3://{BUCKET}/team", s3_environment(port, access_key, secret_key), [start(command, home)]
    )


def start_azurite(home):
    port = free_port()
    command = [npm_program("azurite-blob"), "--location", str(home), "--blobHost", "127.0.0.1"]
    command += ["--blobPort", str(port), "--silent", "--skipApiVersionCheck", "--disableTelemetry"]
    environment = {
        "AZURE_STORAGE_ACCOUNT_NAME": AZURE_ACCOUNT,
        "AZURE_STORAGE_ACCOUNT_KEY": AZURE_KEY,
        "AZURE_STORAGE_ENDPOINT": f"http://127.0.0.1:{port}/{AZURE_ACCOUNT}",
    }
    processes = [start(command, home, {"AZURITE_ACCOUNTS": f"{AZURE_ACCOUNT}:{AZURE_KEY}"})]
    return Server("azurite", port, f"az://{BUCKET}/team", environment, processes)


def npm_program(name):
    """Return the path of a program from npm, which is installed if it is missing."""
    cache = Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")) / "kvbm-tests"
    program = cache / "node_modules/.bin" / name
    if program.exists():
        return str(program)
    npm = shutil.which("npm")
    if npm is None:
        raise NotInstalled("`npm` (apt install nodejs npm)")
    cache.mkdir(parents=True, exist_ok=True)
    package = PACKAGES[name.partition("-")[0]]
    subprocess.run([npm, "install", "--prefix", str(cache), "--no-audit", "--no-fund", package], check=True)
    return str(program)


def start_ceph(home):
    """One monitor, one OSD with its data in memory, and the gateway. Authentication is on: without, it never starts."""
    for program in ("ceph-mon", "ceph-osd", "radosgw", "ceph"):
        if shutil.which(program) is None:
            raise NotInstalled(f"`{program}` (apt install ceph-mon ceph-osd radosgw ceph-common)")
    server = Server("ceph", free_port(), f"s3://{BUCKET}/team", {})
    server.environment = s3_environment(server.port)
    fsid, mon_port = str(uuid.uuid4()), free_port()
    config, keyring = home / "ceph.conf", home / "keyring"
    config.write_text(CEPH_CONFIG.format(fsid=fsid, mon_port=mon_port, home=home, port=server.port))
    for directory in ("osd", "mon", "run"):
        (home / directory).mkdir()

    def run(*command):
        done = subprocess.run(command, capture_output=True, text=True, timeout=START_LIMIT_S, cwd=home)
        assert done.returncode == 0, (command, done.stderr)

    def configured(program, *arguments):
        return (program, "-c", str(config), *arguments)

    run("ceph-authtool", "--create-keyring", str(keyring), "--gen-key", "-n", "mon.", "--cap", "mon", "allow *")
    allowed = [argument for kind in ("mon", "osd", "mgr") for argument in ("--cap", kind, "allow *")]
    for name in ("client.admin", "client.rgw", "osd.0"):
        run("ceph-authtool", str(keyring), "--gen-key", "-n", name, *allowed)
    address = f"[v2:127.0.0.1:{mon_port}]"
    run("monmaptool", "--create", "--addv", "a", address, "--fsid", fsid, str(home / "monmap"))
    run(*configured("ceph-mon", "--mkfs", "-i", "a", "--monmap", str(home / "monmap"), "--keyring", str(keyring)))
    try:
        server.processes.append(start(configured("ceph-mon", "-f", "-i", "a"), home))
        osd = str(uuid.uuid4())
        run(*configured("ceph", "--connect-timeout", "60", "osd", "new", osd))
        run(*configured("ceph-osd", "-i", "0", "--mkfs", "--osd-uuid", osd))
        server.processes.append(start(configured("ceph-osd", "-f", "-i", "0"), home))
        run(*configured("ceph", "osd", "crush", "add", "osd.0", "1", "root=default", "host=h"))
        server.processes.append(start(configured("radosgw", "-f", "-n", "client.rgw"), home))
        user = ("--uid=t", "--display-name=t", f"--access-key={ACCESS_KEY}", f"--secret-key={SECRET_KEY}")
        run(*configured("radosgw-admin", "user", "create", *user))
    except BaseException:
        server.end()
        raise
    return server


STARTS = {"moto": start_moto, "ceph": start_ceph, "s3rver": start_s3rver, "azurite": start_azurite}
