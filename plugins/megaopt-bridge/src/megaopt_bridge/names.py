"""Names of bridged optimizers: `source:Class`, where a source is a known package or any module."""

from __future__ import annotations

import importlib
import inspect
import re
from collections.abc import Iterator, Mapping
from importlib.metadata import PackageNotFoundError, version
from types import MappingProxyType, ModuleType

import torch
from attrs import frozen

from megaopt_core.errors import PluginError, PluginNotInstalledError, UnknownNameError

__all__ = ["SOURCES", "BridgedName", "Source", "optimizers_of"]


@frozen
class Source:
    """A package whose optimizers have short names.

    Args:
        package: the package that is imported.
        distribution: what brings it.
        modules: modules in which classes are looked up, in this order; one that cannot be imported takes no other down.
    """

    package: str
    distribution: str
    modules: tuple[str, ...]


SOURCES: Mapping[str, Source] = MappingProxyType(
    {
        "torch": Source("torch", "torch", ("torch.optim",)),
        "emerging": Source(
            "emerging_optimizers",
            "emerging-optimizers",
            (
                "emerging_optimizers.orthogonalized_optimizers",
                "emerging_optimizers.riemannian_optimizers",
                "emerging_optimizers.scalar_optimizers",
                "emerging_optimizers.soap",
                "emerging_optimizers.psgd",
            ),
        ),
        "po": Source("pytorch_optimizer", "pytorch_optimizer", ("pytorch_optimizer",)),
        "heavyball": Source("heavyball", "heavyball", ("heavyball",)),
        "torchao": Source("torchao", "torchao", ("torchao.optim",)),
        "schedulefree": Source("schedulefree", "schedulefree", ("schedulefree",)),
        "prodigyopt": Source("prodigyopt", "prodigyopt", ("prodigyopt",)),
    }
)
"""Short name to the package that it stands for. Any other source is the name of a module."""


@frozen
class BridgedName:
    """A name of the form `source:Class`.

    Args:
        source: a key of :data:`SOURCES`, or a module.
        class_name: the class, in any case where the source is known.

    Example:
        >>> name = BridgedName.parse("torch:nadam")
        >>> name.load().__name__, name.setting_prefix
        ('NAdam', 'torch_nadam')
    """

    source: str
    class_name: str

    @classmethod
    def parse(cls, name: str) -> BridgedName:
        """Return the parts of a name.

        Args:
            name: what a user wrote.

        Raises:
            UnknownNameError: it has not two parts, or its module is a relative one.
        """
        source, _, class_name = name.partition(":")
        if not source or source.startswith(".") or not class_name.isidentifier():
            raise UnknownNameError(
                f"optimizer {name!r} must read 'source:Class'; a source is one of {', '.join(SOURCES)}, or a module",
                name=name,
                known=tuple(SOURCES),
            )
        return cls(source, class_name)

    def __str__(self) -> str:
        return f"{self.source}:{self.class_name}"

    @property
    def setting_prefix(self) -> str:
        """Prefix of its settings: the name in lower case, with `_` for what cannot be in a name."""
        return re.sub(r"[^0-9a-z]+", "_", str(self).lower())

    @property
    def origin(self) -> str:
        """Distribution and version, or the module where no distribution is known."""
        source = SOURCES.get(self.source)
        if source is None:
            return self.source
        try:
            return f"{source.distribution} {version(source.distribution)}"
        except PackageNotFoundError:
            return source.distribution

    def load(self) -> type[torch.optim.Optimizer]:
        """Import and return the class.

        Raises:
            PluginNotInstalledError: its package is not installed.
            PluginError: its package or module fails to import.
            UnknownNameError: the package has no optimizer of this name; the message lists close ones.
        """
        return self.find()[1]

    def find(self) -> tuple[BridgedName, type[torch.optim.Optimizer]]:
        """Import the class, and return it with its name in the case of letters that it has there.

        A class is what stands in its module under the name: it may call itself otherwise, as one does that a function
        has made.

        Raises:
            PluginNotInstalledError: its package is not installed.
            PluginError: its package or module fails to import.
            UnknownNameError: the package has no optimizer of this name; the message lists close ones.
        """
        source = SOURCES.get(self.source)
        if source is None:
            return self, self._of_module()
        self._require_installed(source)
        failed: list[str] = []
        by_name = optimizers_of(source, failed)
        alike = (name for name in by_name if name.lower() == self.class_name.lower())
        name = self.class_name if self.class_name in by_name else next(alike, None)
        if name is None:
            raise self._unknown(by_name, failed)
        return BridgedName(self.source, name), by_name[name]

    def _require_installed(self, source: Source) -> None:
        try:
            self._import(source.package)
        except ModuleNotFoundError as error:
            if error.name is not None and error.name.partition(".")[0] != source.package:
                raise PluginError(f"optimizer '{self}': {source.package} fails to import: {error}") from error
            raise PluginNotInstalledError(
                f"optimizer '{self}' comes with {source.distribution}, which is not installed: "
                f"pip install {source.distribution}",
                name=str(self),
                distribution=source.distribution,
            ) from error
        except ImportError as error:
            raise PluginError(f"optimizer '{self}': {source.package} fails to import: {error}") from error

    def _import(self, module: str) -> ModuleType:
        """Import a module; whatever it raises beside an `ImportError` becomes an error that names it."""
        try:
            return importlib.import_module(module)
        except (ImportError, KeyboardInterrupt):
            raise
        except BaseException as error:
            raise PluginError(
                f"optimizer '{self}': module {module!r} fails to import: {type(error).__name__}: {error}"
            ) from error

    def _of_module(self) -> type[torch.optim.Optimizer]:
        try:
            module = self._import(self.source)
        except ImportError as error:
            raise UnknownNameError(
                f"optimizer '{self}': module {self.source!r} cannot be imported ({error}); known short names are "
                f"{', '.join(SOURCES)}",
                name=str(self),
                known=tuple(SOURCES),
            ) from error
        found = getattr(module, self.class_name, None)
        if not (inspect.isclass(found) and issubclass(found, torch.optim.Optimizer)):
            raise self._unknown(_optimizers_of(module), [])
        return found

    def _unknown(self, known: Mapping[str, object], failed: list[str]) -> UnknownNameError:
        listed = ", ".join(sorted(known)) or "none"
        broken = f"; these of its modules fail to import: {', '.join(failed)}" if failed else ""
        return UnknownNameError(
            f"optimizer '{self}': {self.source!r} has no torch.optim.Optimizer {self.class_name!r}. "
            f"It has: {listed}{broken}",
            name=str(self),
            known=tuple(known),
        )


def optimizers_of(source: Source, failed: list[str] | None = None) -> dict[str, type[torch.optim.Optimizer]]:
    """Return every optimizer class of a source by its name.

    Args:
        source: the package; it is imported.
        failed: modules that cannot be imported are added to it, with the reason.

    Example:
        >>> "NAdam" in optimizers_of(SOURCES["torch"])
        True
    """
    by_name: dict[str, type[torch.optim.Optimizer]] = {}
    for module in _imported(source, [] if failed is None else failed):
        by_name = {**_optimizers_of(module), **by_name}
    return by_name


def _imported(source: Source, failed: list[str]) -> Iterator[ModuleType]:
    """Yield the modules of a source that can be imported; the others are added to `failed`, with the reason."""
    for module in source.modules:
        try:
            yield importlib.import_module(module)
        except ImportError as error:
            failed.append(f"{module} ({error})")
        except Exception as error:  # noqa: BLE001 - a module may fail in any way
            failed.append(f"{module} ({type(error).__name__}: {error})")


def _optimizers_of(module: ModuleType) -> dict[str, type[torch.optim.Optimizer]]:
    return {
        name: value
        for name, value in vars(module).items()
        if inspect.isclass(value)
        and issubclass(value, torch.optim.Optimizer)
        and value is not torch.optim.Optimizer
    }
