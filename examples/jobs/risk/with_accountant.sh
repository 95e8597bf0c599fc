accountant noise-multiplier -q 0.01 -t 1000 --true-positive-rate 0.01 --false-positive-rate 0.001 --json
