"""All accounting methods by name, in the order in which they are shown."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from accountant_service.accounting.methods.adadp_rdp import AdadpRdp
from accountant_service.accounting.methods.advanced_composition import AdvancedComposition
from accountant_service.accounting.methods.base import Accountant
from accountant_service.accounting.methods.basic_composition import BasicComposition
from accountant_service.accounting.methods.gaussian_sampling_composition import (
    GaussianSamplingComposition,
)
from accountant_service.accounting.methods.gdp_clt import GdpClt
from accountant_service.accounting.methods.mma import ModifiedMomentsAccountant
from accountant_service.accounting.methods.moments_accountant import MomentsAccountant
from accountant_service.accounting.methods.moments_accountant_closed_form import (
    MomentsAccountantClosedForm,
)
from accountant_service.accounting.methods.optimal_composition import OptimalComposition
from accountant_service.accounting.methods.pld import Pld
from accountant_service.accounting.methods.subsampled_rdp import SubsampledRdp
from accountant_service.accounting.methods.zcdp import Zcdp

_ALL: Final[tuple[Accountant, ...]] = (
    Pld(),
    SubsampledRdp(),
    MomentsAccountant(),
    GaussianSamplingComposition(),
    OptimalComposition(),
    AdvancedComposition(),
    BasicComposition(),
    Zcdp(),
    AdadpRdp(),
    ModifiedMomentsAccountant(),
    MomentsAccountantClosedForm(),
    GdpClt(),
)

ACCOUNTANTS: Final[Mapping[str, Accountant]] = {each.name: each for each in _ALL}
DEFAULT_METHOD: Final = "pld"
