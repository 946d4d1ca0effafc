"""Writing the package of a new plugin from templates."""

from __future__ import annotations

import re
from collections.abc import Iterator
from importlib.metadata import version
from importlib.resources import files
from importlib.resources.abc import Traversable
from pathlib import Path

from attrs import frozen

from megaopt_core.errors import ConfigurationError
from megaopt_core.registry import get_registry
from megaopt_testing.document import badge

__all__ = ["NewPlugin"]

_NAME = re.compile(r"[a-z][a-z0-9]*([-_][a-z0-9]+)*")
_PLACEHOLDER = re.compile(r"@([A-Z_]+)@")
_WHAT = {
    "optimizer": "an optimizer",
    "strategy": "a sharding strategy",
    "schedule": "a schedule",
    "roles": "a reader of models",
}
_USE = {
    "optimizer": """\
```python
from megaopt_core import build_optimizer

optimizer = build_optimizer(model, "@NAME@", lr=1e-3, @NAME@_beta=0.9)
```""",
    "strategy": """\
```python
from megaopt_core import build_optimizer

optimizer = build_optimizer(model, "adam", lr=1e-3, sharding="@NAME@")
```""",
    "schedule": 'Users write `lr_decay_style="@NAME@"` wherever a schedule is set.',
    "roles": "It is asked whenever it is installed; `megaopt explain` shows what it says of a model.",
}


@frozen
class NewPlugin:
    """A plugin that is to be written.

    Args:
        name: what users write: letters, digits and underscores.
        kind: `"optimizer"`, `"strategy"`, `"schedule"` or `"roles"`.

    Example:
        >>> plugin = NewPlugin.named("my-opt", "optimizer")
        >>> plugin.name, plugin.distribution, plugin.module, plugin.cls
        ('my_opt', 'megaopt-my-opt', 'megaopt_my_opt', 'MyOpt')
    """

    name: str
    kind: str

    @classmethod
    def named(cls, given: str, kind: str) -> NewPlugin:
        """Return the plugin of a name as somebody writes it, `my-opt` or `megaopt-my-opt`.

        Args:
            given: the name.
            kind: what it brings.

        Raises:
            ConfigurationError: it is no name, or an installed plugin offers it already.
        """
        name = given.removeprefix("megaopt-").replace("-", "_")
        if not _NAME.fullmatch(given) or given.startswith("megaopt_"):
            raise ConfigurationError(
                f"{given!r} is no name for a plugin: lower-case letters and digits, with - between words, as my-opt",
                setting="NAME",
                value=given,
            )
        registry = get_registry()
        taken = {
            **dict.fromkeys(registry.optimizers(), "an optimizer"),
            **dict.fromkeys(registry.strategies(), "a strategy"),
            **dict.fromkeys(registry.schedules(), "a schedule"),
            **{info.name: "a plugin" for info in registry.plugins()},
        }
        if name in taken:
            raise ConfigurationError(
                f"{name!r} is {taken[name]} that is installed here: two plugins that give one name are an error",
                setting="NAME",
                value=given,
            )
        return cls(name, kind)

    @property
    def distribution(self) -> str:
        """The distribution's name."""
        return f"megaopt-{self.name.replace('_', '-')}"

    @property
    def module(self) -> str:
        """The package that is imported."""
        return f"megaopt_{self.name}"

    @property
    def cls(self) -> str:
        """The name of its class."""
        return "".join(word.capitalize() for word in self.name.split("_"))

    @property
    def what(self) -> str:
        """What it brings, in words."""
        return f"{_WHAT[self.kind]} {self.name!r}"

    def write(self, folder: Path) -> list[Path]:
        """Write every file of the package.

        Args:
            folder: where to; it is made.

        Returns:
            The files.

        Raises:
            ConfigurationError: the folder holds something, or is none.
        """
        if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
            raise ConfigurationError(
                f"{folder} is there already, and nothing is written over: give --into another folder",
                setting="--into",
                value=str(folder),
            )
        written = []
        for name, text in self._files():
            path = folder / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text, encoding="utf-8")
            written.append(path)
        return written

    def _files(self) -> Iterator[tuple[str, str]]:
        templates = files("megaopt_testing") / "templates"
        for source in (*_texts(templates / "common"), *_texts(templates / self.kind)):
            path = source.name.removesuffix(".txt").replace("dot+", ".").replace("+", "/")
            yield self._filled(path), self._filled(source.read_text(encoding="utf-8"))
        yield f"src/{self.module}/py.typed", ""
        yield "kit.svg", badge({"ran": 0, "failed": 0, "xfailed": 0})

    def _filled(self, text: str) -> str:
        major, minor = version("megaopt-core").split(".")[:2]
        values = {
            "NAME": self.name,
            "DIST": self.distribution,
            "MODULE": self.module,
            "CLASS": self.cls,
            "KIND": self.kind,
            "WHAT": _WHAT[self.kind],
            "CORE": f"megaopt-core>={major}.{minor},<{major}.{int(minor) + 1}",
            "KIT": f"megaopt-testing>={major}.{minor},<{major}.{int(minor) + 1}",
            "SERIES": f"{major}.{minor}",
            "USE": _USE[self.kind].replace("@NAME@", self.name),
        }
        return _PLACEHOLDER.sub(lambda found: values[found[1]], text)


def _texts(folder: Traversable) -> list[Traversable]:
    return sorted(
        (each for each in folder.iterdir() if each.name.endswith(".txt")), key=lambda each: each.name
    )
