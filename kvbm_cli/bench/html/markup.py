"""HTML elements that escape what they contain: only `Markup` enters the page unescaped."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from html import escape

from kvbm.text.outside import one_line

EMPTY_ELEMENTS = ("meta", "col", "line", "rect", "circle", "path")


class Markup(str):
    """Text that is HTML already. Made by the functions of this module and from the files of this package."""

    __slots__ = ()


Child = str | None | Iterable["str | None"]


def text(value: str) -> Markup:
    """Escapes HTML, control characters, marks of text direction and lone surrogates."""
    if isinstance(value, Markup):
        return value
    shown = one_line(value).encode("utf-8", "backslashreplace").decode("utf-8")
    return Markup(escape(shown, quote=True))


def join(*children: Child) -> Markup:
    """Return the children one after another. Leaves out None."""
    parts: list[str] = []
    for child in children:
        if isinstance(child, str):
            parts.append(text(child))
        elif child is not None:
            parts += [text(part) for part in child if part is not None]
    return Markup("".join(parts))


def element(name: str, /, *children: Child, **attributes: str | int | bool | None) -> Markup:
    """One element. `class_` and `data_kind` become `class` and `data-kind`; None and False leave an attribute out."""
    shown = "".join(_attribute(key.rstrip("_").replace("_", "-"), value) for key, value in attributes.items())
    if name in EMPTY_ELEMENTS:
        return Markup(f"<{name}{shown}>")
    return Markup(f"<{name}{shown}>{join(*children)}</{name}>")


def _attribute(name: str, value: str | int | bool | None) -> str:
    if value is None or value is False:
        return ""
    return f" {name}" if value is True else f' {name}="{text(str(value))}"'


def table(caption: str, header: Sequence[str], rows: Iterable[Sequence[str | None]], *, names: int = 1) -> Markup:
    """Return a table in a box that scrolls. The first column names the row; the first `names` columns are text, the
    others are numbers. `None` is shown as a dash."""
    titles = [element("th", title, scope="col", class_=_align(i, names)) for i, title in enumerate(header)]
    head = element("thead", element("tr", titles))
    body = element("tbody", [_row(row, names) for row in rows])
    content = element("table", element("caption", caption), head, body)
    return element("div", content, class_="scroll", tabindex=0, role="region", aria_label=caption)


def _row(row: Sequence[str | None], names: int) -> Markup:
    cells = [
        element("td", "–" if value is None else value, class_=_align(column, names))
        for column, value in enumerate(row[1:], start=1)
    ]
    return element("tr", element("th", row[0] or "–", scope="row", class_="name"), cells)


def _align(column: int, names: int) -> str | None:
    return "name" if column < names else None


def prose(sentence: str) -> Markup:
    """Return a sentence whose `code` is in backticks."""
    parts = sentence.split("`")
    if len(parts) % 2 == 0:
        return text(sentence)
    return join([element("code", part) if index % 2 else text(part) for index, part in enumerate(parts)])


def facts(pairs: Iterable[tuple[str, Child]], **attributes: str) -> Markup:
    """Return a list of terms with their descriptions."""
    return element("dl", [element("div", element("dt", k), element("dd", v)) for k, v in pairs], **attributes)


def bullets(items: Iterable[str], **attributes: str) -> Markup:
    return element("ul", [element("li", item) for item in items], **attributes)


def json_for_script(data: object) -> Markup:
    """JSON that cannot end its script element: only ASCII, and no `<`, `>` or `&`. ValueError for NaN."""
    dumped = json.dumps(data, ensure_ascii=True, allow_nan=False, separators=(",", ":"))
    for character in "<>&":
        dumped = dumped.replace(character, f"\\u{ord(character):04x}")
    return Markup(dumped)
