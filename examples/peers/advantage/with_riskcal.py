from riskcal.calibration import find_noise_multiplier_for_advantage_dpsgd

run = {"sample_rate": 600 / 60000, "num_steps": 1000}
print(find_noise_multiplier_for_advantage_dpsgd(advantage=0.1, **run))
