from dp_accounting import GaussianDpEvent, PoissonSampledDpEvent, SelfComposedDpEvent
from dp_accounting.pld import PLDAccountant

step = PoissonSampledDpEvent(600 / 60000, GaussianDpEvent(1.1))
accountant = PLDAccountant()
accountant.compose(SelfComposedDpEvent(step, 1000))
print(accountant.get_epsilon(1e-5))
