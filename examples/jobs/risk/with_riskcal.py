from riskcal.calibration.dpsgd import find_noise_multiplier_for_err_rates

sigma = find_noise_multiplier_for_err_rates(
    alpha=0.001, beta=0.99, sample_rate=0.01, num_steps=1000
)
print(sigma)
