"""Exceptions, in few kinds: each message names the thing, its limit and the value."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from difflib import get_close_matches
from itertools import islice
from reprlib import Repr

from safari.text import visible

# Names that do not exist, and other problems, are listed one by one up to here.
_MOST_NAMES = 20
# Of what is allowed, so many are listed.
_MOST_ALLOWED = 100


class SafariError(Exception):
    """The parent of every error that a user can cause and mend; the command prints it without a traceback."""


class ConfigError(SafariError):
    """One or several fields of a configuration are wrong; `problems` holds a line for each.

    >>> str(ConfigError(["rounds must be at least 1, got 0"]))
    'rounds must be at least 1, got 0'
    """

    def __init__(self, problems: Sequence[str] | str):
        self.problems = [problems] if isinstance(problems, str) else list(problems)
        super().__init__("\n".join(self.problems))


class TrustError(ConfigError):
    """A config that somebody else may have written names code, or an address, and nobody said that it is trusted."""


class DataError(SafariError):
    """A data set is missing, truncated or corrupt."""


class PruneError(SafariError):
    """A mask cannot be made: nothing to prune, or a sparsity that leaves nothing."""


class RunError(SafariError):
    """A run's folder cannot be read, written or resumed."""


class WireError(SafariError):
    """Bytes that are not a valid frame; `offset` says where it was noticed."""

    def __init__(self, problem: str, offset: int):
        self.offset = offset
        super().__init__(f"{problem} (at byte {offset})")


class MissingExtraError(SafariError):
    """An optional library is not installed.

    >>> str(MissingExtraError("matplotlib", "plots", "figures"))
    "figures need matplotlib: pip install 'safari-fl[plots]'"
    """

    def __init__(self, library: str, extra: str, purpose: str):
        super().__init__(f"{purpose} need {library}: pip install 'safari-fl[{extra}]'")


def one_of(field: str, value: object, allowed: Iterable[str]) -> str:
    """The sentence for a value that is not among the allowed ones, with the nearest spelling.

    >>> one_of("pruner", "snipp", ["mag", "snip"])
    "pruner must be one of mag, snip; got 'snipp' (did you mean 'snip'?)"
    """
    names = sorted(allowed)
    more = f" and {len(names) - _MOST_ALLOWED:,} more" if len(names) > _MOST_ALLOWED else ""
    listed = ", ".join(names[:_MOST_ALLOWED]) + more
    return f"{field} must be one of {listed}; got {brief(value)}{did_you_mean(value, names)}"


def not_there(where: str, names: Sequence[str], says: Callable[[str], str]) -> list[str]:
    """A line for each name that does not exist, up to a few, and one for how many more there are.

    >>> not_there("uplink", ["uplink.q"], lambda name: "is not an option")
    ['uplink.q is not an option']
    """
    lines = [f"{visible(name, 100)} {says(name)}" for name in names[:_MOST_NAMES]]
    more = len(names) - len(lines)
    return lines + ([f"{where} has {more:,} more names that do not exist"] if more else [])


def few(lines: Iterable[str], where: str) -> list[str]:
    """The first lines of what may be many; where there are more, a line that says so. The others are never made.

    >>> few((f"x[{k}] must be a number" for k in range(10**12)), "the file")[19:]
    ['x[19] must be a number', 'the file has more problems than these']
    """
    found = list(islice(lines, _MOST_NAMES + 1))
    return found if len(found) <= _MOST_NAMES else [*found[:-1], f"{where} has more problems than these"]


def did_you_mean(value: object, names: Iterable[str]) -> str:
    """' (did you mean ...?)' for the nearest of `names`, or nothing when none is near."""
    near = get_close_matches(str(value), list(names), n=1, cutoff=0.6)
    return f" (did you mean {near[0]!r}?)" if near else ""


def brief(value: object, longest: int = 100) -> str:
    """A value as an error message shows it: on one line, and bounded in length, whatever it is.

    >>> brief("snipp"), brief([0.0] * 10**6, 20)
    ("'snipp'", '[0.0, 0.0, 0.0, 0...')
    """
    # Its limits keep a giant or deeply nested value from being written out before it is cut.
    shortened = Repr()
    shortened.maxlist = shortened.maxtuple = shortened.maxdict = shortened.maxset = longest
    shortened.maxstring = shortened.maxlong = shortened.maxother = 10 * longest
    try:
        text = " ".join(shortened.repr(value).split())
    except ValueError:  # Python writes no whole number of more than 4,300 digits
        text = f"a {type(value).__name__} that is too long to be shown"
    return text if len(text) <= longest else f"{text[: longest - 3]}..."
