from riskcal.accountants import CTDAccountant
from riskcal.calibration import find_noise_multiplier_for_epsilon_delta

run = {"sample_rate": 600 / 60000, "num_steps": 1000}
print(find_noise_multiplier_for_epsilon_delta(CTDAccountant, epsilon=2, delta=1e-5, **run))
