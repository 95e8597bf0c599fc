from accountant_service import noise_multiplier

run = {"dataset_size": 60000, "batch_size": 600, "epochs": 10}
print(noise_multiplier(epsilon=2, delta=1e-5, **run).noise_multiplier)
