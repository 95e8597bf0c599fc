from dp_accounting import GaussianDpEvent, calibrate_dp_mechanism
from dp_accounting.pld import PLDAccountant

print(calibrate_dp_mechanism(PLDAccountant, GaussianDpEvent, 1, 1e-5))
