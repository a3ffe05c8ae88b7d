"""YAML into dataclasses, strictly: unknown keys, keys given twice and values of the wrong kind are refused by name."""

import difflib
import re
import types
import typing
from collections.abc import Callable, Mapping
from dataclasses import MISSING, fields, is_dataclass
from enum import Enum
from pathlib import Path
from typing import Any

import yaml  # type: ignore[import-untyped]

_WORDS = {int: "a whole number", float: "a number", bool: "true or false", str: "text", type(None): "null"}


class ConfigError(ValueError):
    """Something in a configuration file is wrong; the message names file, line and key."""


class BadValue(Exception):
    """Raised by a section's `__post_init__` with a field's name and what is wrong with it."""


class _Loader(yaml.SafeLoader):
    """YAML 1.2's numbers: `1e-5` is one, which PyYAML takes for text."""


_Loader.yaml_implicit_resolvers = {
    first: [entry for entry in resolvers if entry[0] != "tag:yaml.org,2002:float"]
    for first, resolvers in yaml.SafeLoader.yaml_implicit_resolvers.items()
}
_Loader.add_implicit_resolver(
    "tag:yaml.org,2002:float",
    re.compile(r"[-+]?(\.[0-9]+|[0-9]+(\.[0-9]*)?)([eE][-+]?[0-9]+)?$|[-+]?\.(inf|Inf|INF)$|\.(nan|NaN|NAN)$"),
    list("-+0123456789."),
)


class Tree:
    """
    Contents of a YAML file, and the line of every key.

    values: nested dicts. name: the file, for messages.
    """

    def __init__(self, name: str):
        self.name = name
        self.values: dict[str, Any] = {}
        self._lines: dict[str, str] = {}

    @classmethod
    def read(cls, file: str | Path) -> "Tree":
        """Raises `ConfigError` for a file that is missing or no YAML mapping, and for a key given twice."""
        tree = cls(str(file))
        try:
            text = Path(file).read_text(encoding="utf-8")
            loader = _Loader(text)
            root = loader.get_single_node()
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(f"{file} cannot be read: {error}.") from error
        except yaml.YAMLError as error:
            raise ConfigError(f"{file} is not YAML: {' '.join(str(error).split())}.") from error
        if not isinstance(root, yaml.MappingNode):
            raise ConfigError(f"{file} must hold keys and values, such as `model:` and `data:`.")
        tree.values = tree._convert(loader, root, "")
        return tree

    def set(self, assignment: str) -> None:
        """
        Puts `key.path=value`, the value in YAML, in place of what the file says. Raises `ConfigError` where it has
        another form, or the path leads through something that holds no keys.
        """
        path, equals, text = assignment.partition("=")
        names = path.strip().split(".")
        if not equals or not all(names):
            raise ConfigError(f"--set {assignment}: write it as KEY.PATH=VALUE, such as training.max_steps=10.")
        try:
            value = yaml.load(text, _Loader)
        except yaml.YAMLError as error:
            raise ConfigError(f"--set {assignment}: {text!r} is no YAML value.") from error
        section = self.values
        for name in names[:-1]:
            inner = section.setdefault(name, {})
            if inner is None:
                inner = section[name] = {}
            if not isinstance(inner, dict):
                raise ConfigError(f"--set {assignment}: {name!r} is {inner!r} and holds no keys.")
            section = inner
        section[names[-1]] = value
        self._lines[path.strip()] = f"--set {path.strip()}"

    def where(self, path: str) -> str:
        """`file:line: ` of a key, or of the nearest section around it."""
        while path and path not in self._lines:
            path = path.rpartition(".")[0]
        return f"{self._lines[path]}: " if path else f"{self.name}: "

    def error(self, path: str, problem: str) -> ConfigError:
        """A `ConfigError` about a key."""
        return ConfigError(f"{self.where(path)}`{path}` {problem}" if path else f"{self.where(path)}{problem}")

    def _convert(self, loader: Any, node: Any, path: str) -> Any:
        if isinstance(node, yaml.SequenceNode):
            return [self._convert(loader, item, f"{path}[{index}]") for index, item in enumerate(node.value)]
        if not isinstance(node, yaml.MappingNode):
            return loader.construct_object(node, deep=True)
        values: dict[str, Any] = {}
        for key_node, value_node in node.value:
            key = str(loader.construct_object(key_node, deep=True))
            inner = f"{path}.{key}" if path else key
            if key in values:
                raise self.error(inner, "is given twice.")
            self._lines[inner] = f"{self.name}:{key_node.start_mark.line + 1}"
            values[key] = self._convert(loader, value_node, inner)
        return values


def check_names(tree: Tree, path: str, given: Mapping[str, Any], known: list[str], hints: Mapping[str, str]) -> None:
    """Raises `ConfigError` for a key that is not `known`; `hints` says more of some."""
    for key in given:
        if key in known:
            continue
        inner = f"{path}.{key}" if path else key
        close = difflib.get_close_matches(key, known, n=1, cutoff=0.6)
        if key in hints:
            advice = hints[key]
        elif close:
            advice = f"Did you mean {close[0]!r}?"
        else:
            advice = f"Known here: {', '.join(known)}." if len(known) < 40 else ""
        raise tree.error(inner, f"is no setting. {advice}".rstrip())


def build(
    section: type,
    tree: Tree,
    values: Any,
    path: str = "",
    hints: Mapping[str, str] | None = None,
) -> Any:
    """
    Makes the dataclass `section` of a mapping. Its `__post_init__` may raise `BadValue`.

    Raises `ConfigError` for unknown and missing keys and for values of the wrong type.
    """
    if not isinstance(values, dict):
        raise tree.error(path, f"must hold keys and values, not {values!r}.")
    named: dict[str, Any] = {field.name: field for field in fields(section) if field.init}
    check_names(tree, path, values, list(named), hints or {})
    types_of = typing.get_type_hints(section)
    arguments = {}
    for name, field in named.items():
        inner = f"{path}.{name}" if path else name
        if name in values:
            arguments[name] = convert(tree, inner, values[name], types_of[name])
        elif field.default is MISSING and field.default_factory is MISSING:
            raise tree.error(path, f"{'must have' if path else 'Every configuration needs'} the key `{name}`.")
    try:
        return section(**arguments)
    except BadValue as bad:
        name, problem = bad.args
        raise tree.error(f"{path}.{name}" if path else name, problem) from None


def convert(tree: Tree, path: str, value: Any, kind: Any) -> Any:
    """`value` as the type `kind` asks for it; raises `ConfigError` where it is of another."""
    options = typing.get_args(kind) if typing.get_origin(kind) in (typing.Union, types.UnionType) else (kind,)
    for option in options:
        if is_dataclass(option) and isinstance(option, type) and isinstance(value, dict):
            return build(option, tree, value, path)
    if any(_is_enum(option) for option in options):  # beside the names that are valid, the hint allows any text
        value = "no" if value is False else value  # what YAML makes of a bare `no`
        options = tuple(option for option in options if option is not str)
    for option in options:
        if _accepts(option)(value):
            return _as_floats(value, option)
    for option in options:
        if typing.get_origin(option) is dict and isinstance(value, dict):
            for key, item in value.items():  # one of these is wrong, and has a line of its own
                convert(tree, f"{path}.{key}", item, typing.get_args(option)[1])
    raise tree.error(path, f"is {value!r}, but must be {_describe(options)}.")


def _as_floats(value: Any, kind: Any) -> Any:
    """Whole numbers as floats where the type asks for these."""
    if kind is float:
        return float(value)
    if typing.get_origin(kind) is dict:
        return {key: _as_floats(item, typing.get_args(kind)[1]) for key, item in value.items()}
    return value


def _accepts(kind: Any) -> Callable[[Any], bool]:
    origin, arguments = typing.get_origin(kind), typing.get_args(kind)
    if kind is Any:
        return lambda value: True
    if origin is typing.Literal:
        return lambda value: any(value == choice and type(value) is type(choice) for choice in arguments)
    if kind is list or origin is list:
        inner = _accepts(arguments[0]) if arguments else _accepts(Any)
        return lambda value: isinstance(value, list) and all(inner(item) for item in value)
    if kind is dict or origin is dict:
        inner = _accepts(arguments[1]) if arguments else _accepts(Any)
        return lambda value: isinstance(value, dict) and all(inner(item) for item in value.values())
    if origin in (typing.Union, types.UnionType):
        return lambda value: any(_accepts(option)(value) for option in arguments)
    if kind is float:
        return lambda value: isinstance(value, int | float) and not isinstance(value, bool)
    if kind is int:
        return lambda value: isinstance(value, int) and not isinstance(value, bool)
    if _is_enum(kind):
        return lambda value: value in [member.value for member in kind]
    return lambda value: isinstance(value, kind)


def _is_enum(kind: Any) -> bool:
    return isinstance(kind, type) and issubclass(kind, Enum)


def _describe(options: tuple[Any, ...]) -> str:
    words: list[str] = []
    for option in options:
        if typing.get_origin(option) is typing.Literal:
            words += [repr(choice) for choice in typing.get_args(option)]
        elif _is_enum(option):
            words += [repr(member.value) for member in option]
        elif option in _WORDS:
            words.append(_WORDS[option])
        elif option is list or typing.get_origin(option) is list:
            words.append("a list")
        elif option is dict or typing.get_origin(option) is dict or is_dataclass(option):
            words.append("keys and values")
        else:
            words.append(getattr(option, "__name__", str(option)))
    return words[0] if len(words) == 1 else f"{', '.join(words[:-1])} or {words[-1]}"
