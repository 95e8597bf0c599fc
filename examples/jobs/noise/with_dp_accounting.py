from dp_accounting import (
    GaussianDpEvent,
    PoissonSampledDpEvent,
    SelfComposedDpEvent,
    calibrate_dp_mechanism,
)
from dp_accounting.pld import PLDAccountant


def run(sigma):
    step = PoissonSampledDpEvent(600 / 60000, GaussianDpEvent(sigma))
    return SelfComposedDpEvent(step, 1000)


print(calibrate_dp_mechanism(PLDAccountant, run, 2, 1e-5))
