from accountant_service import epsilon

print(epsilon(delta=1e-5, noise_multiplier=20, sample_rate=1, steps=100, sampling="none").epsilon)
