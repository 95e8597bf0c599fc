import dp_accounting
from dp_accounting.pld import PLDAccountant


def run(noise_multiplier):
    step = dp_accounting.GaussianDpEvent(noise_multiplier)
    sampled = dp_accounting.PoissonSampledDpEvent(600 / 60000, step)
    return dp_accounting.SelfComposedDpEvent(sampled, 1000)


print(dp_accounting.calibrate_dp_mechanism(PLDAccountant, run, 2, 1e-5))
