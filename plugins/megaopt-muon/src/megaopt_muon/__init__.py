"""Muon and adaptive Muon as a megaopt plugin.

Public names are imported when they are first used: emerging-optimizers takes seconds to import.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from megaopt_core.plugin_api import resolve_lazily

if TYPE_CHECKING:
    from megaopt_muon.adaptive import TensorParallelAdaptiveMuon
    from megaopt_muon.coefficients import get_supported_coefficient_types, validate_coefficient_type
    from megaopt_muon.moments import get_supported_moment2_methods
    from megaopt_muon.muon import TensorParallelMuon
    from megaopt_muon.newton_schulz.iteration import NewtonSchulz
    from megaopt_muon.scale import get_muon_scale_factor
    from megaopt_muon.settings import AdaptiveMuonSettings, MuonSettings

__all__ = [
    "AdaptiveMuonSettings",
    "MuonSettings",
    "NewtonSchulz",
    "TensorParallelAdaptiveMuon",
    "TensorParallelMuon",
    "get_muon_scale_factor",
    "get_supported_coefficient_types",
    "get_supported_moment2_methods",
    "validate_coefficient_type",
]

_HOME = {
    "AdaptiveMuonSettings": "settings",
    "MuonSettings": "settings",
    "NewtonSchulz": "newton_schulz.iteration",
    "TensorParallelAdaptiveMuon": "adaptive",
    "TensorParallelMuon": "muon",
    "get_muon_scale_factor": "scale",
    "get_supported_coefficient_types": "coefficients",
    "get_supported_moment2_methods": "moments",
    "validate_coefficient_type": "coefficients",
}

if not TYPE_CHECKING:
    __getattr__, __dir__ = resolve_lazily(__name__, _HOME)
