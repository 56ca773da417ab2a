"""`kvbm cache ls RUN` and `kvbm cache clear RUN` with a running embedded engine."""

import json
import urllib.request

import pytest
from terminal import kvbm, kvbm_here
from test_serve_embedded import home, serving  # noqa: F401
from waiting import eventually

from kvbm.hashing import tenant
from kvbm_cli.runs.run_directory import CONTROL_SOCKETS

pytest.importorskip("torch")


def complete(url: str, prompt: list[int], salt: str) -> None:
    body = {"model": "synthetic:tiny", "prompt": prompt, "max_tokens": 2, "cache_salt": salt}
    headers = {"Content-Type": "application/json"}
    request = urllib.request.Request(f"{url}/v1/completions", json.dumps(body).encode(), headers)
    urllib.request.urlopen(request, timeout=60).read()


def cache(home, text: str):  # noqa: F811
    return kvbm_here("cache", *text.split(), home=home)


def listed(home) -> dict[str, int]:  # noqa: F811
    outcome = cache(home, "ls tiny-1 --json")
    assert outcome.exit_code == 0, outcome.stderr
    ((tier,),) = [one["tiers"] for one in json.loads(outcome.stdout)]
    return {one["tenant"]: sum(one["blocks_by_age"]) for one in tier["tenants"]}


def test_blocks_of_a_running_engine_are_listed_and_those_of_a_tenant_cleared(home):  # noqa: F811
    with serving(home) as (program, url):
        complete(url, list(range(5, 75)), "alice")
        complete(url, list(range(105, 145)), "bob")
        alice, bob = tenant("alice").hex(), tenant("bob").hex()
        eventually(lambda: {alice, bob} <= set(listed(home)))
        before = listed(home)
        table = kvbm("cache", "ls", "tiny-1", home=home).stdout
        assert table.splitlines()[0].split()[:5] == ["engine", "tier", "tenant", "blocks", "bytes"]
        assert alice[:12] in table
        assert cache(home, "clear tiny-1 --salt alice --yes").stdout == f"removed {before[alice]} blocks from G2\n"
        assert listed(home) == {name: blocks for name, blocks in before.items() if name != alice}
        wrong = cache(home, "clear tiny-1 --tier G3 --yes")
        assert (wrong.exit_code, wrong.stderr) == (1, "engine 0 refused: this engine has no tier G3\n")
        digest = cache(home, f"clear tiny-1 --tier G2 --tenant-digest {bob} --yes")
        assert digest.stdout == f"removed {before[bob]} blocks from G2\n"
        assert {alice, bob}.isdisjoint(listed(home))
        assert 'sent {"verb": "clear", "tier": "G3"}: refused' in kvbm_here("logs", "tiny-1", home=home).stdout
        program.terminate()
        program.wait(60)
    assert cache(home, "ls tiny-1").stderr.startswith("error: `tiny-1` is not running")
    assert not list((home / ".local/state/kvbm/runs/tiny-1").glob(CONTROL_SOCKETS))


def test_an_operator_pins_brings_and_releases_a_prompt(home, tmp_path):  # noqa: F811
    text = "You are a helpful assistant. " * 8
    (tmp_path / "prompt.txt").write_text(text)
    with serving(home) as (program, url):
        complete(url, list(range(5, 75)), "alice")
        eventually(lambda: sum(listed(home).values()) >= 4)
        ids = ",".join(map(str, range(5, 75)))
        pinned = cache(home, f"pin tiny-1 --tokens {ids} --salt alice --for 5m")
        assert pinned.exit_code == 0, pinned.stderr
        name = pinned.stdout.removeprefix("pinned 4 of 4 blocks for 5m: ").strip()
        assert json.loads(cache(home, "ls tiny-1 --json").stdout)[0]["pins"][0]["pin"] == name
        assert "1 pin holds 4 blocks" in cache(home, "ls tiny-1").stdout
        assert cache(home, f"prefetch tiny-1 --tokens {ids} --salt alice").stdout == "4 of 4 blocks in G2\n"
        absent = cache(home, f"pin tiny-1 --file {tmp_path}/prompt.txt")
        assert absent.stdout.startswith("pinned 0 of ")
        assert cache(home, f"release tiny-1 {name}").stdout == "released 4 blocks\n"
        limited = cache(home, "limit tiny-1 10%")
        assert limited.stdout.startswith("hints of each tenant may retain ")
        program.terminate()
        program.wait(60)
