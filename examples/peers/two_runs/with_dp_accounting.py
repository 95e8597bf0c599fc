import dp_accounting
from dp_accounting.pld import PLDAccountant

first = dp_accounting.PoissonSampledDpEvent(0.01, dp_accounting.GaussianDpEvent(1.1))
second = dp_accounting.PoissonSampledDpEvent(0.02, dp_accounting.GaussianDpEvent(1.5))
accountant = PLDAccountant().compose(first, 1000).compose(second, 500)
print(accountant.get_epsilon(1e-5))
