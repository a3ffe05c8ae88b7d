"""Two ways of this package's docstrings that Google's style does not know, as the site reads them."""

import re
from collections.abc import Iterator
from typing import Any

import griffe

# transformers' way for the fields of a configuration: a line `name (`type`, *optional*, defaults to ...):`, then text.
_FIELD = re.compile(r"^(\w+) (\(`.*\):)$", re.M)
# One line about several arguments, and the deeper ones that go on with it.
_GROUP = re.compile(r"^    (\w+(?:, \w+)+): (.*(?:\n     .*)*)", re.M)


class HouseStyle(griffe.Extension):
    """Fields become items of a list; arguments that share a line get one each, with its own type and default."""

    def on_package(self, *, pkg: griffe.Module, **_: Any) -> None:
        for documented in walk(pkg):
            text = _FIELD.sub(r"\n- `\1` \2", documented.value)
            documented.value = _GROUP.sub(lambda found: one_each(found[1], found[2]), text)


def walk(parent: griffe.Object) -> Iterator[griffe.Docstring]:
    for member in parent.members.values():
        if isinstance(member, griffe.Object):
            if member.docstring is not None:
                yield member.docstring
            yield from walk(member)


def one_each(names: str, text: str) -> str:
    return "\n".join(f"    {name}: {text}" for name in names.split(", "))
