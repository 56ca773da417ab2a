"""Commands in messages can be pasted: every value inserted into one is quoted for the shell."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from terminal import kvbm_here

ROOT = Path(__file__).parents[2]
COMMAND = re.compile(
    r"(sudo )?(kvbm|less|chmod|chown|mkdir|namei|ls|rm|cat|tail|df|mv|cp|hf)( |$)|--(dir|resume|output|log|url)[ =]"
)
# Numbers, names of options, and text that is a command already.
NOT_FOR_THE_SHELL = {"os.geteuid()", "context.command_path", "ctx.command_path", "arguments[0]", "pattern"}


def commands_with_values(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """Yields the line and the expression of each value in a command between backticks."""
    for node in ast.walk(tree):
        if not isinstance(node, ast.JoinedStr):
            continue
        inside: str | None = None  # the command up to here, None outside of backticks
        for part in node.values:
            if isinstance(part, ast.FormattedValue):
                if inside is not None and COMMAND.match(inside):
                    yield node.lineno, ast.unparse(part.value)
                continue
            for position, text in enumerate(str(part.value).split("`")):  # type: ignore[attr-defined]
                if position:
                    inside = None if inside is not None else ""
                if inside is not None:
                    inside += text


def is_option_of_a_message(line: str) -> bool:
    """An error that repeats an option as it was given, which is no command."""
    return 'raise UsageError(f"`--' in line or line.lstrip().startswith('f"`--')


def test_every_value_in_a_command_of_a_message_is_quoted():
    bare = []
    for package in ("kvbm", "kvbm_cli"):
        for file in sorted((ROOT / package).rglob("*.py")):
            source = file.read_text()
            for line, expression in commands_with_values(ast.parse(source)):
                is_quoted = expression.startswith("shlex.quote(") or expression in NOT_FOR_THE_SHELL
                if not is_quoted and not is_option_of_a_message(source.splitlines()[line - 1]):
                    bare.append(f"{file.relative_to(ROOT)}:{line}: {expression}")
    assert bare == []


def test_the_check_finds_a_value_that_is_not_quoted():
    found = list(commands_with_values(ast.parse('f"run `ls -ld {path}`, not {other} or `{word}`"')))
    assert found == [(1, "path")]


@pytest.mark.parametrize(
    ("command", "hint"),
    [
        (("profile", "new", "my profile"), "run `kvbm profile new 'my profile.yaml'`"),
        (("serve", "my profile.yaml"), "did you mean `kvbm serve --profile 'my profile.yaml'`?"),
        (("bench", "--profile", "demo", "--output", "my run"), "`--resume 'my run'` continues it"),
    ],
)
def test_a_path_with_a_space_is_quoted_in_a_hint(command, hint, tmp_path):
    (tmp_path / "my run").mkdir()
    (tmp_path / "my run" / "plan.json").write_text("{}")
    assert hint in kvbm_here(*command, home=tmp_path).stderr
