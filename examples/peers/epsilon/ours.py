from accountant_service import epsilon

run = {"dataset_size": 60000, "batch_size": 600, "epochs": 10}
print(epsilon(delta=1e-5, noise_multiplier=1.1, **run).epsilon)
