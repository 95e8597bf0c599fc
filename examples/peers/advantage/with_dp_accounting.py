import dp_accounting
from dp_accounting.pld import PLDAccountant
from scipy.optimize import brentq


def excess(noise_multiplier):
    step = dp_accounting.GaussianDpEvent(noise_multiplier)
    sampled = dp_accounting.PoissonSampledDpEvent(600 / 60000, step)
    return PLDAccountant().compose(sampled, 1000).get_delta(0) - 0.1


print(brentq(excess, 0.5, 10))
