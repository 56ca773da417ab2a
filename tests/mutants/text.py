"""Bugs in how text from outside reaches messages and logs."""

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
        old=r"(?!\d+/)[^\s@]*",
        new=r"(?!\d+/)[^\s@/]*",
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
)
