echo '{"kind": "dp_sgd", "noise_multiplier": 1.5, "sample_rate": 0.02, "steps": 500}' > second.json
accountant epsilon -n 60000 -b 600 -e 10 -s 1.1 -m @second.json -d 1e-5
