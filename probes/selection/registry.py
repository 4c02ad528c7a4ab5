"""Short names of selections, and how they are read.

A name is a word and its parameters, `strided:8:64`. `&` keeps what both sides keep, `+` what either keeps; `&` binds
tighter: `topk:8&banded:64+sink:4` is the sink beside those of the 8 largest logits that lie in the band.
"""

from __future__ import annotations

import dataclasses
import difflib
from collections.abc import Callable
from typing import TypeVar

from probes.selection.base import Selection

_PARSERS: dict[str, Callable[..., Selection]] = {}
_CLASSES: dict[str, type[Selection]] = {}
_Class = TypeVar("_Class", bound=type[Selection])


def register(name: str, build: Callable[..., Selection], selection: type[Selection]) -> None:
    """Teach `parse` a short name.

    Args:
        name: the word before the first colon.
        build: called with the words after it.
        selection: the class, for its summary and kind.
    """
    _PARSERS[name] = build
    _CLASSES[name] = selection


def selection(word: str) -> Callable[[_Class], _Class]:
    """Register a dataclass of selections under its word; its fields are the parameters, in their order.

    Args:
        word: the word before the first colon.

    Returns:
        A class decorator.
    """

    def decorate(cls: _Class) -> _Class:
        cls.word = word
        register(word, lambda *words: _from_words(cls, words), cls)
        return cls

    return decorate


def known() -> dict[str, type[Selection]]:
    """The words that `parse` knows.

    Returns:
        Each word with its selection class.
    """
    return dict(_CLASSES)


def parse_one(text: str) -> Selection:
    """Read a name without `+` and `&`.

    Args:
        text: such as `topk:5`.

    Returns:
        The selection.

    Raises:
        ValueError: if the name or its parameters are wrong; the message lists the names there are, and the near ones.
    """
    word, *parameters = (part.strip() for part in text.strip().split(":"))
    build = _PARSERS.get(word)
    if build is None:
        near = difflib.get_close_matches(word.lower(), _PARSERS, n=3)
        hint = f" Did you mean {' or '.join(near)}?" if near else ""
        raise ValueError(f"Expected a selection, but got {text!r}; known: {', '.join(sorted(_PARSERS))}.{hint}")
    usage = _CLASSES[word].summary.split(": ")[0]
    try:
        return build(*parameters)
    except TypeError:
        raise ValueError(f"Expected a selection of the form {usage}, but got {text!r}.") from None
    except ValueError as error:
        raise ValueError(f"Expected a selection of the form {usage}, but got {text!r}: {error}") from None


def whole_number(word: str) -> int:
    """Read one parameter of a short name.

    Args:
        word: the text between two colons.

    Returns:
        The number.

    Raises:
        ValueError: if the text is not a whole number.
    """
    try:
        return int(word)
    except ValueError:
        raise ValueError(f"expected a whole number, but got {word!r}") from None


def _number(word: str) -> float:
    try:
        return float(word)
    except ValueError:
        raise ValueError(f"expected a number, but got {word!r}") from None


def _from_words(cls: type[Selection], words: tuple[str, ...]) -> Selection:
    fields = [field for field in dataclasses.fields(cls) if field.init]  # type: ignore[arg-type]
    if len(words) > len(fields):
        raise TypeError(f"{len(words)} parameters for {len(fields)}")
    readers: dict[str, Callable[[str], object]] = {"int": whole_number, "float": _number}
    return cls(*(readers.get(str(field.type), str)(word) for field, word in zip(fields, words, strict=False)))
