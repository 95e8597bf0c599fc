"""All accounting methods by name, in the order in which they are shown."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from accountant_service.accountants.adadp_rdp import AdadpRdp
from accountant_service.accountants.advanced_composition import AdvancedComposition
from accountant_service.accountants.base import Accountant
from accountant_service.accountants.basic_composition import BasicComposition
from accountant_service.accountants.gaussian_sampling_composition import GaussianSamplingComposition
from accountant_service.accountants.gdp_clt import GdpClt
from accountant_service.accountants.mma import ModifiedMomentsAccountant
from accountant_service.accountants.moments_accountant import MomentsAccountant
from accountant_service.accountants.moments_accountant_closed_form import (
    MomentsAccountantClosedForm,
)
from accountant_service.accountants.optimal_composition import OptimalComposition
from accountant_service.accountants.pld import Pld
from accountant_service.accountants.subsampled_rdp import SubsampledRdp
from accountant_service.accountants.zcdp import Zcdp

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
