import dp_accounting
from dp_accounting.pld import PLDAccountant

step = dp_accounting.PoissonSampledDpEvent(600 / 60000, dp_accounting.GaussianDpEvent(1.1))
accountant = PLDAccountant().compose(step, 1000)
print(accountant.get_epsilon(1e-5))
