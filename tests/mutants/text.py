"""Bugs in how text from outside reaches messages and logs, and in how servers treat clients."""

from __future__ import annotations

from mutant import Mutant

OUTSIDE = "kvbm/text/outside.py"
LIMIT = "kvbm/text/log_limit.py"

MUTANTS = (
    Mutant(
        name="shown-value-is-formatted-whole",
        bug="A value of 30 MB is formatted before it is shortened.",
        file=OUTSIDE,
        old="        return json.dumps(value[: limit + 1])\n",
        new="        return json.dumps(value)\n",
        fails="tests/text/test_outside.py -k any_size",
    ),
    Mutant(
        name="shown-value-ends-a-line",
        bug="A value from outside can begin a line of its own in the log.",
        file=OUTSIDE,
        old="    return shortened(one_line(text), limit)\n",
        new="    return shortened(text, limit)\n",
        fails="tests/text/test_outside.py -k any_size",
    ),
    Mutant(
        name="password-of-a-url-is-shown",
        bug="A password with a slash stays in an error message.",
        file=OUTSIDE,
        old=r"(?!\d+/).*|",
        new=r"(?!\d+/)[^/]*|",
        fails="tests/text/test_outside.py -k secrets",
    ),
    Mutant(
        name="log-has-no-budget",
        bug="Messages of many kinds fill the log.",
        file=LIMIT,
        old="            has_room = size <= self._left\n",
        new="            has_room = True\n",
        fails="tests/text/test_log_limit.py -k budget",
    ),
    Mutant(
        name="client-that-left-is-not-noticed",
        bug="The request of a client that left is computed to the end.",
        file="kvbm/engines/embedded/http/connections.py",
        old="handler_cancellation=True",
        new="handler_cancellation=False",
        fails="tests/embedded/test_server_connections.py -k leaves",
    ),
    Mutant(
        name="proxy-passes-any-limit",
        bug="The proxy passes any object as a limit of tokens.",
        file="kvbm_cli/disaggregated/client_request.py",
        old="{name: _limit(name, given[name]) for",
        new="{name: given[name] for",
        fails="tests/cli/test_pd_proxy.py -k with_its_beginning",
    ),
    Mutant(
        name="brackets-are-no-values",
        bug="The proxy parses a body of nested lists, which stops all streams for seconds.",
        file="kvbm/text/reading.py",
        old='for mark in (b",", b"[", b"{"):',
        new='for mark in (b",",):',
        fails="tests/cli/test_pd_proxy.py -k too_long",
    ),
    Mutant(
        name="variables-in-the-command-line",
        bug="The engine's variables are part of the embedded engine's arguments.",
        file="kvbm/engines/embedded/launch.py",
        old="_without_environment(profile).model_dump_json()",
        new="profile.model_dump_json()",
        fails="tests/config/test_launch.py -k variables",
    ),
    Mutant(
        name="results-hold-secrets",
        bug="The summary of a benchmark holds the engine's secrets.",
        file="kvbm_cli/bench/command.py",
        old='without_secret_values(engine["environment"])',
        new='engine["environment"]',
        fails="tests/bench/test_bench_arms.py -k no_secret",
    ),
    Mutant(
        name="bench-believes-any-tokenizer",
        bug="A server whose tokenizer returns ten tokens for any text gets longer and longer texts.",
        file="kvbm_cli/bench/load/control.py",
        old="        if len(tokens) * CHARACTERS_PER_TOKEN < len(text):\n",
        new="        if len(tokens) > len(text):\n",
        fails="tests/bench/test_bench_control.py -k not_of_a_tokenizer",
    ),
)
