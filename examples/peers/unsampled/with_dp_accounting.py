import dp_accounting
from dp_accounting.pld import PLDAccountant

accountant = PLDAccountant().compose(dp_accounting.GaussianDpEvent(20), 100)
print(accountant.get_epsilon(1e-5))
