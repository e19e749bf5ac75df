"""Kinds of parts: built-ins by name, options, and the contract that a user's own part is held to.

Every kind (rules, links, tasks, ...) is one `Kind`, in the package of its parts. It is a mapping from names to what
was registered under them, so `RULES["drop"]()` makes a rule; `RULES.build` makes the part that a config names.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, fields, is_dataclass, replace
from typing import Any, Generic, TypeVar

from safari.errors import ConfigError, brief
from safari.hosting import hosted, named
from safari.plugins import check_call, check_options, defaults_of, known, resolve

T = TypeVar("T")
P = TypeVar("P")
V = TypeVar("V")

# (answer, *arguments) -> the answer as the caller uses it; raises ConfigError.
Check = Callable[..., Any]


@dataclass(frozen=True, eq=False)
class Kind(Mapping[str, V], Generic[V]):
    """A kind of part.

    Args:
        name: in commands, and of the group of entry points, `safari.<name>`.
        type: what a factory must return.
        builtin: factories by name; their keyword-only arguments are the options.
        tables: where a config has the options of such a part.
        key: the field of a table that names the part; empty where the table may be a bare name.
        arguments: what a factory takes by position.
        contract: a check of what a function of a user's part returns, by the function's name.
    """

    name: str
    type: type
    builtin: Mapping[str, V]
    tables: tuple[str, ...]
    key: str = "name"
    arguments: tuple[str, ...] = ()
    contract: Mapping[str, Check] = field(default_factory=dict)

    def __getitem__(self, name: str) -> V:
        return self.builtin[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self.builtin)

    def __len__(self) -> int:
        return len(self.builtin)

    @property
    def field(self) -> str:
        """The fields of a config that name such a part."""
        return ", ".join(f"{table}.{self.key}" if self.key else table for table in self.tables)

    def _field(self, table: str, name: str) -> str:
        """The field of a config, or the arm, that names a part."""
        table = table or self.tables[0]
        # An arm without a name of its own is called after its rule, which is said anyway.
        return f"{table}.{self.key}" if self.key else table.removesuffix(f": {name.rpartition(':')[2]}")

    def _where(self, table: str, name: str) -> str:
        return f"{self._field(table, name)}: {name}"

    def find(self, name: str, table: str = "") -> V:
        """Look up a plug-in by name: a registered one, or an object in a user's file, module or package."""
        found: V = resolve(self.name, self._field(table, name), name, self.builtin)
        return found

    def factory(self, name: str, options: Mapping[str, Any], table: str = "") -> V:
        """The function behind a name, when it takes these options, and by position what its kind is given."""
        table = table or self.tables[0]
        where, factory = self._where(table, name), self.find(name, table)
        if not callable(factory):
            raise ConfigError(f"{where} is not a function, got {brief(factory)}")
        problems = hosted(where, lambda: check_options(table, factory, options, self.arguments))
        if problems:
            raise ConfigError(problems)
        check_call(where, factory, self.arguments, options)
        return factory

    def call(self, name: str, make: Callable[[], T], table: str = "") -> T:
        """Run a part's code. A user's mistake becomes one line with the part's name; one of ours keeps its frames."""
        table = table or self.tables[0]
        return named(table, make) if name in self else hosted(self._where(table, name), make)

    def build(
        self: Kind[Callable[..., P]],
        name: str,
        options: Mapping[str, Any],
        table: str = "",
        contract: Mapping[str, Check] | None = None,
    ) -> P:
        """The part that a config names; what the functions of a user's own return is checked under its name.

        Args:
            name: the part's name.
            options: the options of its factory.
            table: the config's table that has them; by default the first of the kind's.
            contract: in place of the kind's, where it depends on the run.

        >>> def half(*, share: float = 0.5): return [share]
        >>> Kind("list", list, {"half": half}, ("aggregation.list",)).build("half", {"shar": 1.0})
        Traceback (most recent call last):
        ...
        safari.errors.ConfigError: aggregation.list.shar is not an option (allowed: share) (did you mean 'share'?)
        """
        factory = self.factory(name, options, table)
        part = self.call(name, lambda: factory(**options), table)
        where = self._where(table, name)
        if not isinstance(part, self.type):
            raise ConfigError(f"{where} must return a {self.type.__name__}, got {brief(part)}")
        if name in self:
            part = _with_named_init(part, table or self.tables[0])
        else:
            part = guarded(part, self.contract if contract is None else contract, where)
        return _under_its_name(part, where)

    def defaults(self, name: str, given: Mapping[str, Any]) -> dict[str, Any] | None:
        """The options that are left as the factory has them today, as a file can hold them.

        None where this cannot be said without importing a user's code.
        """
        factory = known(self.name, name, self.builtin)
        return defaults_of(factory, given) if callable(factory) else None


def guarded(part: P, contract: Mapping[str, Check], where: str) -> P:
    """The part with errors that begin with `where`, and with answers that went through the contract."""
    return wrapped(part, lambda name, function: _guarded(function, contract.get(name), where))


def wrapped(part: P, wrap: Callable[[str, Callable[..., Any]], Callable[..., Any]], prefix: str = "") -> P:
    """The part with `wrap(name, function)` in place of each of its functions.

    A function that is its class's default is left alone: code asks `part.learn is None`.
    """
    changed: dict[str, Any] = {}
    for f in fields(part):  # type: ignore[arg-type]
        value, key = getattr(part, f.name), prefix + f.name
        if value is f.default or isinstance(value, type):
            continue
        if is_dataclass(value):
            changed[f.name] = wrapped(value, wrap, f"{key}.")
        elif callable(value):
            changed[f.name] = wrap(key, value)
    return replace(part, **changed)  # type: ignore[type-var]


def _guarded(function: Callable[..., T], check: Check | None, where: str) -> Callable[..., T]:
    @functools.wraps(function)
    def guard(*arguments: Any) -> T:
        def run() -> T:
            answer: T = function(*arguments)
            return answer if check is None else check(answer, *arguments)

        return hosted(where, run)

    return guard


def _with_named_init(part: P, table: str) -> P:
    """A part of ours: what its options and the run's clients do not allow is said of the table that has them."""
    init = next((f for f in fields(part) if f.name == "init"), None)  # type: ignore[arg-type]
    given = getattr(part, "init", None)
    if init is None or given is None or given is init.default:
        return part
    return replace(part, init=lambda *arguments: named(table, lambda: given(*arguments)))  # type: ignore[type-var]


def _under_its_name(part: P, where: str) -> P:
    """The part, called `where` in messages unless it has a name of its own."""
    named_field = next((f for f in fields(part) if f.name == "name"), None)  # type: ignore[arg-type]
    if named_field is None or getattr(part, "name") != named_field.default:  # noqa: B009
        return part
    return replace(part, name=where)  # type: ignore[type-var]
