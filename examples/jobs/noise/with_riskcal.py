from riskcal.accountants import CTDAccountant
from riskcal.calibration.blackbox import find_noise_multiplier_for_epsilon_delta

sigma = find_noise_multiplier_for_epsilon_delta(
    accountant=CTDAccountant, sample_rate=600 / 60000, num_steps=1000, epsilon=2, delta=1e-5
)
print(sigma)
