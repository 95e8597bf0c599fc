accountant epsilon -m '{"kind": "gaussian", "noise_multiplier": 4}' -m '{"kind": "dp_sgd", "noise_multiplier": 1.1, "dataset_size": 60000, "batch_size": 600, "epochs": 10}' -d 1e-5 --json
